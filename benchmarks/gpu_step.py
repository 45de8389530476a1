"""Whole steps on one GPU: kernels against the reference, then the 27B hybrid with dummy FP8 weights.

    python benchmarks/gpu_step.py [--model NAME] [--kv-cache-dtype auto,...] [--out FILE] [--seconds N] [--parts a,b,...]
                                  [--weights gaussian|tiny]

Parts, in this order: `small` (logits of a small hybrid, kernels against the reference), `build` (start, memory against the
plan), `same` (graph = eager, a slot alone = in a batch, bit for bit), `decode` (steps at several slots and contexts, whose
caches are filled with random values), `profile` (a step by kernel family), `soak` (1,000 requests), `prefill`, `kv` (other
KV types), `dense` (as `small`). What a part finds is printed as it comes, and the file is written anew after each; a part
that fails does not end the run, and none begins after --seconds.

What weights are matters, as prefill runs at the limit of a card's power, and zeros need less. `gaussian` ones fill e4m3's
range as a checkpoint's do. `tiny` ones are what vLLM's dummy loader makes, uniform between -0.001 and 0.001: of FP8 weights
that leaves 2.3% that are not zero.

Rows have the keys of `pocketllm bench --json`, and device_ms: a step's time without the host's part.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from gpu_families import by_early_launch, decode_families, prefill_families, without
from gpu_report import Report
from pocketllm.cli.bench_run import (
    bytes_per_step,
    context_needed,
    fill_randomly,
    random_tokens,
    read_bandwidth,
    timed_decode,
    timed_prefill,
)  # fmt: skip
from pocketllm.engine.engine import Engine
from pocketllm.engine.inputs import SlotTokens, pack
from pocketllm.engine.slot_engine import SlotEngine, SlotRequest
from pocketllm.errors import SlotError
from pocketllm.options import EngineOptions, SamplingParams
from pocketllm.weights.dummy import DummySource
from pocketllm.weights.formats import StoredFormat

DEVICE = torch.device("cuda", 0)
STEPS, SLOTS, SHORT, LONG, CHUNK = 24, 64, 1024, 32768, 8192
CASES = ((1, SHORT), (2, SHORT), (4, SHORT), (8, SHORT), (32, SHORT), (64, SHORT), (1, LONG), (8, LONG))
REQUESTS = 1000
HYBRID, DENSE = "qwen3.5-0.8b", "smollm2-135m"


@contextmanager
def tiny_weights() -> Iterator[None]:
    """Meanwhile, dummy FP8 weights are those of vLLM's loader."""
    original = DummySource._pool

    def pool(source: DummySource, target: StoredFormat, k: int) -> tuple[torch.Tensor, ...]:
        codes, *scales = original(source, target, k)
        if codes.dtype == torch.float8_e4m3fn:
            codes = torch.empty(codes.shape, device=codes.device).uniform_(-1e-3, 1e-3).to(codes.dtype)
        return codes, *scales

    with patch.object(DummySource, "_pool", pool):
        yield


# -- small models ------------------------------------------------------------------------------------------------------


def logits_of(engine: SlotEngine, prompts: list[list[int]], steps: int, choices: list[list[int]]) -> list[torch.Tensor]:
    """Logits [n, V] after the prompts and after each step, in which slot i is given choices[i] (filled if empty)."""
    held = [engine.acquire_slot() for _ in prompts]
    results = engine.batch_prefill([SlotRequest(s, p) for s, p in zip(held, prompts, strict=True)])
    found = []
    for step in range(steps + 1):
        for result in results:
            if result.error is not None:
                raise result.error
        logits = torch.stack([r.logits for r in results if r.logits is not None])
        found.append(logits)
        if len(choices) == step:
            choices.append(logits.argmax(-1).tolist())
        if step < steps:
            results = engine.batch_decode([SlotRequest(s, [t]) for s, t in zip(held, choices[step], strict=True)])
    for slot in held:
        engine.release_slot(slot)
    return found


