"""Drafts by a model's own layer: what transformers' layer drafts, whatever has gone through the slots before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from engines import CPU_BACKENDS, drain, feed, prompt, tokens_of
from pocketllm import Engine, SamplingParams, SlotEngine
from pocketllm.cache.formats import KV_FORMATS
from pocketllm.engine.inputs import SlotTokens
from pocketllm.errors import ModelError
from pocketllm.kernels import reference
from ranks import ThreadRanks
from test_memory import tensors_below
from tiny_mtp import make_mtp

KINDS = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
MOST = 3
SIZES: dict[str, Any] = {"max_batch_size": 3, "max_context": 256, "page_size": 16, "prefill_chunk": 64, "device": "cpu"}
DRAFTS: dict[str, Any] = {"drafter": "mtp", "max_draft_tokens": MOST}


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of one chunk and of several, one of them a single token."""
    draw = random.Random(seed)
    return [
        (
            prompt(length, 10 * seed + i),
            SamplingParams(max_tokens=count, temperature=draw.choice([0.0, 0.9]), seed=i, ignore_eos=True),
        )
        for i, (length, count) in enumerate(((1, 30), (130, 25), (20, 1), (64, 28), (9, 7)))
    ]


def answers(running: Engine, seed: int = 1) -> list[list[int]]:
    names = [running.add_request(ids, params) for ids, params in requests(seed)]
    outputs = drain(running)
    for name in names:
        assert outputs[name][-1].error is None
    return [tokens_of(outputs[name]) for name in names]


class Watched:
    """In place of a runner's `propose`: notes what the layer drafts after which tokens; half of the drafts become the
    answers' own tokens, so that verify passes of every outcome come before the next."""

    def __init__(self, running: Engine, known: Sequence[list[int]]) -> None:
        self.running, self.known, self.draw = running, known, random.Random(5)
        running._speculation.payoff = None  # type: ignore[union-attr]  # always draft
        self.seen: list[tuple[list[int], list[int]]] = []
        self.propose = running.runner.propose
        running.runner.propose = self  # type: ignore[assignment, method-assign]

    def __call__(self, items: Sequence[SlotTokens]) -> torch.Tensor:
        drafts = self.propose(items).clone()
        for row, item in enumerate(items):
            request = self.running.scheduler.running[item.slot]
            self.seen.append((request.tokens_so_far(), drafts[row].tolist()))
            whole = next(known for known in self.known if known[: request.num_tokens] == request.tokens_so_far())
            right = whole[request.num_tokens : request.num_tokens + self.draw.randint(0, MOST)]
            drafts[row, : len(right)] = torch.tensor(right, dtype=torch.int64)
        return drafts


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_oracles_and_change_no_answer(kind: str, backend: str, tmp_path: Path) -> None:
    folder, oracle = make_mtp(kind, tmp_path)
    wanted = answers(Engine(folder, kernels=backend, **SIZES))
    running = Engine(folder, kernels=backend, **SIZES, **DRAFTS)
    known = [ids + answer for (ids, _), answer in zip(requests(1), wanted, strict=True)]
    watched = Watched(running, known)
    assert answers(running) == wanted
    assert running.stats.accepted_tokens > 10
    assert running.stats.drafted_tokens > running.stats.accepted_tokens
    same = [oracle.drafts(tokens, MOST) == drafts for tokens, drafts in watched.seen]
    assert len(same) > 20
    assert all(same)


@pytest.mark.parametrize("kv", [name for name in KV_FORMATS if name not in ("fp32", "fp16", "bf16")])
def test_drafts_in_every_kv_format(kv: str, tmp_path: Path) -> None:
    """The layer's part of the cache is stored as the others' is, so its drafts may differ from the oracle's: seldom."""
    folder, oracle = make_mtp("qwen3_5", tmp_path)
    wanted = answers(Engine(folder, kernels="reference", kv_cache_dtype=kv, **SIZES))
    running = Engine(folder, kernels="reference", kv_cache_dtype=kv, **SIZES, **DRAFTS)
    watched = Watched(running, [ids + answer for (ids, _), answer in zip(requests(1), wanted, strict=True)])
    assert answers(running) == wanted
    first = [oracle.drafts(tokens, 1) == drafts[:1] for tokens, drafts in watched.seen]
    assert sum(first) > 0.6 * len(first)


