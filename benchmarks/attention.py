"""Decode attention on this CPU, by KV format and context: is a quantised cache faster, not only smaller?

    python benchmarks/attention.py [--geometry 14/2/64,24/4/256] [--formats ...] [--contexts 1,512,2048,8192,32768]
                                   [--slots 1,4,8] [--key-bias] [--prefill N] [--threads N] [--quick] [--json]

A geometry is query heads / KV heads / head dim. For each one: microseconds a layer, GB/s of the cache that is read, and the
time over that of fp16 in the same run. Formats take turns, several layers of distinct storage (more than the caches hold,
where memory allows) make a pass, and the best pass counts: the machine is shared. `--key-bias` adds a K bias to the formats
that leave it out of storage (Qwen2, 2.5). `--prefill N` also times the last N tokens of a context as one chunk.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from pocketllm.cache.formats import KV_FORMATS, KVFormat
from pocketllm.kernels.numba import attention, threads
from pocketllm.kernels.types import AttentionMask, KeyBias, LayerKV
from pocketllm.options import EngineOptions

BASELINE = "fp16"
PAGE = 256
PASS_BYTES = 96 << 20  # of cache read a pass, in at most LAYERS layers
LAYERS = 24


def layer(kv_format: KVFormat, kv_heads: int, head_dim: int, slots: int, context: int, bias: KeyBias | None) -> LayerKV:
    """A layer with `slots` slots of `context` random tokens."""
    pages = -(-context // PAGE)
    planes = tuple(
        torch.zeros(slots * pages + 1, PAGE, kv_heads, p.width, dtype=p.dtype) for p in kv_format.planes(head_dim)
    )
    table = torch.full((slots + 1, pages), slots * pages, dtype=torch.int32)
    table[:-1] = torch.randperm(slots * pages).view(slots, pages)
    kv = LayerKV(planes, table, kv_format, head_dim, bias)
    for slot in range(slots):
        k, v = torch.randn(2, context, kv_heads, head_dim)
        attention.append(kv, k, v, torch.full((context,), slot, dtype=torch.int32), torch.arange(context))
    return kv


def key_bias(kv_heads: int, head_dim: int, context: int) -> KeyBias:
    angles = torch.outer(torch.arange(float(context)), 1e6 ** -torch.linspace(0, 1, head_dim // 2))
    return KeyBias(torch.randn(kv_heads, head_dim), angles.cos(), angles.sin())


def best_times(passes: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds of each pass: the best of several, taken in turn."""
    best = dict.fromkeys(passes, float("inf"))
    for _ in range(rounds):
        for name, run in passes.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def measure(
    geometry: tuple[int, int, int], context: int, slots: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    heads, kv_heads, head_dim = geometry
    ids, lengths = torch.arange(slots, dtype=torch.int32), torch.full((slots,), context, dtype=torch.int32)
    q = torch.randn(slots, 1, heads, head_dim)
    new = min(options.prefill, context)
    chunk, bounds = torch.randn(new, heads, head_dim), torch.tensor([0, new], dtype=torch.int32)
    scale, mask = head_dim**-0.5, AttentionMask()
    bias = key_bias(kv_heads, head_dim, context) if options.key_bias else None
    layers: dict[str, list[LayerKV]] = {}
    for name in options.formats:
        kv_format = KV_FORMATS[name]
        size = kv_format.bytes_per_token(head_dim) * kv_heads * slots * context
        count = max(1, min(LAYERS, PASS_BYTES // size))
        one = layer(kv_format, kv_heads, head_dim, slots, context, bias if kv_format.drops_key_bias else None)
        copies = [LayerKV(tuple(p.clone() for p in one.planes), one.block_table, kv_format, head_dim, one.key_bias)
                  for _ in range(count - 1)]  # fmt: skip
        layers[name] = [one, *copies]

    def decode(of: list[LayerKV]) -> Callable[[], None]:
        def run() -> None:
            for kv in of:
                attention.attend(kv, q, ids, lengths, scale, mask)

        return run

    def prefill(kv: LayerKV) -> Callable[[], None]:
        def run() -> None:
            attention.prefill(kv, chunk, ids[:1], bounds, lengths[:1], scale, mask)

        return run

    times = best_times({name: decode(of) for name, of in layers.items()}, options.rounds)
    seconds = {name: t / len(layers[name]) for name, t in times.items()}
    chunks = best_times({name: prefill(of[0]) for name, of in layers.items()}, 3) if new else {}
    rows = []
    for name in options.formats:
        read = KV_FORMATS[name].bytes_per_token(head_dim) * kv_heads * slots * context
        row = {
            "geometry": "/".join(map(str, geometry)),
            "context": context,
            "slots": slots,
            "format": name,
            "us": round(seconds[name] * 1e6, 1),
            "gb_per_s": round(read / seconds[name] / 1e9, 1),
            "ratio": round(seconds[name] / seconds[BASELINE], 2) if BASELINE in seconds else None,
        }
        if new:
            row["prefill_us"] = round(chunks[name] * 1e6)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser.add_argument("--geometry", default="14/2/64,24/4/256")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=[n for n in KV_FORMATS if n != "fp32"])
    parser.add_argument("--contexts", type=numbers, default=[1, 512, 2048, 8192, 32768])
    parser.add_argument("--slots", type=numbers, default=[1, 4, 8])
    parser.add_argument("--key-bias", action="store_true")
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--max-bytes", type=int, default=1 << 30, help="skip cases whose fp16 cache is larger than this"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="one line at the end")
    options = parser.parse_args()
    options.rounds = 5 if options.quick else 15
    torch.set_num_threads(1)
    num_threads = EngineOptions(threads=options.threads).num_threads()
    threads.set_num_threads(num_threads)
    results = []
    head = f"{'heads/kv/dim':>12} {'context':>8} {'slots':>5} {'format':>20} {'us/layer':>9} {'GB/s':>6} {'/ fp16':>7}"
    print(
        f"{num_threads} threads, key bias: {'yes' if options.key_bias else 'no'}\n{head}"
        + "  prefill us" * bool(options.prefill)
    )
    for text in options.geometry.split(","):
        heads, kv_heads, head_dim = (int(x) for x in text.split("/"))
        for context in options.contexts:
            for slots in options.slots:
                if 4 * head_dim * kv_heads * slots * context > options.max_bytes:
                    continue
                for row in measure((heads, kv_heads, head_dim), context, slots, options):
                    results.append(row)
                    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
                    line = f"{row['geometry']:>12} {context:8} {slots:5} {row['format']:>20} {row['us']:9.1f}"
                    line += f" {row['gb_per_s']:6.1f}"
                    print(f"{line} {ratio:>7}" + (f" {row['prefill_us']:10}" if options.prefill else ""), flush=True)
    if options.json:
        print(json.dumps({"threads": num_threads, "key_bias": options.key_bias, "results": results}))


if __name__ == "__main__":
    main()