def small_model(report: Report, name: str) -> None:
    """Greedy tokens of the reference in float32 are given to all; what the others' logits differ by."""
    choices: list[list[int]] = []
    wanted: list[torch.Tensor] = []
    for kernels, dtype in (
        ("reference", "float32"),
        ("triton", "float32"),
        ("reference", "bfloat16"),
        ("triton", "bfloat16"),
    ):
        options = EngineOptions(
            max_batch_size=3, max_context=512, load_format="dummy", device="cuda", kernels=kernels, dtype=dtype
        )
        engine = SlotEngine(name, options)
        prompts = [random_tokens(engine, length, length) for length in (130, 7, 64)]
        found = logits_of(engine, prompts, 8, choices)
        wanted = wanted or found
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
        same = [(a.argmax(-1) == b.argmax(-1)).float().mean().item() for a, b in zip(found, wanted, strict=True)]
        report.fact(f"{name} {kernels} {dtype}", {"logits off by": error, "same tokens": statistics.mean(same)})
        del engine
        free_memory()


# -- the large model ---------------------------------------------------------------------------------------------------


def build(report: Report, model: str, kv: str, slots: int, context: int, tokens: int) -> Engine:
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.mem_get_info()[0], time.monotonic()
    options = EngineOptions(
        max_batch_size=slots,
        max_context=context,
        kv_tokens=tokens,
        kv_cache_dtype=kv,
        load_format="dummy",
        device="cuda",
        kernels="triton",
        prefill_chunk=CHUNK,
    )
    engine = Engine(model, options)
    torch.cuda.synchronize()
    report.fact(
        f"built, kv {engine.plan.kv.kv_format.name}",
        {"seconds": round(time.monotonic() - start, 1), **memory(engine, before)},
    )
    return engine


def memory(engine: Engine, before: int) -> dict[str, float]:
    """GiB: planned, allocated now, the most allocated, the most reserved, and what the device has less than before."""
    numbers = {
        "planned": engine.plan.total,
        "planned without runtime": engine.plan.total - engine.plan.runtime,
        "allocated": torch.cuda.memory_allocated(),
        "most allocated": torch.cuda.max_memory_allocated(),
        "most reserved": torch.cuda.max_memory_reserved(),
        "taken from the device": before - torch.cuda.mem_get_info()[0],
    }
    return {name: round(value / 2**30, 3) for name, value in numbers.items()}


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def tidy(engine: Engine) -> None:
    """An idle engine with all its slots free, whatever a part that failed has left."""
    for request_id in list(engine._requests):
        engine.end_request(request_id)
    for slot in range(engine.plan.kv.num_slots):
        with suppress(SlotError):  # it is free
            engine.release_slot(slot)


@contextmanager
def filled(engine: Engine, slots: int, context: int, seed: int = 0) -> Iterator[list[SlotTokens]]:
    """Slots that hold `context` random tokens, as the items of a decode pass that may be run many times."""
    tidy(engine)
    held = [engine.acquire_slot(context + 1) for _ in range(slots)]
    try:
        torch.manual_seed(seed)
        fill_randomly(engine, {slot: random_tokens(engine, context, slot) for slot in held})
        for slot in held:
            engine.slots.prepare_write(slot, 1)
        engine.runner.apply(*engine.slots.take_changes())
        yield [SlotTokens(slot, context, [slot + 5]) for slot in held]
    finally:
        for slot in held:
            engine.release_slot(slot)


def same_bits(report: Report, engine: Engine) -> None:
    def run(slots: int, part: slice, eager: bool) -> torch.Tensor:
        with filled(engine, slots, SHORT) as items, torch.inference_mode():
            items = items[part]
            if not eager:
                return engine.runner.forward("decode", items).clone()
            layout, block = pack("decode", items, all_logits=True, pinned=False)
            return engine.runner._forward(layout.batch(block.to(engine.device))).clone()

    batch = run(SLOTS, slice(0, SLOTS), eager=False)
    with without({"bridge": lambda *_: None}):
        steps = run(SLOTS, slice(0, SLOTS), eager=True)
    off = {"logits off by": float((batch - steps).norm() / steps.norm())}
    report.fact(
        "over bridges and step by step",
        off | {"same tokens": float((batch.argmax(-1) == steps.argmax(-1)).float().mean())},
    )
    report.fact("logits finite", bool(batch.isfinite().all()))
    report.fact("graph = eager", torch.equal(batch, run(SLOTS, slice(0, SLOTS), eager=True)))
    for first, last in ((3, 4), (2, 5), (8, 16), (20, 53)):
        same = torch.equal(batch[first:last], run(SLOTS, slice(first, last), eager=False))
        report.fact(f"slots {first} to {last - 1} = in {SLOTS}", same)


