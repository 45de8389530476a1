"""Promise 2: the plan is what is allocated, two slots take twice the KV of one, and nothing grows with use."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from engines import engine, feed, prompt
from pocketllm import Engine, EngineOptions, SamplingParams, plan_memory
from pocketllm.cache.formats import KV_FORMATS
from pocketllm.engine import device
from pocketllm.engine.memory_advice import check_fits, context_table
from pocketllm.engine.memory_plan import Planner
from pocketllm.engine.sampler import Sampler
from pocketllm.errors import MemoryPlanError, OptionError
from pocketllm.models.registry import config_from_shape
from pocketllm.options import parse_bytes
from pocketllm.parallel import NUM_PLACES, inbox_nbytes, place_nbytes

KINDS = ("qwen2", "qwen3_moe", "qwen3_5")
GIB = 1 << 30


def tensors_below(root: object) -> dict[int, Tensor]:
    """Every tensor reachable from an object of this package, by storage address."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    todo = [root]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.device.type != "meta" and item.numel():
                found[item.untyped_storage().data_ptr()] = item
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, list | tuple):
            todo += item
        elif type(item).__module__.startswith("pocketllm") and hasattr(item, "__dict__"):
            todo += vars(item).values()
    return found


@pytest.mark.parametrize("layout", ["paged", "slots"])
@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_allocated_is_the_plan_to_the_byte(kind: str, kv: str, layout: str, tmp_path: Path) -> None:
    running = engine(
        kind, tmp_path, kv_cache_dtype=kv, kv_layout=layout, max_draft_tokens=2, num_snapshots=3, kernels="reference"
    )
    plan, runner = running.plan, running.runner
    assert runner.kv.nbytes == plan.kv.nbytes
    assert runner.state.nbytes == plan.state.nbytes
    assert running.sampler.nbytes == plan.sampler
    assert runner.model.rope.nbytes == plan.tables
    held = [tensors_below(runner.model), tensors_below(runner.kv), tensors_below(runner.state.layers)]
    held += [tensors_below(runner.state._snapshots), tensors_below(running.sampler)]
    everything = {address: t for part in held for address, t in part.items()}
    assert sum(t.untyped_storage().nbytes() for t in everything.values()) == plan.resident


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_two_slots_take_twice_the_kv_of_one(kv: str) -> None:
    config = config_from_shape("qwen3.8-27b-fp8")

    def kv_bytes(slots: int) -> int:
        options = EngineOptions(max_batch_size=slots, max_context=65536, kv_cache_dtype=kv)
        plan = plan_memory(config, options, None)
        return plan.kv.num_pages * plan.kv.page_nbytes

    assert kv_bytes(2) == 2 * kv_bytes(1)
    per_token = 16 * 4 * KV_FORMATS[kv].bytes_per_token(256)  # layers x KV heads
    assert kv_bytes(1) == 65536 * per_token


def test_the_27b_on_two_22_gib_gpus() -> None:
    """Weights 13.72 GiB a rank; per slot 73.4 MiB of recurrent state and, as K8V4, 784 MiB of KV at 64K."""
    config = config_from_shape("qwen3.8-27b-fp8")
    options = EngineOptions(
        max_batch_size=8, max_context=65536, kv_cache_dtype="turboquant_k8v4", tensor_parallel=2, prefill_chunk=512
    )
    plan = plan_memory(config, options, 22 * GIB, "cuda")
    assert abs(plan.weights / GIB - 13.72) < 0.02
    assert plan.kv.page_nbytes // plan.kv.page_size == 16 * 2 * 392
    assert abs(plan.state.nbytes / 9 / 2**20 - 73.4) < 0.1  # 8 slots and the spare one
    assert plan.fits == (plan.total <= 22 * GIB)
    table = context_table(config, options, 22 * GIB, "cuda")
    for row in table.values():
        contexts = list(row.values())
        assert contexts == sorted(contexts, reverse=True)
    assert table["turboquant_k8v4"][4] > 1.2 * table["int8_per_token_head"][4] > 2 * table["fp16"][4]


def test_a_plan_counts_the_devices_own_chunk_of_a_prompt() -> None:
    config = config_from_shape("qwen3-0.6b")

    def workspace(device: str, chunk: int | None) -> int:
        options = EngineOptions(max_batch_size=1, max_context=4096, prefill_chunk=chunk)
        return plan_memory(config, options, None, device).workspace

    assert workspace("cuda", None) == workspace("cuda", 2048) > workspace("cuda", 512)
    assert workspace("cpu", None) == workspace("cpu", 512)