def test_ranks_draft_as_one(tmp_path: Path) -> None:
    folder, _ = make_mtp("qwen3_5", tmp_path)
    one = Engine(folder, kernels="reference", **SIZES, **DRAFTS)
    two = Engine(folder, kernels="reference", tensor_parallel=2, launch=ThreadRanks, threads=1, **SIZES, **DRAFTS)
    plain = answers(Engine(folder, kernels="reference", **SIZES))
    watched = [Watched(e, [ids + a for (ids, _), a in zip(requests(1), plain, strict=True)]) for e in (one, two)]
    assert answers(one) == answers(two) == plain
    assert watched[0].seen == watched[1].seen
    assert one.stats.accepted_tokens > 10
    assert two.stats == one.stats
    assert two.stats.drafted_tokens > 0


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_memory_is_the_plans_to_the_byte(backend: str, tmp_path: Path) -> None:
    folder, _ = make_mtp("qwen3_5", tmp_path)
    running = Engine(folder, kernels=backend, **SIZES, **DRAFTS)
    runner = running.runner
    held = [tensors_below(part) for part in (runner.model, runner.kv, runner.state.layers, running.sampler)]
    held.append(tensors_below([runner._drafts.states, runner._drafts._last]))  # type: ignore[union-attr]
    everything = {address: t for part in held for address, t in part.items()}
    assert sum(t.untyped_storage().nbytes() for t in everything.values()) == running.plan.resident
    assert running.plan.parts["drafts"] == 4 * (4 * 64 * 4 + 8)  # slots and the spare one, tokens, hidden size, bytes
    plain = Engine(folder, kernels=backend, **SIZES, max_draft_tokens=MOST)
    assert running.plan.kv.num_layers == plain.plan.kv.num_layers + 1
    assert plain.plan.parts["drafts"] == 0


def test_a_conversation_goes_on_and_branches(tmp_path: Path) -> None:
    """Turns in a caller's slot, a fork of it, and a snapshot returned to: answers are those without drafts."""
    folder, _ = make_mtp("qwen3_5", tmp_path)
    found: list[list[list[int]]] = []
    known: list[list[int]] = []
    for more in ({}, DRAFTS):
        running = Engine(folder, kernels="reference", num_snapshots=1, **SIZES, **more)
        if more:
            Watched(running, list(known))
        slot, texts = running.acquire_slot(200), []

        def turn(ids: list[int], slot: int, running: Engine = running) -> list[int]:
            name = running.add_request(ids, SamplingParams(max_tokens=9, ignore_eos=True), slot=slot)
            tokens = tokens_of(drain(running)[name])
            known.append(ids + tokens)
            return tokens

        texts.append(turn(prompt(20), slot))
        snapshot = running.save_snapshot(slot, 0)
        history = [*prompt(20), *texts[0], 7, 8]
        child = running.fork_slot(slot)
        texts += [turn(history, slot), turn([*history, 9], child)]
        running.restore_snapshot(snapshot)
        texts.append(turn([*history, 11], slot))
        found.append(texts)
    assert found[0] == found[1]
    assert running.stats.accepted_tokens > 5


class Turns:
    """In place of a `Payoff`: some verify passes, some decode passes, and so on."""

    def __init__(self) -> None:
        self.asked, self.noted = 0, [0, 0]

    def drafts_pay(self, size: int) -> bool:
        self.asked += 1
        return self.asked % 5 < 3

    def note(self, size: int, verified: bool, seconds: float, tokens: float) -> None:
        assert 0 < seconds < 60
        assert (1 <= tokens <= 1 + MOST) if verified else tokens == 1
        self.noted[verified] += 1


def test_rests_between_drafts(tmp_path: Path) -> None:
    """Decode passes feed the layer's part of the cache, too: drafts after them are the oracle's."""
    folder, oracle = make_mtp("qwen3_5", tmp_path)
    ids, params = prompt(30), SamplingParams(max_tokens=60, ignore_eos=True)
    plain = Engine(folder, kernels="reference", **SIZES)
    plain.add_request(ids, params)
    (wanted,) = map(tokens_of, drain(plain).values())
    running = Engine(folder, kernels="reference", **SIZES, **DRAFTS)
    watched, turns = Watched(running, [ids + wanted]), Turns()
    watched.draw = random.Random(1)
    running._speculation.payoff = turns  # type: ignore[union-attr, assignment]
    running.add_request(ids, params)
    assert [tokens_of(outputs) for outputs in drain(running).values()] == [wanted]
    assert min(turns.noted) > 5
    first = [oracle.drafts(tokens, 1) == drafts[:1] for tokens, drafts in watched.seen]
    assert sum(first) >= 0.8 * len(first)  # what was accepted just before a rest was taken in as drafted