def device_seconds(engine: Engine, items: list[SlotTokens], steps: int) -> float:
    """Of a decode pass whose inputs are sent and whose result is left on the device."""
    for _ in range(3):
        engine.runner.forward("decode", items)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(steps):
        engine.runner.forward("decode", items)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / steps


def decode_row(report: Report, engine: Engine, slots: int, context: int, bandwidth: float) -> None:
    with filled(engine, slots, context) as items:
        device = device_seconds(engine, items, STEPS)
    decode = timed_decode(engine, [random_tokens(engine, context + 1, s) for s in range(slots)], STEPS, "random")
    seconds, nbytes = statistics.median(decode.step_seconds), bytes_per_step(engine, decode.context, slots)
    report.row(
        slots=slots,
        context=context,
        kv=engine.plan.kv.kv_format.name,
        filled="random",
        step_ms=round(seconds * 1e3, 3),
        device_ms=round(device * 1e3, 3),
        tok_s=round(slots / seconds, 1),
        bytes_per_step=nbytes,
        share_of_bandwidth=round(nbytes / seconds / bandwidth, 3),
    )


def floors(engine: Engine, slots: int, context: int, bandwidth: float) -> dict[str, float]:
    """Microseconds that moving its bytes takes at least: all of a step's, K and V, recurrent state (read and written)."""
    plan = engine.plan
    states = sum(spec.nbytes for spec in plan.state.layer_specs()[:2]) * plan.state.num_layers / (plan.kv.num_slots + 1)
    parts = {
        "all": bytes_per_step(engine, context, slots),
        "kv": slots * context * plan.kv.page_nbytes / plan.kv.page_size,
        "state": 2 * slots * states,
    }
    return {name: round(nbytes / bandwidth * 1e6, 1) for name, nbytes in parts.items()}


def profiles(report: Report, engine: Engine, bandwidth: float) -> None:
    for slots, context in ((1, SHORT), (8, SHORT), (32, SHORT), (8, LONG)):
        report.fact(f"step {slots} x {context}, floor in us", floors(engine, slots, context, bandwidth))
        with filled(engine, slots, context) as items:
            report.fact(f"step {slots} x {context}, us by family", decode_families(engine, items))
            report.fact(f"step {slots} x {context}, us by early launch", by_early_launch(engine, items))


def prefills(report: Report, engine: Engine, before: int) -> None:
    tidy(engine)
    timed_prefill(engine, random_tokens(engine, 2 * CHUNK, 1))
    for length in (CHUNK, LONG):
        seconds = min(timed_prefill(engine, random_tokens(engine, length, seed)) for seed in (2, 3))
        report.fact(f"prefill {length}", {"tok_s": round(length / seconds), "seconds": round(seconds, 3)})
    for seed in range(16):
        engine.add_request(random_tokens(engine, SHORT, seed), SamplingParams(max_tokens=1))
    torch.cuda.synchronize()
    start = time.perf_counter()
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    report.fact(f"prefill 16 x {SHORT}", {"tok_s": round(16 * SHORT / seconds), "seconds": round(seconds, 3)})
    slot = engine.acquire_slot(CHUNK)
    item = SlotTokens(slot, engine.slots.prepare_write(slot, CHUNK), random_tokens(engine, CHUNK, 4))
    engine.runner.apply(*engine.slots.take_changes())
    report.fact(f"prefill {CHUNK}, ms by operation", prefill_families(engine, item))
    engine.release_slot(slot)
    report.fact("memory after all", memory(engine, before))