def test_a_plan_that_does_not_fit_names_what_does() -> None:
    config = config_from_shape("qwen3-8b")
    options = EngineOptions(max_batch_size=8, max_context=32768)
    plan = plan_memory(config, options, 24 * GIB, "cuda")
    assert plan.fits
    assert plan.kv_tokens < 8 * 32768
    assert any("pool of" in note for note in plan.notes)
    fixed = EngineOptions(max_batch_size=8, max_context=32768, kv_layout="slots")
    plan = plan_memory(config, fixed, 24 * GIB, "cuda")
    with pytest.raises(MemoryPlanError) as caught:
        check_fits(plan, config, fixed, "cuda")
    message = str(caught.value)
    for setting in ("max_context=", "max_batch_size=", "8 slots of 32768 tokens as bf16 need"):
        assert setting in message
    context = int(message.split("max_context=")[1].split()[0])
    smaller = EngineOptions(max_batch_size=8, max_context=context, kv_layout="slots")
    assert plan_memory(config, smaller, 24 * GIB, "cuda").fits
    larger = EngineOptions(max_batch_size=8, max_context=context + 256, kv_layout="slots")
    assert not plan_memory(config, larger, 24 * GIB, "cuda").fits


def fitting(message: str) -> list[dict[str, Any]]:
    """The settings that an error names, each as options."""
    found = []
    for part in message.split("What fits: ")[1].split("; "):
        pairs = re.findall(r"(\w+)=(\w+)", part)
        found.append({name: int(value) if value.isdigit() else value for name, value in pairs})
    return found


@pytest.mark.parametrize(
    ("shape", "memory", "size", "names"),
    [
        # context, slots or KV type alone
        ("qwen3-8b", 21, (4, 16384), ["max_context", "max_batch_size", "kv_cache_dtype"]),
        # only several together, at last with a shorter chunk
        ("smollm2-135m", 0.56, (64, 8192), ["max_batch_size max_context"]),
        ("smollm2-135m", 0.27, (4, 8192), ["max_batch_size max_context kv_cache_dtype prefill_chunk"]),
        # the weights do not fit: more GPUs, or smaller weights
        ("qwen3.8-27b-fp8", 22, (8, 16384), ["tensor_parallel", "quantization max_context"]),
        ("qwen3.8-27b-fp8", 22, (8, 65536), ["tensor_parallel max_context", "quantization max_context"]),
    ],
)
def test_settings_that_an_error_names_fit(shape: str, memory: float, size: tuple[int, int], names: list[str]) -> None:
    config, budget = config_from_shape(shape), int(memory * GIB)
    device = "cuda" if memory > 1 else "cpu"
    asked = EngineOptions(max_batch_size=size[0], max_context=size[1], kv_layout="slots")
    with pytest.raises(MemoryPlanError, match="What fits: ") as caught:
        check_fits(plan_memory(config, asked, budget, device), config, asked, device)
    settings = fitting(str(caught.value))
    assert [" ".join(setting) for setting in settings] == names
    for setting in settings:
        assert plan_memory(config, replace(asked, **setting), budget, device).fits


@pytest.mark.parametrize(
    ("options", "mebibytes", "names"),
    [
        ({}, 1024, ["kv_tokens"]),
        ({"max_context": 4096}, 1024, ["kv_tokens"]),
        ({"max_context": 8192, "max_batch_size": 2}, 600, ["max_context kv_tokens"]),
        ({"max_context": 8192, "max_batch_size": 64}, 570, ["max_batch_size max_context kv_tokens"]),
    ],
)
def test_of_a_pool_of_a_given_size_a_smaller_one_is_named(options: Any, mebibytes: int, names: list[str]) -> None:
    """A smaller context alone would leave it as large as it is."""
    config, budget = config_from_shape("smollm2-135m"), mebibytes << 20
    asked = EngineOptions(kv_tokens=100_000, **options)
    with pytest.raises(MemoryPlanError, match="What fits: ") as caught:
        check_fits(plan_memory(config, asked, budget), config, asked)
    settings = fitting(str(caught.value))
    assert [" ".join(setting) for setting in settings] == names
    for setting in settings:
        assert plan_memory(config, replace(asked, **setting), budget).fits


