"""Where the time of a pass goes on one GPU, by family of kernels.

    python benchmarks/gpu_families.py [--model NAME] [--cases 1x1024,8x1024,...] [--prefill N] [--variants]
                                      [--rings 8x6x6x2,8x4x4x2]

Decode passes are CUDA graphs, whose kernels overlap at their ends: a family's time is what the graph takes less when the
family is left out (its results are then whatever is in memory). Prefill: the device's time inside each operation. With
--variants, the same decode passes with every setting of early launch; with --rings, with bridges of so many warps, places in
the ring for weights and for rows, and units of weights on their way.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pocketllm.cli.bench_run import context_needed, random_tokens
from pocketllm.engine.engine import Engine
from pocketllm.engine.inputs import SlotTokens, pack
from pocketllm.kernels import triton as kernels
from pocketllm.kernels.triton.bridge import SIZES
from pocketllm.kernels.triton.linear_tuning import LinearTable, linear_table
from pocketllm.kernels.triton.pairs import room_for_pairs, takes_pairs
from pocketllm.kernels.types import Activations, Bridge, Readers
from pocketllm.parallel import SMALL_BATCH, Summands

REPLAYS = 12


def _like_linear(x: Tensor, weight: Any) -> Tensor:
    return x.new_empty(len(x), weight.shape[0])


def _for(readers: Readers, x: Tensor) -> Activations:
    return (
        room_for_pairs(*x.shape, x.dtype, x.device)
        if takes_pairs(readers)
        else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    )


def _like_delta(qkv: Tensor, z: Tensor, *rest: Any) -> Activations:
    return _for(rest[-1], z)


def _no_bridge(weights: Bridge, num_rows: int, dtype: Any, places: Any) -> Any:
    def cross(x: Activations, residual: Tensor) -> list[Tensor]:
        return [residual.new_empty(num_rows, w.shape[0]) for w in weights.next_in] or [
            residual.new_empty(1, *residual.shape)
        ]

    return cross


EMPTY: dict[str, dict[str, Callable[..., Any]]] = {  # family -> operation -> something of the result's shape
    "bridges": {"bridge": _no_bridge},
    "products": {
        "linear": _like_linear,
        "linear_summands": lambda x, weight, place=None: Summands.of(_like_linear(x, weight)),
        "gated_linear": lambda x, weight, readers=(): x.new_empty(len(x), weight.shape[0] // 2),
    },
    "norms": {
        "add_rms_norm": lambda x, residual, weight, eps, readers=(): torch.empty_like(residual),
        "rms_norm": lambda x, weight, eps: torch.empty_like(x),
    },
    "delta rule": {"gated_delta_decode": _like_delta},
    "attention": {"attend": lambda kv, q, *_: torch.empty_like(q)},
    "attention's small": {
        "append": lambda *_: None,
        "norm_rope": lambda x, *_: x.new_empty(x.shape),
        "sigmoid_mul": lambda x, gate, readers=(): _for(readers, x),
    },
}


@contextmanager
def without(operations: dict[str, Callable[..., Any]]) -> Iterator[None]:
    kept = {name: getattr(kernels, name) for name in operations}
    for name, instead in operations.items():
        setattr(kernels, name, instead)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(kernels, name, function)


def graph_us(engine: Engine, items: list[SlotTokens]) -> float:
    """Microseconds of the decode pass of `items`, recorded now."""
    layout, block = pack("decode", items, all_logits=True, pinned=False)
    batch = layout.batch(block.to(engine.device))
    with torch.inference_mode():
        _, replay = kernels.capture(lambda: engine.runner._forward(batch))
        assert replay is not None
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        replay()
        start.record()
        for _ in range(REPLAYS):
            replay()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) * 1e3 / REPLAYS


def decode_families(engine: Engine, items: list[SlotTokens]) -> dict[str, float]:
    """Microseconds by family; `all`: of the whole pass; `rest`: what is left without any of them."""
    found = {"all": graph_us(engine, items)}
    for family, operations in EMPTY.items():
        with without(operations):
            found[family] = found["all"] - graph_us(engine, items)
    with without({name: call for operations in EMPTY.values() for name, call in operations.items()}):
        found["rest"] = graph_us(engine, items)
    return {family: round(us, 1) for family, us in found.items()}


def prefill_families(engine: Engine, item: SlotTokens) -> dict[str, float]:
    """Milliseconds of each operation of one pass, and of the whole."""
    marks: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            label = name
            if name in ("linear", "gated_linear", "linear_summands"):
                label = f"{name} {'x'.join(map(str, arguments[1].shape))}"
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = function(*arguments, **named)
            end.record()
            marks[label].append((start, end))
            return result

        return call

    names = ["linear", "gated_linear", "linear_summands", "rms_norm", "add_rms_norm", "norm_rope", "sigmoid_mul", "append",
             "prefill", "gated_delta_prefill", "embedding"]  # fmt: skip
    engine.runner.forward("prefill", [item])
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with without({name: timed(name, getattr(kernels, name)) for name in names}):
        start.record()
        engine.runner.forward("prefill", [item])
        end.record()
        end.synchronize()
    found = {"all": start.elapsed_time(end)}
    found |= {name: sum(a.elapsed_time(b) for a, b in pairs) for name, pairs in marks.items()}
    return {name: round(ms, 2) for name, ms in sorted(found.items(), key=lambda pair: -pair[1])}


def by_early_launch(engine: Engine, items: list[SlotTokens]) -> dict[int, float]:
    """Microseconds of the decode pass with each setting of early launch (see `linear_tuning.LinearTable`)."""
    table = linear_table(engine.device)
    chosen, found = (table.early, table.early_rows, table.early_product_rows), {}
    for early in (0, 1, 2):
        _set_early(table, early, SMALL_BATCH, SMALL_BATCH)
        found[early] = round(graph_us(engine, items), 1)
    _set_early(table, *chosen)
    return found


def by_ring(engine: Engine, items: list[SlotTokens], rings: list[tuple[int, ...]]) -> dict[str, float]:
    """Microseconds of the decode pass with bridges of each size (see `bridge.SIZES`)."""
    found = {}
    for ring in rings:
        with patch.dict(SIZES, dict.fromkeys(SIZES, ring)):
            found["x".join(map(str, ring))] = round(min(graph_us(engine, items) for _ in range(2)), 1)
    return found


def _set_early(table: LinearTable, early: int, rows: int, product_rows: int) -> None:
    object.__setattr__(table, "early", early)
    object.__setattr__(table, "early_rows", rows)
    object.__setattr__(table, "early_product_rows", product_rows)


def main() -> None:
    from gpu_step import filled, tidy

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.8-27b-fp8")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--cases", default="1x1024,8x1024,32x1024,8x32768")
    parser.add_argument("--prefill", type=int, default=8192)
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--rings", default="")
    args = parser.parse_args()
    cases = [tuple(map(int, case.split("x"))) for case in args.cases.split(",")]
    rings = [tuple(map(int, ring.split("x"))) for ring in args.rings.split(",") if ring]
    context = max(context_needed(length, 4) for _, length in cases)
    engine = Engine(
        args.model, load_format="dummy", kernels="triton", kv_cache_dtype=args.kv_cache_dtype,
        max_batch_size=max(slots for slots, _ in cases), max_context=max(context, args.prefill + 512),
        kv_tokens=max([slots * (length + 512) for slots, length in cases] + [args.prefill + 512]),
        prefill_chunk=max(args.prefill, 8192),
    )  # fmt: skip
    print("built", flush=True)
    for slots, length in cases:
        with filled(engine, slots, length) as items:
            print(f"{slots}x{length}", json.dumps(decode_families(engine, items)), flush=True)
            if args.variants:
                print("  by early launch", json.dumps(by_early_launch(engine, items)), flush=True)
            if rings:
                print("  by ring", json.dumps(by_ring(engine, items, rings)), flush=True)
    if args.prefill:
        tidy(engine)
        slot = engine.acquire_slot(args.prefill)
        item = SlotTokens(slot, engine.slots.prepare_write(slot, args.prefill), random_tokens(engine, args.prefill, 4))
        engine.runner.apply(*engine.slots.take_changes())
        print(f"prefill {args.prefill}", json.dumps(prefill_families(engine, item)), flush=True)


if __name__ == "__main__":
    main()