def soak(report: Report, engine: Engine) -> None:
    """Many requests of random lengths, some of them ended early: the device's memory afterwards is what it was."""
    tidy(engine)
    draw = random.Random(0)

    def run(count: int) -> tuple[float, float]:
        left = count
        while left or engine.has_work:
            while left and len(engine.scheduler.waiting) < SLOTS:
                length, tokens = draw.randrange(1, 300), draw.randrange(1, 24)
                engine.add_request(random_tokens(engine, length, left), SamplingParams(max_tokens=tokens))
                left -= 1
            for output in engine.step():
                if output.error is not None:
                    raise output.error
            if draw.random() < 0.2 and engine._requests:
                engine.end_request(draw.choice(list(engine._requests)))
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    before = run(REQUESTS // 10)  # of every shape once
    start = time.perf_counter()
    after = run(REQUESTS)
    report.fact(
        f"{REQUESTS} requests",
        {
            "seconds": round(time.perf_counter() - start, 1),
            "free slots": engine.stats.free_slots,
            "allocated grew by": after[0] - before[0],
            "reserved grew by": after[1] - before[1],
        },
    )


def large_model(report: Report, model: str, formats: list[str], parts: set[str]) -> None:
    bandwidth = read_bandwidth(DEVICE, 1)
    report.fact("bandwidth", round(bandwidth))
    context = context_needed(LONG, STEPS)
    tokens = max(8 * (context + 256), SLOTS * 2048)
    engines: list[Engine] = []
    before = torch.cuda.mem_get_info()[0]
    report.part("build", 90, lambda: engines.append(build(report, model, formats[0], SLOTS, context, tokens)))
    if engines:
        engine = engines.pop()
        if "same" in parts:
            report.part("same", 20, lambda: same_bits(report, engine))
        if "decode" in parts:
            decode_rows(report, engine, bandwidth)
        if "profile" in parts:
            report.part("profile", 30, lambda: profiles(report, engine, bandwidth))
        if "soak" in parts:
            report.part("soak", 40, lambda: soak(report, engine))
        if "prefill" in parts:
            report.part("prefill", 40, lambda: prefills(report, engine, before))
        del engine
    for kv in formats[1:] if "kv" in parts else ():
        free_memory()
        report.part(f"kv {kv}", 60, partial(other_kv, report, model, kv, context, bandwidth))


def decode_rows(report: Report, engine: Engine, bandwidth: float) -> None:
    for slots, length in CASES:
        report.part(f"decode {slots} x {length}", 20, partial(decode_row, report, engine, slots, length, bandwidth))


def other_kv(report: Report, model: str, kv: str, context: int, bandwidth: float) -> None:
    engine = build(report, model, kv, 8, context, 8 * (context + 256))
    decode_row(report, engine, 8, LONG, bandwidth)
    decode_row(report, engine, 1, LONG, bandwidth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.8-27b-fp8")
    parser.add_argument("--kv-cache-dtype", default="fp16,int8_per_token_head,turboquant_k8v4")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--parts", default="small,build,same,decode,profile,soak,prefill,kv,dense")
    parser.add_argument("--weights", default="gaussian", choices=("gaussian", "tiny"), help="of the large model")
    args = parser.parse_args()
    report, parts = Report("gpu_step", args.out, args.seconds), set(args.parts.split(","))
    report.fact("model", args.model)
    report.fact("weights", args.weights)
    report.fact("kernels", "triton")
    report.fact("device", torch.cuda.get_device_name(DEVICE))
    report.fact("steps", STEPS)
    if "small" in parts:
        report.part("small", 80, lambda: small_model(report, HYBRID))
    if parts - {"small", "dense"}:
        with tiny_weights() if args.weights == "tiny" else nullcontext():
            large_model(report, args.model, args.kv_cache_dtype.split(","), parts)
    if "dense" in parts:
        report.part("dense", 30, lambda: small_model(report, DENSE))
    print(json.dumps({**report.facts, "rows": report.rows}), flush=True)


if __name__ == "__main__":
    main()
