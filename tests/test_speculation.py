"""Drafts that a verify pass checks: answers are what they are without, however good or bad the drafts."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines import drain, engine, prompt, tokens_of
from pocketllm import LLM, Engine, SamplingParams
from pocketllm.engine import speculation
from pocketllm.engine.drafters import NgramDrafter, TokensOf
from pocketllm.errors import OptionError
from pocketllm.options import MOST_VERIFIED
from pocketllm.parallel import SMALL_BATCH
from ranks import ThreadRanks
from servers import live
from test_faults import GREEDY, POISON, alone, make, nan_on_poison, raise_on_poison, sabotaged

MOST = 3
each_kind = pytest.mark.parametrize("kind", ["qwen2", "qwen3_5"])  # without and with recurrent state
each_backend = pytest.mark.parametrize("backend", ["reference", "numba"])


class Knowing:
    """Drafts from answers that are known, of which some tokens are turned into others."""

    def __init__(self, sequences: list[list[int]], wrong: float) -> None:
        self.sequences, self.wrong, self.draw = sequences, wrong, random.Random(3)

    def propose(self, tokens: TokensOf, length: int, most: int) -> list[int]:
        held = list(tokens(0, length))
        for sequence in self.sequences:
            if sequence[:length] == held:
                right = sequence[length : length + self.draw.randint(0, most)]
                return [t if self.draw.random() >= self.wrong else (t + 1) % 500 for t in right]
        return []


class Wrong:
    def propose(self, tokens: TokensOf, length: int, most: int) -> list[int]:
        return [501] * most


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    draw = random.Random(seed)
    return [
        (
            prompt(draw.randrange(1, 40), 100 * seed + i),
            SamplingParams(
                max_tokens=draw.choice([1, 2, 5, 30]),
                min_tokens=draw.choice([0, 0, 1]),
                temperature=draw.choice([0.0, 0.8]),
                top_k=draw.choice([0, 20]),
                seed=draw.randrange(1000),
                stop_token_ids=tuple(draw.sample(range(500), draw.choice([0, 30]))),
                repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
                logprobs=draw.choice([None, 2]),
                ignore_eos=draw.random() < 0.5,
            ),
        )
        for i in range(10)
    ]


def answers(running: Engine, seed: int) -> dict[str, Any]:
    """Of requests that arrive a few steps apart, two of them turns in a slot of the caller's."""
    held, found = running.acquire_slot(200), {}
    for i, (ids, params) in enumerate(requests(seed)):
        running.add_request(ids, params, request_id=f"r{i}")
        if i == 2:
            running.add_request(prompt(9, seed), SamplingParams(max_tokens=7), request_id="a", slot=held)
        for output in [o for _ in range(3) for o in running.step()]:
            found.setdefault(output.request_id, []).append(output)
    for request_id, outputs in drain(running).items():
        found.setdefault(request_id, []).extend(outputs)
    length = running.slot_length(held)
    running.add_request(
        [*prompt(9, seed), *tokens_of(found["a"])], SamplingParams(max_tokens=9), request_id="b", slot=held
    )
    found |= drain(running)
    assert running.stats.free_slots == running.plan.kv.num_slots - 1
    running.release_slot(held)
    ends = {
        name: (
            tokens_of(outputs),
            [x for o in outputs for x in o.logprobs],
            outputs[-1].finish_reason,
            outputs[-1].slot,
        )
        for name, outputs in found.items()
    }
    return ends | {"length": length, "cached": found["b"][0].num_cached_tokens}


def comparable(found: dict[str, Any], backend: str) -> dict[str, Any]:
    """Without slots, as which one a request gets depends on when others end; of the reference, whose products may round
    differently in other batches, without log-probabilities."""
    kept = slice(0, 3) if backend == "numba" else slice(0, 3, 2)
    return {name: value[kept] if isinstance(value, tuple) else value for name, value in found.items()}