def test_a_pool_of_less_than_a_page_a_slot_is_raised_and_that_is_said() -> None:
    plan = plan_memory(config_from_shape("smollm2-135m"), EngineOptions(kv_tokens=300), None)
    assert plan.kv_tokens == 4 * 256
    assert "a page for each of 4 slots" in plan.notes[0]


def test_what_no_setting_helps_is_said() -> None:
    config, asked = config_from_shape("smollm2-135m"), EngineOptions(quantization="w4")
    weights = plan_memory(config, asked, None).weights
    for budget, message in (
        (weights - 1, "The weights alone do not fit"),
        (weights + 1, "beside its slots does not fit"),
    ):
        with pytest.raises(MemoryPlanError, match=message):
            check_fits(plan_memory(config, asked, budget), config, asked)


def test_millions_of_slots_are_refused_as_quickly_as_two() -> None:
    config = config_from_shape("qwen3-0.6b")
    asked = EngineOptions(max_batch_size=10_000_000, max_context=1024)
    with pytest.raises(MemoryPlanError, match="max_batch_size="):
        check_fits(plan_memory(config, asked, 32 * GIB), config, asked)


def test_construction_stops_before_allocating(tmp_path: Path) -> None:
    tiny_models.make("qwen3", tmp_path)  # builds and keeps the oracle
    before = live_tensors()
    with pytest.raises(MemoryPlanError, match="What fits"):
        engine("qwen3", tmp_path, memory_limit=parse_bytes("12MiB"), max_context=4096, kv_layout="slots")
    assert live_tensors() <= before + 8  # views of the file, no caches


def test_impossible_settings_are_refused_in_words() -> None:
    config = config_from_shape("qwen3.8-27b-fp8")
    with pytest.raises(OptionError, match="can't be sharded over 3"):
        plan_memory(config, EngineOptions(tensor_parallel=3), None)
    with pytest.raises(OptionError, match="limit is 262144"):
        plan_memory(config, EngineOptions(max_context=300000), None)
    with pytest.raises(OptionError, match=r"kv_tokens = 300: .* use kv_tokens >= 1024"):
        plan_memory(config, EngineOptions(max_context=1024, kv_tokens=300), None)
    with pytest.raises(OptionError, match=r"choose one of auto, .*turboquant_k8v4"):
        plan_memory(config, EngineOptions(kv_cache_dtype="int3"), None)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_5"])
def test_nothing_grows_over_1000_requests(kind: str, tmp_path: Path) -> None:
    """Random lengths, random aborts in every state, slots held by callers in between."""
    running = engine(kind, tmp_path, max_queue=8, max_context=64, prefill_chunk=64, kernels="reference")
    choose = random.Random(1)
    pool = running.slots.pages
    served, marks = 0, []
    for count in requests_and_steps(running, choose, total=1050):
        served = count
        if count in (200, 1049):
            marks.append((live_tensors(), resident_bytes()))
    while running.has_work:
        running.step()
    assert served == 1049
    assert running.slots.num_free == 4
    assert pool.available == pool.num_pages
    (tensors_before, rss_before), (tensors_after, rss_after) = marks
    assert tensors_after <= tensors_before + 4
    assert rss_after < rss_before + (24 << 20)
    assert not running._requests


def requests_and_steps(running: Engine, choose: random.Random, total: int) -> Iterator[int]:
    ids: list[str] = []
    count = 0
    while count < total:
        if len(running.scheduler.waiting) < 8:
            params = SamplingParams(max_tokens=choose.randint(1, 6), temperature=choose.choice([0.0, 1.0]))
            ids.append(running.add_request(prompt(choose.randint(1, 50), count), params))
            yield count
            count += 1
        if choose.random() < 0.5:
            running.step()
        if choose.random() < 0.15:
            running.end_request(choose.choice(ids[-8:]))
        if choose.random() < 0.05 and running.slots.num_free:
            running.release_slot(running.acquire_slot(16))


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_a_pass_stays_within_its_planned_workspace(kind: str, tmp_path: Path) -> None:
    """Peak of all temporary tensors of the largest prefill pass, over a long context, as the allocator saw them."""
    slots = engine(kind, tmp_path, max_context=4096, prefill_chunk=512, kernels="reference")
    slot = slots.acquire_slot()
    feed(slots, {slot: prompt(3000)})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        feed(slots, {slot: prompt(512)})
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    planned = slots.plan.workspace + slots.plan.logits
    assert planned / 3 < peak <= planned


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"logprobs": 5},
        {"temperature": 1.0, "top_k": 20, "logprobs": 5, "logit_bias": {3: 1.0}, "repetition_penalty": 1.2},
        {"temperature": 1.0},
        {
            "temperature": 1.0,
            "logprobs": 5,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.1,
            "repetition_penalty": 1.2,
        },
    ],
)
def test_sampling_stays_within_its_planned_workspace(settings: dict[str, Any], rows: int) -> None:
    vocab = 20000
    sampler = Sampler(rows, vocab)
    for slot in range(rows):
        sampler.start(slot, SamplingParams(**settings), [1, 2], [5], seed=slot)
    logits = torch.randn(rows, vocab)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        sampler.sample(logits, list(range(rows)), [3] * rows, [1] * rows)
    held = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert 0 < peak <= Sampler.workspace(rows, vocab)


