"""Promise 1: what a slot computes depends on its own tokens only. For every model kind, layout, KV type and backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny_models
from engines import CPU_BACKENDS, drain, engine, feed, prompt, tokens_of
from pocketllm import Engine, SamplingParams, SlotEngine
from pocketllm.cache.formats import KV_FORMATS
from pocketllm.kernels.types import LayerState

LAYOUTS = ("paged", "slots")
# Every kind with one KV type, and every KV type and layout with one dense and one hybrid kind.
CASES = [(kind, "fp32", "paged") for kind in tiny_models.KINDS] + [
    (kind, fmt, layout)
    for kind in ("qwen2", "qwen3_5")
    for fmt in KV_FORMATS
    for layout in LAYOUTS
    if (fmt, layout) != ("fp32", "paged")
]
each_case = pytest.mark.parametrize(("kind", "kv", "layout"), CASES)
each_backend = pytest.mark.parametrize("backend", CPU_BACKENDS)


def alone(slots: SlotEngine, ids: list[int], steps: int) -> list[Tensor]:
    """Logits of a prompt and of each of the last `steps` tokens decoded, in an otherwise empty engine."""
    slot = slots.acquire_slot()
    logits = [feed(slots, {slot: ids[:-steps]})[slot]]
    logits += [feed(slots, {slot: [token]}, "decode")[slot] for token in ids[-steps:]]
    slots.release_slot(slot)
    return logits


@each_backend
@each_case
def test_a_slot_in_a_batch_equals_the_slot_alone(kind: str, kv: str, layout: str, backend: str, tmp_path: Path) -> None:
    slots = engine(kind, tmp_path, kv_cache_dtype=kv, kv_layout=layout, kernels=backend)
    sequences = [prompt(length, seed) for seed, length in enumerate((70, 9, 133, 40))]
    want = [alone(slots, ids, 5) for ids in sequences]
    ids_of = {slots.acquire_slot(): ids for ids in sequences}
    got = [{slot: feed(slots, {slot: ids[:-5]})[slot] for slot, ids in ids_of.items()}]
    got += [feed(slots, {slot: [ids[step]] for slot, ids in ids_of.items()}, "decode") for step in range(-5, 0)]
    for (slot, _), expected in zip(ids_of.items(), want, strict=True):
        for logits, single in zip(got, expected, strict=True):
            assert torch.equal(logits[slot], single)


@each_backend
@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_prompts_computed_together_equal_prompts_alone(kind: str, backend: str, tmp_path: Path) -> None:
    """To rounding: a prompt's matrix products are the library's, whose order of summing depends on the number of rows."""
    slots = engine(kind, tmp_path, kernels=backend)
    sequences = [prompt(length, seed) for seed, length in enumerate((70, 9, 133, 40))]
    want = [alone(slots, ids, 1)[0] for ids in sequences]
    ids_of = {slots.acquire_slot(): ids[:-1] for ids in sequences}
    for logits, single in zip(feed(slots, ids_of).values(), want, strict=True):
        torch.testing.assert_close(logits, single, atol=1e-5 * max(float(single.std()), 1.0), rtol=0)


@each_backend
@each_case
def test_verify_equals_decodes_and_rolls_back(kind: str, kv: str, layout: str, backend: str, tmp_path: Path) -> None:
    slots = engine(kind, tmp_path, kv_cache_dtype=kv, kv_layout=layout, kernels=backend, max_draft_tokens=3)
    first, second = prompt(61, 1), prompt(30, 2)
    drafts, after = prompt(4, 3), prompt(3, 4)
    a, b = slots.acquire_slot(), slots.acquire_slot()
    feed(slots, {b: second})
    feed(slots, {a: first})
    decoded = [feed(slots, {a: [token]}, "decode")[a] for token in drafts[:2] + after]
    slots.release_slot(a)
    a = slots.acquire_slot()
    feed(slots, {a: first})
    verified = feed(slots, {b: drafts, a: drafts}, "verify")[a]
    slots.commit([a, b], [2, 0])  # drafts 2 and 3 are forgotten
    assert slots.slot_length(a) == len(first) + 2
    assert slots.slot_length(b) == len(second)
    got = [*verified[:2], *(feed(slots, {a: [token]}, "decode")[a] for token in after)]
    for logits, single in zip(got, decoded, strict=True):
        assert torch.equal(logits, single)
    want = alone(slots, [*second, 7], 1)[-1]
    assert torch.equal(feed(slots, {b: [7]}, "decode")[b], want)


@each_backend
@each_case
def test_chunks_of_any_size_give_the_same(kind: str, kv: str, layout: str, backend: str, tmp_path: Path) -> None:
    slots = engine(kind, tmp_path, kv_cache_dtype=kv, kv_layout=layout, kernels=backend)
    ids = prompt(200, 5)
    results = {}
    for size in (1, 7, 64, 256):
        slot = slots.acquire_slot()
        for start in range(0, len(ids), size):
            results[size] = feed(slots, {slot: ids[start : start + size]})[slot]
        slots.release_slot(slot)
    for size in (1, 7, 64):
        # sums over a prompt's rows run in another order, on every backend: equal to rounding
        scale = max(float(results[256].std()), 1.0)
        torch.testing.assert_close(results[size], results[256], atol=CHUNK_TOLERANCE.get(kv, 2e-5) * scale, rtol=0)


# A quantised cache can turn a rounding difference into another code of the same value.
CHUNK_TOLERANCE = {"fp8": 0.08, "int8_per_token_head": 0.02, "turboquant_k8v4": 0.15, "fp16": 4e-3, "bf16": 2e-2}


@each_backend
@each_case
def test_a_reused_slot_is_a_fresh_one(kind: str, kv: str, layout: str, backend: str, tmp_path: Path) -> None:
    slots = engine(kind, tmp_path, kv_cache_dtype=kv, kv_layout=layout, kernels=backend, max_batch_size=1)
    ids = prompt(50, 6)
    fresh = alone(slots, ids, 3)
    alone(slots, prompt(150, 7), 20)
    for logits, first in zip(alone(slots, ids, 3), fresh, strict=True):
        assert torch.equal(logits, first)


@each_backend
@each_case
def test_forks_share_their_past_and_part(kind: str, kv: str, layout: str, backend: str, tmp_path: Path) -> None:
    slots = engine(kind, tmp_path, kv_cache_dtype=kv, kv_layout=layout, kernels=backend)
    common, left, right = prompt(75, 8), prompt(12, 9), prompt(12, 10)
    a = slots.acquire_slot()
    feed(slots, {a: common})
    b = slots.fork_slot(a)
    if layout == "paged":
        full = len(common) // 16
        assert slots.slots.pages.pages_of(a)[:full] == slots.slots.pages.pages_of(b)[:full]
    got = [feed(slots, {a: [x], b: [y]}, "decode") for x, y in zip(left, right, strict=True)]
    slots.release_slot(a)
    tail = feed(slots, {b: [3]}, "decode")[b]  # its shared pages outlive the slot they came from
    slots.release_slot(b)
    for slot, own in ((a, left), (b, right)):
        want = alone(slots, common + own, 12)[1:]
        for logits, single in zip(got, want, strict=True):
            assert torch.equal(logits[slot], single)
    assert torch.equal(tail, alone(slots, [*common, *right, 3], 13)[-1])


@each_backend
@each_case
def test_garbage_in_every_other_slot_changes_nothing(
    kind: str, kv: str, layout: str, backend: str, tmp_path: Path
) -> None:
    slots = engine(kind, tmp_path, kv_cache_dtype=kv, kv_layout=layout, kernels=backend)
    ids = prompt(40, 11)
    want = alone(slots, ids, 6)
    others = [slots.acquire_slot() for _ in range(2)]
    slot = slots.acquire_slot()
    got = [feed(slots, {slot: ids[:-6]})[slot]]
    poison(slots, slot)
    for token in ids[-6:]:
        got.append(feed(slots, {slot: [token]}, "decode")[slot])
    assert others
    for logits, single in zip(got, want, strict=True):
        assert torch.equal(logits, single)


def poison(slots: SlotEngine, keep: int) -> None:
    """Fill all storage that is not slot `keep`'s with bytes that are NaN in every float type."""
    cache = slots.runner.kv
    held = -(-slots.slots.kv_lens[keep] // cache.shape.page_size)
    mine = cache.block_table[keep, :held].long()
    others = torch.ones(cache.shape.num_pages + 1, dtype=torch.bool)
    others[mine] = False
    for layer in cache.layers:
        for plane in layer.planes:
            plane.view(torch.uint8)[others] = 0xFF
    for state in slots.runner.state.layers:
        for tensor in of(state):
            others = torch.arange(tensor.shape[0]) != keep
            tensor[others] = float("nan")


def of(state: LayerState) -> list[Tensor]:
    return list(vars(state).values())


@each_backend
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_requests_get_the_same_tokens_whatever_else_runs(kind: str, backend: str, tmp_path: Path) -> None:
    """Scheduler, sampler and all: each request alone on a one-slot engine, then eight at once on four slots."""
    params = [
        SamplingParams(max_tokens=20, temperature=0.9 * (i % 3), top_k=(0, 20, 0, 200)[i % 4], seed=i, top_p=0.9)
        for i in range(8)
    ]
    prompts = [prompt(5 + 23 * i, i) for i in range(8)]
    single = engine(kind, tmp_path / "one", kernels=backend, max_batch_size=1, prefill_chunk=64)
    want = []
    for ids, p in zip(prompts, params, strict=True):
        request = single.add_request(ids, p)
        want.append(tokens_of(drain(single)[request]))
    together = engine(kind, tmp_path / "four", kernels=backend, prefill_chunk=64)
    requests = [together.add_request(ids, p) for ids, p in zip(prompts, params, strict=True)]
    outputs = drain(together)
    assert [tokens_of(outputs[request]) for request in requests] == want
    assert {len(tokens) for tokens in want} != {1}


@each_backend
def test_a_conversation_reuses_its_slot(backend: str, tmp_path: Path) -> None:
    """A second turn computes only what is new, and answers like a fresh request with the whole history."""
    for kind in ("qwen3", "qwen3_5"):
        running = engine(kind, tmp_path / kind, kernels=backend)
        greedy = SamplingParams(max_tokens=8, ignore_eos=True)
        slot = running.acquire_slot()
        first = prompt(40, 1)
        turn = running.add_request(first, greedy, slot=slot)
        history = first + tokens_of(drain(running)[turn]) + prompt(10, 2)
        turn = running.add_request(history, greedy, slot=slot)
        outputs = drain(running)[turn]
        assert outputs[-1].num_cached_tokens == len(first) + 7  # the last token of an answer is not computed yet
        fresh = running.add_request(history, greedy)
        assert tokens_of(outputs) == tokens_of(drain(running)[fresh])
        # a history that parts from what the slot holds: attention keeps the common part, recurrent state starts anew
        edited = history[:30] + prompt(10, 3)
        turn = running.add_request(edited, greedy, slot=slot)
        outputs = drain(running)[turn]
        assert outputs[-1].num_cached_tokens == (30 if kind == "qwen3" else 0)
        fresh = running.add_request(edited, greedy)
        assert tokens_of(outputs) == tokens_of(drain(running)[fresh])


@each_backend
def test_snapshots_return_to_a_point(backend: str, tmp_path: Path) -> None:
    for kind in ("qwen3", "qwen3_5"):
        slots = engine(kind, tmp_path / kind, kernels=backend, num_snapshots=2)
        slot = slots.acquire_slot()
        feed(slots, {slot: prompt(37, 1)})
        snapshot = slots.save_snapshot(slot, 1)
        first = feed(slots, {slot: prompt(20, 2)})[slot]
        slots.restore_snapshot(snapshot)
        feed(slots, {slot: prompt(5, 3)})
        slots.restore_snapshot(snapshot)
        assert torch.equal(feed(slots, {slot: prompt(20, 2)})[slot], first)


def test_window_and_sinks_bound_what_a_token_sees(tmp_path: Path) -> None:
    """Tokens between the sinks and the window are not seen, whichever way the others came in."""
    folder, _ = tiny_models.make("llama", tmp_path, num_hidden_layers=1)
    windowed = Engine(folder, max_batch_size=2, max_context=256, page_size=16, attention_window=20, attention_sinks=4)
    ids = prompt(80, 1)
    slot = windowed.acquire_slot()
    want = feed(windowed, {slot: ids})[slot]
    hidden = ids[:4] + prompt(50, 2) + ids[54:]
    slot = windowed.acquire_slot()
    got = feed(windowed, {slot: hidden})[slot]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    seen = prompt(4, 3) + ids[4:]
    slot = windowed.fork_slot(slot) if windowed.slots.num_free else slot
    windowed.release_slot(slot)
    slot = windowed.acquire_slot()
    assert (feed(windowed, {slot: seen})[slot] - want).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_hybrid_model_in_16_bits_on_a_cpu(dtype: str, tmp_path: Path) -> None:
    """Kernels of a backend whose intermediates are float32 find the convolution's inputs in float32, too."""
    logits = []
    for backend in ("reference", "numba"):
        slots = engine("qwen3_5", tmp_path / backend, kernels=backend, dtype=dtype, max_draft_tokens=2)
        assert {t.dtype for state in slots.runner.state.layers for t in vars(state).values()} == {torch.float32}
        slot = slots.acquire_slot()
        feed(slots, {slot: prompt(70)})
        feed(slots, {slot: [1, 2, 3]}, "verify")
        slots.commit([slot], [2])
        logits.append(feed(slots, {slot: [4]}, "decode")[slot])
    torch.testing.assert_close(logits[0], logits[1], atol=0.1, rtol=0.1)