def test_the_layer_goes_on_from_the_last_token_kept(tmp_path: Path) -> None:
    """After a verify pass of which a part is kept, what comes next has the layer's K and V of a prompt never cut."""
    folder, _ = make_mtp("qwen3_5", tmp_path)
    slots: Any = SlotEngine(folder, kernels="reference", **SIZES, **DRAFTS)
    ids = prompt(26)
    for slot, kind in enumerate(("decode", "prefill")):
        assert slots.acquire_slot() == slot
        feed(slots, {slot: ids[:20]})
        feed(slots, {slot: [*ids[20:23], 7]}, "verify")
        slots.commit([slot], [3])
        feed(slots, {slot: ids[23 : 24 if kind == "decode" else 26]}, kind)
    whole = slots.acquire_slot()
    feed(slots, {whole: ids})
    layer = slots.runner.kv.layers[-1]
    wanted = reference.dequantize(layer, whole, 26)
    for slot, end in ((0, 24), (1, 26)):
        for got, of_whole in zip(reference.dequantize(layer, slot, end), wanted, strict=True):
            torch.testing.assert_close(got[23:], of_whole[23:end], atol=2e-5, rtol=2e-5)


def test_passes_beside_a_prompts_are_not_timed(tmp_path: Path) -> None:
    folder, _ = make_mtp("qwen3_5", tmp_path)
    running: Any = Engine(folder, kernels="reference", **SIZES, **DRAFTS)
    running._speculation.payoff = turns = Turns()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    running.add_request(prompt(9), params)
    for _ in range(3):
        running.step()
    before = sum(turns.noted)
    running.add_request(prompt(150, 1), params)
    for _ in range(3):  # its chunks
        running.step()
    assert before == sum(turns.noted) == 2
    running.step()
    assert sum(turns.noted) == 3


def test_nothing_is_drafted_for_a_last_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = make_mtp("qwen3_5", tmp_path)
    running = Engine(folder, kernels="reference", **SIZES, **DRAFTS)
    asked, propose = [], running.runner.propose

    def count(items: Any) -> Any:
        asked.append(len(items))
        return propose(items)

    monkeypatch.setattr(running.runner, "propose", count)
    for tokens in (1, 2, 3):
        running.add_request(prompt(9), SamplingParams(max_tokens=tokens, ignore_eos=True))
        drain(running)
        assert len(asked) == max(tokens - 2, 0)


def test_a_failing_layer_costs_drafts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = make_mtp("qwen3_5", tmp_path)
    wanted = answers(Engine(folder, kernels="reference", **SIZES))
    running = Engine(folder, kernels="reference", **SIZES, **DRAFTS)
    asked: list[Any] = []

    def fail(items: Any) -> Any:
        asked.append(items)
        raise RuntimeError("no memory")

    monkeypatch.setattr(running.runner, "propose", fail)
    with pytest.warns(RuntimeWarning, match="no drafts from now on, and slower answers: RuntimeError: no memory"):
        assert answers(running) == wanted
    assert len(asked) == 1
    assert running.stats.drafted_tokens == 0
    assert running.stats.free_slots == SIZES["max_batch_size"]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_a_model_without_the_layer_is_refused(kind: str, tmp_path: Path) -> None:
    folder, _ = tiny_models.make(kind, tmp_path)
    with pytest.raises(ModelError, match="no layer for multi-token prediction"):
        Engine(folder, kernels="reference", **SIZES, **DRAFTS)


def test_a_layer_that_is_not_whole_is_named(tmp_path: Path) -> None:
    folder, _ = make_mtp("qwen3_5", tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["mtp.norm.weight"]
    tensors["mtp.layers.0.self_attn.q_norm.weight"] = torch.ones(3)
    save_file(tensors, file)
    with pytest.raises(ModelError) as error:
        Engine(folder, kernels="reference", **SIZES, **DRAFTS)
    assert "mtp.norm.weight [64] is missing" in str(error.value)
    assert "mtp.layers.0.self_attn.q_norm.weight is [3]" in str(error.value)
    assert answers(Engine(folder, kernels="reference", **SIZES))  # which does not need it


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_drafts_on_a_gpu(tmp_path: Path) -> None:
    """By recorded passes, and the same as the reference's."""
    folder, _ = make_mtp("qwen3_5", tmp_path)
    seen = []
    wanted = answers(Engine(folder, kernels="reference", **SIZES))
    for sizes in (
        {**SIZES, "kernels": "reference"},
        {**SIZES, "device": "cuda", "kernels": "triton", "dtype": "float32"},
    ):
        running = Engine(folder, **sizes, **DRAFTS)
        watched = Watched(running, [ids + answer for (ids, _), answer in zip(requests(1), wanted, strict=True)])
        assert answers(running) == wanted
        assert running.stats.accepted_tokens > 10
        seen.append(watched.seen)
    assert seen[0] == seen[1]