@each_kind
@each_backend
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_answers_are_the_same(
    kind: str, backend: str, wrong: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = engine(kind, tmp_path, kernels=backend)
    wanted = answers(plain, seed=1)
    known = [ids + wanted[f"r{i}"][0] for i, (ids, _) in enumerate(requests(1))]
    known += [prompt(9, 1) + wanted["a"][0] + wanted["b"][0]]
    monkeypatch.setitem(speculation.DRAFTERS, "ngram", lambda: Knowing(known, wrong))
    drafting = engine(kind, tmp_path, kernels=backend, drafter="ngram", max_draft_tokens=MOST)
    found = answers(drafting, seed=1)
    assert comparable(found, backend) == comparable(wanted, backend)
    stats = drafting.stats
    assert stats.drafted_tokens > 0
    assert (stats.accepted_tokens > 0) == (wrong < 1)
    assert stats.output_tokens == plain.stats.output_tokens
    if wrong == 0:
        assert stats.accepted_tokens >= stats.drafted_tokens - 12  # one that ends its request is not computed on
        assert stats.steps < plain.stats.steps
    assert not drafting._speculation._guesses  # type: ignore[union-attr]
    assert not drafting._speculation._drafted  # type: ignore[union-attr]


@each_kind
def test_ranks_verify_drafts_too(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"tensor_parallel": 2, "launch": ThreadRanks, "kernels": "reference", "threads": 1}
    plain = engine(kind, tmp_path, **settings)
    wanted = answers(plain, seed=2)
    plain.close()
    known = [ids + wanted[f"r{i}"][0] for i, (ids, _) in enumerate(requests(2))]
    monkeypatch.setitem(speculation.DRAFTERS, "ngram", lambda: Knowing(known, 0.2))
    drafting = engine(kind, tmp_path, drafter="ngram", max_draft_tokens=MOST, **settings)
    assert comparable(answers(drafting, seed=2), "reference") == comparable(wanted, "reference")
    assert drafting.stats.accepted_tokens > 0
    drafting.close()


@each_kind
@pytest.mark.parametrize("action", [raise_on_poison, nan_on_poison])
def test_a_draft_that_a_kernel_fails_on_is_just_wrong(
    kind: str, action: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Poisonous:
        def propose(self, tokens: TokensOf, length: int, most: int) -> list[int]:
            return [POISON] * most

    monkeypatch.setitem(speculation.DRAFTERS, "ngram", Poisonous)
    running = make(kind, tmp_path, sabotaged(action), drafter="ngram", max_draft_tokens=MOST)
    prompts = [prompt(20, 1, POISON), prompt(30, 2, POISON)]
    names = [running.add_request(ids, GREEDY) for ids in prompts]
    outputs = drain(running)
    assert running.stats.drafted_tokens > 0
    for name, ids in zip(names, prompts, strict=True):
        assert outputs[name][-1].finish_reason == "length"
        assert tokens_of(outputs[name]) == alone(kind, tmp_path / name, ids)
    assert running.slots.num_free == 3
    assert running.slots.pages.available == running.slots.pages.num_pages


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_is_not_finite_ends_its_request_there(
    temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the tokens before it, whether rows are sampled at once (temperature 0) or one by one; the others go on."""
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
    plain = engine("qwen3_5", tmp_path, kernels="reference")
    for i in range(2):
        plain.add_request(prompt(9, i), params, request_id=f"r{i}")
    wanted = {name: tokens_of(outputs) for name, outputs in drain(plain).items()}
    known = [prompt(9, i) + wanted[f"r{i}"] for i in range(2)]
    monkeypatch.setitem(speculation.DRAFTERS, "ngram", lambda: Knowing(known, 0.0))
    drafting = engine("qwen3_5", tmp_path, kernels="reference", drafter="ngram", max_draft_tokens=3)
    run = drafting.passes.run
    before: list[int] = []  # tokens of its answer that are in the cache when a row is spoiled

    def spoiled(kind: Any, items: Any, histories: Any, **named: Any) -> Any:
        results = run(kind, items, histories, **named)
        if kind == "verify" and not before:
            before.append(items[0].start - len(prompt(9)))
            with torch.inference_mode():
                results[0].logits[1] = float("nan")
        return results

    monkeypatch.setattr(drafting.passes, "run", spoiled)
    for i in range(2):
        drafting.add_request(prompt(9, i), params, request_id=f"r{i}")
    found = drain(drafting)
    assert "not finite" in str(found["r0"][-1].error)
    assert tokens_of(found["r0"]) == wanted["r0"][: before[0] + 2]  # the one that goes in first, and what its row gives
    assert tokens_of(found["r1"]) == wanted["r1"]
    assert drafting.stats.free_slots == 4


@pytest.mark.parametrize("pool", [None, 96])
def test_a_full_slot_and_a_full_pool_end_answers(pool: int | None, tmp_path: Path) -> None:
    found = []
    for more in ({}, {"drafter": "ngram", "max_draft_tokens": MOST}):
        running = engine("qwen2", tmp_path, max_batch_size=2, max_context=64, kv_tokens=pool, **more)
        for seed in (0, 1):
            ids = prompt(4, seed) * 5  # drafts from the first token on
            running.add_request(ids, SamplingParams(ignore_eos=True, max_tokens=None), request_id=f"r{seed}")
        outputs = drain(running)
        assert all(o[-1].finish_reason == "length" and o[-1].error is None for o in outputs.values())
        found.append({name: tokens_of(o) for name, o in outputs.items()})
    for name, tokens in found[0].items():
        others = found[1][name]
        length = min(len(tokens), len(others))
        assert tokens[:length] == others[:length]
        # Of a pool that is too small, who gets the rest depends on who is there first.
        assert len(tokens) == len(others) == 45 or pool is not None
    assert sum(map(len, found[0].values())) <= sum(map(len, found[1].values())) + 2 * MOST


def test_a_constraint_sees_each_token_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Even:
        """Only even tokens."""

        finished = False

        def __init__(self) -> None:
            self.seen: list[int] = []

        def allowed(self) -> Any:
            import torch

            return torch.full((16,), 0x55555555, dtype=torch.int32)

        def accept(self, token: int) -> None:
            self.seen.append(token)

    found = []
    for more in ({}, {"drafter": "ngram", "max_draft_tokens": MOST}):
        running, constraint = engine("qwen2", tmp_path, **more), Even()
        running.add_request(prompt(4, 0) * 4, SamplingParams(max_tokens=40, ignore_eos=True), constraint=constraint)
        tokens = tokens_of(drain(running)["request-0"])
        assert constraint.seen == tokens
        found.append(tokens)
    assert found[0] == found[1]
    assert all(token % 2 == 0 for token in found[0])


def test_stop_strings_end_where_they_do_without_drafts() -> None:
    texts = ["one two three four, one two three four, one two three", "a b c d a b c d a b"]
    params = SamplingParams(max_tokens=60, stop=("three", "d a"), logprobs=1)
    found = []
    for more in ({}, {"drafter": "ngram", "max_draft_tokens": 6}):
        llm = LLM(max_batch_size=2, max_context=256, **more)
        found.append(
            [
                (g.text, g.token_ids, [x.chosen for x in g.logprobs], g.finish_reason)
                for g in llm.generate(texts, params)
            ]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "ngram"}, "max_draft_tokens = 0.*needs 1 to 63"),
        ({"drafter": "ngram", "max_draft_tokens": 64}, "max_draft_tokens = 64.*needs 1 to 63"),
        ({"drafter": "model", "max_draft_tokens": 2}, "choose one of none, ngram"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        engine("qwen2", tmp_path, **options)


@pytest.mark.parametrize(("slots", "drafts"), [(16, True), (17, False)])
def test_no_pass_verifies_more_rows_than_keep_their_bits(
    slots: int, drafts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(speculation.DRAFTERS, "ngram", Wrong)
    running = engine("qwen2", tmp_path, max_batch_size=17, max_context=64, drafter="ngram", max_draft_tokens=MOST)
    for seed in range(slots):
        running.add_request(prompt(4, seed) * 4, SamplingParams(max_tokens=12, ignore_eos=True))
    drain(running)
    assert (running.stats.drafted_tokens > 0) == drafts


@pytest.mark.parametrize(("drafting", "verified"), [(1, False), (2, True), (3, True)])
def test_half_of_the_slots_must_have_drafts(
    drafting: int, verified: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Some:
        def propose(self, tokens: TokensOf, length: int, most: int) -> list[int]:
            return [501] * most if tokens(0, 1)[0] < drafting else []

    monkeypatch.setitem(speculation.DRAFTERS, "ngram", Some)
    running = engine("qwen2", tmp_path, drafter="ngram", max_draft_tokens=MOST)
    for first in range(3):
        running.add_request([first, *prompt(5, first)], SamplingParams(max_tokens=12, ignore_eos=True))
    drain(running)
    assert (running.stats.drafted_tokens > 0) == verified


def test_the_options_limit_is_that_of_passes() -> None:
    assert MOST_VERIFIED == SMALL_BATCH


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 6))
def test_ngrams_are_the_last_that_fit(tokens: list[int], step: int, most: int) -> None:
    drafter, n = NgramDrafter(), NgramDrafter.N

    def between(start: int, end: int) -> list[int]:
        return tokens[start:end]

    for length in range(step, len(tokens) + 1, step):
        held, wanted = tokens[:length], []
        for end in range(length - 1, n - 1, -1):
            if length > n and held[end - n : end] == held[-n:]:
                wanted = held[end : end + most]
                break
        assert drafter.propose(between, length, most) == wanted


def test_drafts_that_fail_are_followed_by_longer_and_longer_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    monkeypatch.setitem(speculation.DRAFTERS, "ngram", Wrong)
    running = engine("qwen2", tmp_path, drafter="ngram", max_draft_tokens=MOST)
    run = running.passes.run
    monkeypatch.setattr(
        running.passes, "run", lambda kind, *a, **k: (asked.append(kind == "verify"), run(kind, *a, **k))[1]
    )
    running.add_request(prompt(5, 1), SamplingParams(max_tokens=60, ignore_eos=True))
    drain(running)
    verified = [i for i, is_verify in enumerate(asked) if is_verify]
    gaps = [b - a - 1 for a, b in pairwise(verified)]
    assert gaps == [1, 2, 4, 8, 16, 16]


def test_a_server_answers_the_same_and_counts_drafts(embedded_model: Path) -> None:
    found = []
    for more in ({}, {"drafter": "ngram", "max_draft_tokens": 4}):
        with live(embedded_model, {"kernels": "numba", **more}) as server:
            answered = []
            for temperature in (0.0, 1.0):
                body = {"prompt": "a b c d e f g a b c d e f g a b c", "max_tokens": 40, "seed": 3, "stop": ["f g a"]}
                answer = server.post("/v1/completions", {**body, "temperature": temperature, "logprobs": 1}).json()
                answered.append((answer["choices"], answer["usage"]))
            found.append(answered)
            metrics = server.get("/metrics").text
            (drafted,) = re.findall(r"^pocketllm:spec_decode_num_draft_tokens_total\{.*\} (\S+)$", metrics, re.M)
            assert (float(drafted) > 0) == bool(more)
    assert found[0] == found[1]
