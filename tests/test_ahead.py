"""The next decode pass launched before the host has read the tokens: nothing but the time may differ."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import engine, feed, prompt
from pocketllm import Engine, SamplingParams
from pocketllm.engine.request import RequestOutput
from ranks import ThreadRanks

KINDS = ("qwen2", "qwen3_5")  # without and with recurrent state
each_kind = pytest.mark.parametrize("kind", KINDS)
each_backend = pytest.mark.parametrize("backend", ["reference", "numba"])

Found = dict[str, list[Any]]


def note(found: Found, outputs: list[RequestOutput]) -> None:
    for output in outputs:
        found.setdefault(output.request_id, []).extend(output.new_token_ids)
        if output.finished:
            found[output.request_id].append((output.finish_reason, type(output.error).__name__))


def workload(running: Engine, seed: int) -> Found:
    """Arrivals, ends by length and by stop tokens, aborts, penalties and log-probabilities, in an order of the seed."""
    draw, found = random.Random(seed), {}
    held = running.acquire_slot(200)
    for step in range(60):
        if step < 40 and draw.random() < 0.3:
            params = SamplingParams(
                max_tokens=draw.choice([1, 2, 5, 30]),
                temperature=draw.choice([0.0, 0.8]),
                seed=draw.randrange(1000),
                stop_token_ids=tuple(draw.sample(range(500), draw.choice([0, 30]))),
                repetition_penalty=draw.choice([1.0] * 8 + [1.3]),
                logprobs=draw.choice([None] * 8 + [2]),
                ignore_eos=draw.random() < 0.5,
            )
            running.add_request(prompt(draw.randrange(1, 40), step), params, request_id=f"r{step}")
        if step in (5, 25):
            params = SamplingParams(max_tokens=8, ignore_eos=step == 5)
            running.add_request(prompt(12, 99), params, request_id=f"bound{step}", slot=held)
        if draw.random() < 0.1 and running._requests:
            output = running.end_request(draw.choice(sorted(running._requests)))
            note(found, [output] if output is not None else [])
        note(found, running.step())
    while running.has_work:
        note(found, running.step())
    assert running.stats.free_slots == running.plan.kv.num_slots - 1
    running.release_slot(held)
    return found


@each_kind
def test_other_ranks_get_the_tokens_on_the_device(kind: str, tmp_path: Path) -> None:
    """Of the sizes that both ranks can share: the tokens travel as a tensor, all else as before."""
    running = engine(kind, tmp_path, tensor_parallel=2, launch=ThreadRanks, kernels="reference", threads=1)
    launched = _count(running)
    running.looks_ahead = False
    wanted = workload(running, 5)
    running.looks_ahead = True
    assert workload(running, 5) == wanted
    assert launched() >= 5
    running.close()


@each_backend
@each_kind
def test_a_workload_gives_the_same_outputs(kind: str, backend: str, tmp_path: Path) -> None:
    running = engine(kind, tmp_path, kernels=backend, max_batch_size=4)
    launched = _count(running)
    for seed in range(3):
        running.looks_ahead = False
        wanted = workload(running, seed)
        running.looks_ahead = True
        assert workload(running, seed) == wanted
    assert launched() > 40


def _count(running: Engine) -> Callable[[], int]:
    """How many passes have been launched ahead since."""
    count, decode_tokens = [0], running.passes.decode_tokens

    def counted(*arguments: Any) -> Any:
        count[0] += 1
        return decode_tokens(*arguments)

    running.passes.decode_tokens = counted  # type: ignore[method-assign]
    return lambda: count[0]


@each_kind
def test_a_callers_slot_goes_on_after_an_abort(kind: str, tmp_path: Path) -> None:
    """With the same tokens. Where recurrent state has gone a token too far, the slot begins anew."""

    def turns(looks_ahead: bool) -> list[int]:
        running = engine(kind, tmp_path, max_batch_size=2)
        running.looks_ahead = looks_ahead
        slot = running.acquire_slot(120)
        first = SamplingParams(max_tokens=30, ignore_eos=True)
        running.add_request(prompt(20), first, request_id="first", slot=slot)
        found: Found = {}
        for _ in range(8):
            note(found, running.step())
        running.end_request("first")
        held = prompt(20) + found["first"][:-1]
        kept = 0 if looks_ahead and running.has_state else len(held)
        assert running.slots.token_ids[slot] == held[:kept]
        running.add_request([*held, 3, 4], SamplingParams(max_tokens=10, ignore_eos=True), request_id="next", slot=slot)
        while running.has_work:
            for output in running.step():
                assert output.num_cached_tokens == kept
                note(found, [output])
        return found["first"] + found["next"]

    assert turns(True) == turns(False)


@each_kind
def test_a_callers_slot_keeps_its_tokens_when_its_request_ends_beside_others(kind: str, tmp_path: Path) -> None:
    """At its last step another prompt is computed, so nothing is launched ahead; what was before has been used."""
    running, found = engine(kind, tmp_path, max_batch_size=2), {}
    running.looks_ahead = True
    slot = running.acquire_slot(60)
    running.add_request(prompt(9), SamplingParams(max_tokens=6, ignore_eos=True), request_id="r", slot=slot)
    for _ in range(5):
        note(found, running.step())
    running.add_request(prompt(30, 3), SamplingParams(max_tokens=2))
    while running.has_work:
        note(found, running.step())
    assert running.slots.token_ids[slot] == prompt(9) + found["r"][:5]


@each_kind
def test_a_callers_passes_in_between_do_not_spoil_it(kind: str, tmp_path: Path) -> None:
    def run(looks_ahead: bool) -> Found:
        running, found = engine(kind, tmp_path, max_batch_size=2), {}
        running.looks_ahead = looks_ahead
        slot = running.acquire_slot(60)
        running.add_request(prompt(9), SamplingParams(max_tokens=20, ignore_eos=True), request_id="r")
        feed(running, {slot: prompt(5, 7)})
        while running.has_work:
            note(found, running.step())
            feed(running, {slot: [11]}, "decode")  # of the same shape
        return found

    assert run(True) == run(False)


@each_kind
def test_a_pass_that_fails_when_launched_ahead_is_run_again(kind: str, tmp_path: Path) -> None:
    running, found = engine(kind, tmp_path, max_batch_size=2), {}
    running.looks_ahead = False
    running.add_request(prompt(9), SamplingParams(max_tokens=12, ignore_eos=True), request_id="r")
    while running.has_work:
        note(found, running.step())
    running.looks_ahead, fails = True, [3, 6]
    decode_tokens = running.runner.decode_tokens  # type: ignore[union-attr]
    calls = 0

    def sometimes(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits = decode_tokens(*arguments)  # and what it did to the state is done
        if calls in fails:
            raise RuntimeError("out of luck")
        return logits

    running.runner.decode_tokens = sometimes  # type: ignore[method-assign, union-attr]
    again: Found = {}
    running.add_request(prompt(9), SamplingParams(max_tokens=12, ignore_eos=True), request_id="r")
    while running.has_work:
        note(again, running.step())
    assert again == found
    assert calls == 11