def gpu_planner(shape: str, **options: Any) -> Planner:
    return Planner(config_from_shape(shape), EngineOptions(**{"kernels": "triton", **options}), None, "cuda", None)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "qwen3.5-35b-a3b"])
def test_a_gpu_plan_has_room_for_the_results_of_all_experts(shape: str, ranks: int) -> None:
    """Of every pair of a token and an expert at once: their width is the model's, on however many ranks."""
    planner = gpu_planner(shape, tensor_parallel=ranks)
    hidden, moe = planner.config.hidden_size, planner.config.moe
    assert moe is not None
    live = moe.top_k * (moe.expert_intermediate_size // ranks + hidden) + 2 * hidden
    assert planner._row_bytes() >= 2 * live  # bytes of bfloat16


def test_intermediates_on_a_gpu_have_the_activations_type() -> None:
    bf16, fp32 = (gpu_planner("qwen3-8b", dtype=dtype)._row_bytes() for dtype in ("bfloat16", "float32"))
    assert 2 * bf16 == fp32 == gpu_planner("qwen3-8b", dtype="bfloat16", kernels="reference")._row_bytes()


@pytest.mark.parametrize("ranks", [2, 4])
def test_memory_that_ranks_share_is_planned(ranks: int) -> None:
    planner = gpu_planner("qwen3-8b", tensor_parallel=ranks)
    config = planner.config
    of_attention = planner.kernels.attention_workspace(config.num_heads // ranks, config.head_dim, 1, 256, prefill=True)
    shared = NUM_PLACES * (place_nbytes(config.hidden_size) + inbox_nbytes(config.hidden_size, ranks))
    assert planner._workspace(1, 1, 256) - of_attention >= shared + planner._row_bytes()


def test_the_allocator_is_told_to_be_exact_unless_the_user_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(device, "_library", SimpleNamespace(_accelerator_setAllocatorSettings=asked.append))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    device.allocate_exactly(torch.device("cpu"))
    assert asked == []
    device.allocate_exactly(torch.device("cuda", 0))
    assert asked == ["expandable_segments:True"]
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        with monkeypatch.context() as own:
            own.setenv(name, "max_split_size_mb:64")
            device.allocate_exactly(torch.device("cuda", 0))
    assert len(asked) == 1


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_5"])
def test_recorded_passes_keep_what_was_planned(kind: str, tmp_path: Path) -> None:
    """Decode and verify batches of every size: the recorded intermediates stay within the plan's bound."""
    slots = engine(kind, tmp_path, kernels="numba", max_draft_tokens=2)
    held = [slots.acquire_slot() for _ in range(4)]
    feed(slots, {slot: prompt(5) for slot in held})
    for size in range(1, 5):
        feed(slots, {slot: [1] for slot in held[:size]}, "decode")
        feed(slots, {slot: [1, 2, 3] for slot in held[:size]}, "verify")
        slots.commit(held[:size], [1] * size)
    graphs = [graph for graph in slots.runner._graphs._graphs.values() if graph is not None]
    assert len(graphs) == 6  # batches of 1, 2 and 4 slots, of 3 too
    made: dict[int, Tensor] = {}
    for graph in graphs:
        made.update(tensors_below(graph.replay.memory))  # type: ignore[attr-defined]
    known = tensors_below([slots.runner.model, slots.runner.kv, slots.runner.state.layers])
    kept = sum(t.untyped_storage().nbytes() for address, t in made.items() if address not in known)
    assert slots.plan.graphs / 4 < kept <= slots.plan.graphs


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), Tensor) for item in gc.get_objects())


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")
