"""Whatever goes wrong with one request is that request's result; slots come back and the others' tokens are unchanged."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from engines import CPU_BACKENDS, drain, engine, feed, prompt, tokens_of
from pocketllm import Engine, SamplingParams, SlotRequest
from pocketllm.engine.inputs import SlotTokens
from pocketllm.engine.passes import PassRunner
from pocketllm.errors import (
    ModelError,
    NoFreeSlot,
    OptionError,
    OutOfPages,
    QueueFull,
    RequestError,
    SlotError,
)
from pocketllm.kernels import reference, select_kernels

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
KINDS = ("qwen3", "qwen3_5")
POISON = 499  # a token id that makes the sabotaged backend fail


class Injected(RuntimeError):
    pass


def sabotaged(action: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """The reference backend with one operation replaced: `action(token_ids, result)` sees every embedding look-up."""
    module = types.SimpleNamespace(**{name: getattr(reference, name) for name in reference.__all__})

    def embedding(token_ids: Tensor, weight: Any, dtype: object) -> Tensor:
        return action(token_ids, reference.embedding(token_ids, weight, dtype))

    module.embedding = embedding
    return module


def raise_on_poison(token_ids: Tensor, rows: Tensor) -> Tensor:
    if (token_ids == POISON).any():
        raise Injected("injected in a kernel")
    return rows


def nan_on_poison(token_ids: Tensor, rows: Tensor) -> Tensor:
    return rows.masked_fill((token_ids == POISON).unsqueeze(1), float("nan"))


def make(kind: str, tmp_path: Path, backend: Any = None, **options: Any) -> Engine:
    folder, _ = tiny_models.make(kind, tmp_path)
    options = {"max_batch_size": 3, "max_context": 128, "page_size": 16, "prefill_chunk": 64, **options}
    return Engine(folder, backend=backend, **options)


def alone(kind: str, tmp_path: Path, ids: list[int]) -> list[int]:
    single = make(kind, tmp_path, max_batch_size=1, kernels="reference")
    request = single.add_request(ids, GREEDY)
    return tokens_of(drain(single)[request])


@pytest.mark.parametrize("action", [raise_on_poison, nan_on_poison])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_in_a_prompt_fails_that_request_only(kind: str, action: Any, tmp_path: Path) -> None:
    running = make(kind, tmp_path, sabotaged(action))
    good = [prompt(20, 1, POISON), prompt(90, 2, POISON)]
    bad = [*prompt(10, 3, POISON), POISON, *prompt(5, 4, POISON)]
    names = [running.add_request(ids, GREEDY) for ids in (good[0], bad, good[1])]
    outputs = drain(running)
    (failed,) = [o for o in outputs[names[1]] if o.finished]
    assert failed.finish_reason == "error"
    assert isinstance(failed.error, RequestError)
    assert ("Injected: injected in a kernel" if action is raise_on_poison else "not finite") in str(failed.error)
    for name, ids in ((names[0], good[0]), (names[2], good[1])):
        assert tokens_of(outputs[name]) == alone(kind, tmp_path / name, ids)
    assert running.slots.num_free == 3
    assert running.slots.pages.available == running.slots.pages.num_pages


@pytest.mark.parametrize("kind", ["decode", "verify"])
def test_slots_tried_alone_keep_their_logits(kind: Any) -> None:
    class Replayed:
        """A runner whose passes of one shape leave their logits in the same place, and which fails for slot 2."""

        logits = torch.zeros(1, 8)

        def apply(self, edits: Any, resets: Any) -> None:
            pass

        def forward(self, kind: Any, items: list[SlotTokens], *, all_logits: bool = False) -> Tensor:
            if any(item.slot == 2 for item in items):
                raise Injected("slot 2")
            return self.logits.fill_(items[0].slot)

    slots = types.SimpleNamespace(take_changes=lambda: (None, []))
    items = [SlotTokens(slot, 0, [1]) for slot in range(4)]
    passes = PassRunner(Replayed(), slots, 64, has_state=False)  # type: ignore[arg-type]
    results = passes.run(kind, items, [list] * 4)
    assert [None if r.logits is None else r.logits.flatten()[0].item() for r in results] == [0, 1, None, 3]
    assert "slot 2" in str(results[2].error)


@pytest.mark.parametrize("action", [raise_on_poison, nan_on_poison])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_while_decoding_fails_that_request_only(kind: str, action: Any, tmp_path: Path) -> None:
    running = make(kind, tmp_path, sabotaged(action))
    good = [prompt(20, 1, POISON), prompt(30, 2, POISON)]
    names = [running.add_request(good[0], GREEDY)]
    forced = SamplingParams(max_tokens=12, logit_bias={POISON: 100.0}, ignore_eos=True)
    bad = running.add_request(prompt(10, 3, POISON), forced)
    names.append(running.add_request(good[1], GREEDY))
    outputs = drain(running)
    assert tokens_of(outputs[bad]) == [POISON]
    assert outputs[bad][-1].finish_reason == "error"
    for name, ids in zip(names, good, strict=True):
        assert tokens_of(outputs[name]) == alone(kind, tmp_path / name, ids)
        assert outputs[name][-1].finish_reason == "length"
    assert running.slots.num_free == 3
    again = running.add_request(good[0], GREEDY)  # in the slot that failed, or another: as if nothing had been
    assert tokens_of(drain(running)[again]) == tokens_of(outputs[names[0]])


@pytest.mark.parametrize("action", [raise_on_poison, nan_on_poison])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_explicit_call_leaves_the_slot_as_it_was(kind: str, action: Any, tmp_path: Path) -> None:
    slots = make(kind, tmp_path, sabotaged(action), max_draft_tokens=2)
    a, b = slots.acquire_slot(), slots.acquire_slot()
    feed(slots, {a: prompt(20, 1, POISON)})
    feed(slots, {b: prompt(20, 2, POISON)})
    twin = slots.fork_slot(a)
    for call, ids in (
        (slots.batch_decode, [POISON]),
        (slots.batch_prefill, [5, POISON]),
        (slots.batch_verify, [POISON]),
    ):
        bad, good = call([SlotRequest(a, ids), SlotRequest(b, [3] * len(ids))])
        assert bad.logits is None
        assert isinstance(bad.error, RequestError)
        assert good.error is None
        if call == slots.batch_verify:
            slots.commit([b], [1])
        assert slots.slot_length(a) == 20
    assert slots.slot_length(b) == 24
    after = feed(slots, {a: [9], twin: [9]}, "decode")
    torch.testing.assert_close(after[a], after[twin], atol=2e-5, rtol=0)


@pytest.mark.parametrize("action", [raise_on_poison, nan_on_poison])
@pytest.mark.parametrize("kind", KINDS)
def test_a_caller_s_slot_survives_a_failed_turn(kind: str, action: Any, tmp_path: Path) -> None:
    running = make(kind, tmp_path, sabotaged(action))
    slot = running.acquire_slot()
    first = prompt(20, 1, POISON)
    running.add_request(first, GREEDY, slot=slot)
    drain(running)
    bad = running.add_request([*first, POISON, 3], GREEDY, slot=slot)
    assert drain(running)[bad][-1].finish_reason == "error"
    turn = running.add_request(prompt(30, 2, POISON), GREEDY, slot=slot)
    assert tokens_of(drain(running)[turn]) == alone(kind, tmp_path / "alone", prompt(30, 2, POISON))
    turn = running.add_request(first, GREEDY, slot=slot)
    assert tokens_of(drain(running)[turn]) == alone(kind, tmp_path / "alone", first)


def test_the_counters_count(tmp_path: Path) -> None:
    running = make("qwen3", tmp_path, kernels="reference")
    for i in range(4):
        running.add_request(prompt(10, i), GREEDY)
    running.step()
    stats = running.stats
    assert (stats.steps, stats.running, stats.waiting, stats.free_slots) == (1, 3, 1, 0)
    drain(running)
    stats = running.stats
    assert (stats.prompt_tokens, stats.output_tokens) == (40, 48)
    assert (stats.running, stats.waiting, stats.free_slots) == (0, 0, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_aborts_in_every_state(kind: str, tmp_path: Path) -> None:
    running = make(kind, tmp_path, kernels="reference")
    keep = running.add_request(prompt(20, 1), GREEDY)
    in_prefill = running.add_request(prompt(100, 2), GREEDY)
    in_decode = running.add_request(prompt(5, 3), SamplingParams(max_tokens=100))
    waiting = running.add_request(prompt(20, 4), GREEDY)
    seen = {output.request_id: output for output in running.step()}
    assert keep in seen
    assert in_prefill not in seen
    collected = tokens_of([seen[keep]])
    for name in (in_prefill, waiting):
        output = running.end_request(name)
        assert output is not None
        assert output.finish_reason == "abort"
    collected += tokens_of([o for _ in range(3) for o in running.step() if o.request_id == keep])
    assert running.end_request(in_decode) is not None
    assert running.end_request(in_decode) is None
    assert running.end_request("never seen") is None
    collected += tokens_of(drain(running)[keep])
    assert collected == alone(kind, tmp_path / "alone", prompt(20, 1))
    assert running.slots.num_free == 3


def test_more_requests_than_slots_wait_their_turn(tmp_path: Path) -> None:
    running = make("qwen3", tmp_path, max_queue=4, kernels="reference")
    names = [running.add_request(prompt(5, i), GREEDY) for i in range(4)]
    with pytest.raises(QueueFull, match="max_queue is 4"):
        running.add_request(prompt(5, 9), GREEDY)
    outputs = drain(running)
    assert {len(tokens_of(outputs[name])) for name in names} == {12}


def test_all_slots_held_by_callers_is_seen_and_passes(tmp_path: Path) -> None:
    running = make("qwen3", tmp_path, kernels="reference")
    held = [running.acquire_slot() for _ in range(3)]
    with pytest.raises(NoFreeSlot, match="all 3 slots are in use"):
        running.acquire_slot()
    with pytest.raises(NoFreeSlot):
        running.fork_slot(held[0])
    name = running.add_request(prompt(5), GREEDY)
    assert running.step() == []
    assert running.stalled
    running.release_slot(held[1])
    assert len(tokens_of(drain(running)[name])) == 12
    assert not running.stalled


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e, s: e.release_slot(2), SlotError, "slot 2 is free: acquire it first"),
        (lambda e, s: e.release_slot(7), SlotError, "slots are 0 to 2"),
        (lambda e, s: e.release_slot(True), SlotError, "slots are 0 to 2"),
        (lambda e, s: e.batch_decode([SlotRequest(1, [3])]), SlotError, "slot 1 is free"),
        (lambda e, s: e.batch_decode([SlotRequest(s, [3, 4])]), RequestError, "decode takes one token a slot"),
        (lambda e, s: e.batch_prefill([SlotRequest(s, [3]), SlotRequest(s, [4])]), SlotError, "stands twice"),
        (lambda e, s: e.batch_verify([SlotRequest(s, [3, 4])]), RequestError, "max_draft_tokens = 0, so at most 1"),
        (lambda e, s: e.commit([s], [1]), SlotError, "slot 0 is acquired"),
        (lambda e, s: e.truncate_slot(s, 9), SlotError, "holds 0 tokens, it can't be cut at 9"),
        (lambda e, s: e.save_snapshot(s, 0), SlotError, "num_snapshots = 0"),
        (lambda e, s: e.acquire_slot(0), SlotError, "num_tokens = 0: reserve at least 1"),
        (lambda e, s: e.acquire_slot(-600), SlotError, "num_tokens = -600"),
        (lambda e, s: e.add_request([]), RequestError, "no tokens"),
        (lambda e, s: e.add_request(None), RequestError, "None: token ids are a sequence"),
        (lambda e, s: e.add_request("text"), RequestError, "'text': token ids are a sequence"),
        (lambda e, s: e.add_request([512]), RequestError, "token id 512: this model's ids are 0 to 511"),
        (lambda e, s: e.add_request([-1]), RequestError, "token id -1"),
        (lambda e, s: e.add_request([1.5]), RequestError, "token id 1.5"),
        (lambda e, s: e.add_request([1] * 128), RequestError, "the prompt has 128 tokens"),
        (lambda e, s: e.add_request([1], SamplingParams(max_tokens=128)), RequestError, "max_tokens <= 127"),
        (lambda e, s: e.add_request([1], SamplingParams(logit_bias={600: 1.0})), RequestError, "token id 600"),
        (lambda e, s: e.add_request([1], GREEDY, slot=1), SlotError, "slot 1 is free"),
    ],
)
def test_wrong_calls_are_refused_and_change_nothing(call: Any, error: type, message: str, tmp_path: Path) -> None:
    running = make("qwen3", tmp_path, kernels="reference")
    slot = running.acquire_slot(32)
    with pytest.raises(error, match=message):
        call(running, slot)
    assert running.slots.num_free == 2
    assert running.slot_length(slot) == 0
    assert not running.has_work
    assert feed(running, {slot: [1, 2, 3]})[slot].isfinite().all()


def test_a_full_slot_or_pool_is_that_slots_result(tmp_path: Path) -> None:
    slots = make("qwen3", tmp_path, kv_tokens=160, kernels="reference")
    a, b = slots.acquire_slot(128), slots.acquire_slot(32)
    with pytest.raises(OutOfPages, match="0 of 10 are free"):
        slots.acquire_slot(16)
    feed(slots, {a: prompt(120)})
    full, fine = slots.batch_prefill([SlotRequest(a, prompt(9)), SlotRequest(b, prompt(9))])
    assert "pass max_context = 128" in str(full.error)
    assert fine.error is None
    (over,) = slots.batch_prefill([SlotRequest(b, prompt(24))])
    assert isinstance(over.error, OutOfPages)
    assert slots.slot_length(b) == 9


def test_a_fork_that_goes_back_waits_for_pages_and_disturbs_nobody(tmp_path: Path) -> None:
    running = make("qwen3", tmp_path, kv_tokens=192, kernels="reference")
    slot = running.acquire_slot(96)
    feed(running, {slot: prompt(80)})
    fork = running.fork_slot(slot, 96)
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    other = running.add_request(prompt(10, 4), long)
    running.step()
    parted = prompt(80)[:10] + prompt(70, 9)
    turn = running.add_request(parted, GREEDY, slot=fork)  # 5 pages of its own, and 0 of 12 are free
    outputs = drain(running)
    assert len(tokens_of(outputs[other])) == 59
    assert tokens_of(outputs[turn]) == alone("qwen3", tmp_path / "alone", parted)
    assert outputs[turn][-1].num_cached_tokens == 10


def test_a_slot_in_use_is_protected(tmp_path: Path) -> None:
    running = make("qwen3", tmp_path, max_draft_tokens=2, kernels="reference")
    slot = running.acquire_slot()
    name = running.add_request(prompt(5), GREEDY, slot=slot)
    for state in ("queued", "running"):
        with pytest.raises(SlotError, match=f"slot 0 is {state}"):
            running.release_slot(slot)
        with pytest.raises(SlotError, match=f"slot 0 is {state}"):
            running.add_request(prompt(5), GREEDY, slot=slot)
        running.step()
    running.end_request(name)
    running.truncate_slot(slot, 0)
    feed(running, {slot: prompt(5)})
    feed(running, {slot: [1, 2]}, "verify")
    with pytest.raises(SlotError, match="awaits commit"):
        running.batch_decode([SlotRequest(slot, [1])])
    with pytest.raises(SlotError, match="verified 2 tokens, 3 can't be accepted"):
        running.commit([slot], [3])
    running.release_slot(slot)
    assert running.slots.num_free == 3


def test_recurrent_state_is_not_cut(tmp_path: Path) -> None:
    slots = make("qwen3_5", tmp_path, kernels="reference")
    slot = slots.acquire_slot()
    feed(slots, {slot: prompt(20)})
    with pytest.raises(SlotError, match="recurrent state can't be cut"):
        slots.truncate_slot(slot, 10)
    slots.truncate_slot(slot, 0)
    assert slots.slot_length(slot) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batchsize": 2}, "did you mean 'max_batch_size'"),
        ({"max_batch_size": 0}, "at least 1"),
        ({"prefill_chunk": 100}, "multiple of 64"),
        ({"page_size": 100}, "power of two"),
        ({"kv_layout": "tree"}, "choose one of paged, slots"),
        ({"kv_layout": "slots", "kv_tokens": 100}, "kv_tokens sets the size of the paged pool"),
        ({"kv_cache_dtype": "int2"}, "choose one of auto"),
        ({"kernels": "magic"}, "choose one of auto"),
        ({"device": "tpu"}, "must be auto, cpu, cuda"),
        ({"device": "cuda:77"}, "this machine has"),
        ({"tensor_parallel": 3}, "This model can use 1, 2, 4"),
        ({"max_context": 1 << 20}, "limit is 4096"),
        ({"attention_sinks": 4}, "no meaning without attention_window"),
    ],
)
def test_wrong_options_are_refused_in_words(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        engine("qwen3", tmp_path, **{"max_batch_size": 1, **options})


def test_a_missing_model_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        Engine(tmp_path / "nothing-here")


def test_a_damaged_weight_file_fails_construction_in_words(tmp_path: Path) -> None:
    folder, _ = tiny_models.make("qwen3", tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Engine(folder, max_batch_size=1)


def test_every_backend_is_selectable() -> None:
    for name in CPU_BACKENDS:
        assert select_kernels(name, "cpu").name == name


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt_that_fails_late_leaves_its_slot_as_it_was(kind: str, tmp_path: Path) -> None:
    """Explicit prefill of several passes, the second of which fails for one slot; both slots then go on as if alone."""
    slots = make(kind, tmp_path, sabotaged(raise_on_poison))
    plain = make(kind, tmp_path / "plain")
    for each in (slots, plain):
        assert [each.acquire_slot() for _ in range(3)] == [0, 1, 2]
        feed(each, {0: prompt(9)})
    sizes: list[int] = []
    forward = slots.runner.forward

    def watched(kind: Any, items: Any, **named: Any) -> Tensor:
        sizes.append(sum(len(item.token_ids) for item in items))
        return forward(kind, items, **named)

    slots.runner.forward = watched  # type: ignore[method-assign, assignment]
    bad = [*prompt(90, 1), POISON, 7]
    failed, fine = slots.batch_prefill([SlotRequest(0, bad), SlotRequest(1, prompt(100, 2))])
    assert "injected" in str(failed.error)
    assert slots.slot_length(0) == 9
    assert fine.error is None
    assert fine.logits is not None
    assert max(sizes) <= 64
    torch.testing.assert_close(fine.logits, feed(plain, {1: prompt(100, 2)})[1], atol=2e-5, rtol=2e-5)
    fine, failed = slots.batch_prefill([SlotRequest(2, prompt(100, 4)), SlotRequest(0, [POISON])])  # in its second pass
    assert failed.error is not None
    assert fine.logits is not None
    torch.testing.assert_close(fine.logits, feed(plain, {2: prompt(100, 4)})[2], atol=2e-5, rtol=2e-5)
    got, wanted = (feed(each, {0: prompt(80, 3)}) for each in (slots, plain))
    torch.testing.assert_close(got[0], wanted[0], atol=2e-5, rtol=2e-5)
