"""How near the CPU's matrix products come to its memory and its arithmetic, and to torch.

    python benchmarks/linear.py [--formats bf16,w8,w4] [--rows 1,2,4,8,16,32,64] [--threads N] [--quick] [--json]

For each format, shape and number of rows: microseconds, GB/s of weights read and their share of what a plain read loop
over 1 GB reaches just before (a shared machine drifts), GFLOP/s, and how many times faster it is than torch's
`F.linear` with bfloat16 weights on as many threads. Weights are taken in turn from copies that together exceed any
cache; times are the best of several passes over them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pocketllm.kernels.numba.linear import Linear
from pocketllm.kernels.numba.linear_simd import tile_store
from pocketllm.kernels.numba.runtime import ThreadPool, kernel, parallel_for
from pocketllm.kernels.numba.simd import Target, load_f32x16, tile_zeros
from pocketllm.kernels.types import LinearWeight
from pocketllm.options import EngineOptions
from pocketllm.weights.formats import FORMATS, encode

SHAPES = {  # (N, K) of Qwen2.5-0.5B's products, and a square one of larger models
    "qkv": (1152, 896),
    "o": (896, 896),
    "gate_up": (9728, 896),
    "down": (896, 4864),
    "head": (151936, 896),
    "square": (4096, 4096),
}
COPIES_BYTES = 192 << 20
READ_BYTES = 1 << 30
PASSES = 7


@kernel
def _read_lines(begin, end, x, out):
    total = tile_zeros(4)
    for i in range(begin, end):
        at = x + i * 256
        total = (
            total[0] + load_f32x16(at),
            total[1] + load_f32x16(at + 64),
            total[2] + load_f32x16(at + 128),
            total[3] + load_f32x16(at + 192),
        )
    tile_store(total, 4, out, 0, 1, 64, 0)  # what every chunk writes is dropped; it only keeps the loads


@kernel
def read(pool, x, nbytes, out):
    parallel_for(pool, _read_lines, nbytes // 256, nbytes // 256 // 32, (x, out))


def best(run: Callable[[], object], passes: int = PASSES) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(passes):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def in_turn(multiply: Callable[[Any], object], weights: list[Any]) -> float:
    """Seconds a product, over weights that follow each other."""
    multiply(weights[0])

    def run() -> None:
        for weight in weights:
            multiply(weight)

    return best(run) / len(weights)


def copies(weight: LinearWeight) -> list[LinearWeight]:
    count = max(1, COPIES_BYTES // weight.nbytes)
    return [LinearWeight(weight.format, weight.shape, tuple(t.clone() for t in weight.tensors)) for _ in range(count)]


def torch_seconds(matrix: Tensor, rows: list[int], threads: int) -> dict[int, float]:
    weights = [matrix.clone() for _ in range(max(1, COPIES_BYTES // matrix.nbytes))]
    torch.set_num_threads(threads)
    seconds = {}
    for m in rows:
        x = torch.randn(m, matrix.shape[1]).bfloat16()
        seconds[m] = in_turn(lambda w, x=x: F.linear(x, w), weights)
    torch.set_num_threads(1)
    time.sleep(0.02)  # torch's idle threads spin for a while
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="bf16,w8,w4", help="comma-separated, or all")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="only the shapes of a layer, 1, 4 and 8 rows")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of the table")
    args = parser.parse_args()

    threads = EngineOptions(threads=args.threads).num_threads()
    formats = list(FORMATS) if args.formats == "all" else args.formats.split(",")
    rows = [1, 4, 8] if args.quick else [int(m) for m in args.rows.split(",")]
    shapes = {n: s for n, s in SHAPES.items() if not args.quick or n in ("qkv", "o", "gate_up", "down")}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pool, target = ThreadPool(threads), Target.host()
    backend = Linear(pool, target)
    big, sink = torch.ones(READ_BYTES // 4), torch.empty(64)  # pages of zeros would share one page of memory

    results: list[dict[str, Any]] = []
    if not args.json:
        print(f"{threads} threads, instructions: {', '.join(target.features) or 'plain'}")
        print("format     shape      N x K            rows       us   GB/s  of read  GFLOP/s  x torch")
    for shape_name, (n, k) in shapes.items():
        matrix = (torch.randn(n, k) * k**-0.5).bfloat16()
        reference = torch_seconds(matrix, rows, threads)
        for format_name in formats:
            weights = copies(backend.pack_weight(encode(FORMATS[format_name], matrix)))
            for m in rows:
                read_rate = READ_BYTES / best(lambda: read(pool.handle, big.data_ptr(), READ_BYTES, sink.data_ptr()), 3)
                x = torch.randn(m, k)
                seconds = in_turn(lambda w, x=x: backend.linear(x, w), weights)
                rate = weights[0].nbytes / seconds
                row = {
                    "format": format_name,
                    "shape": shape_name,
                    "n": n,
                    "k": k,
                    "rows": m,
                    "us": round(seconds * 1e6, 1),
                    "gb_s": round(rate / 1e9, 1),
                    "read_gb_s": round(read_rate / 1e9, 1),
                    "of_read": round(rate / read_rate, 2),
                    "gflop_s": round(2 * m * n * k / seconds / 1e9),
                    "x_torch": round(reference[m] / seconds, 2),
                }
                results.append(row)
                if not args.json:
                    print(
                        f"{format_name:10} {shape_name:10} {f'{n} x {k}':16} {m:4} {row['us']:9.1f} {row['gb_s']:6.1f}"
                        f"  {row['of_read']:6.0%}  {row['gflop_s']:7}  {row['x_torch']:7.2f}",
                        flush=True,
                    )
    if args.json:
        print(json.dumps({"benchmark": "linear", "threads": threads, "target": target.features, "results": results}))


if __name__ == "__main__":
    main()
