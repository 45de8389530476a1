"""Times the matrix products on one GPU at the shapes of Qwen3.5-27B, and writes rows to results/h200-linear.json.

    python benchmarks/gpu_linear.py [--seconds N] [--out FILE]

First every product is checked at its true shape: against float32, and a row alone against the same row among others, bit
for bit. Then: `step`, the products of a whole decode step (64 layers of distinct weights and the head, in one CUDA graph);
each shape by itself, over enough copies that no L2 holds them; and many rows, by each way there is to multiply them.
`floor_us` is the time in which a device-to-device copy would move the weights, `share` that over the time taken, and
`predicted_us` what was expected before the first run (see `predicted`). Sections are independent: one that fails is
reported, and the others go on; none begins after --seconds; the file is written anew after each.

`gpu_linear_tune` finds sizes for few rows.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from gpu_attention import copy_bandwidth
from pocketllm.kernels import reference
from pocketllm.kernels import triton as kernels
from pocketllm.kernels.triton.linear import few_rows_with, many_rows_with
from pocketllm.kernels.triton.linear_fp8 import library_product, tile_product
from pocketllm.kernels.triton.linear_tuning import LinearTable, TileConfig, linear_table, product_config
from pocketllm.kernels.triton.quantize import quantize
from pocketllm.kernels.triton.tune import time_graph
from pocketllm.kernels.triton.tuning import multiprocessors
from pocketllm.kernels.types import LinearWeight
from pocketllm.weights.formats import FORMATS

DEVICE = torch.device("cuda", 0)
LAYERS = 64
SHAPES = {  # name: (N, K, whether gated, how many there are in the model)
    "gdn_in": (16384, 5120, False, 48),
    "attn_in": (14336, 5120, False, 16),
    "out": (5120, 6144, False, 64),
    "gate_up": (34816, 5120, True, 64),
    "down": (5120, 17408, False, 64),
}
HEAD = (248320, 5120)
ROWS, MANY_ROWS = (1, 8, 32, 64), (2048, 8192)
COLD = 2 * 2**30  # bytes of distinct weights a timed graph walks through


def random_weight(name: str, n: int, k: int) -> LinearWeight:
    """A weight of about unit gain, made on the device from random codes (any bits but those of no number)."""
    planes = []
    for spec in FORMATS[name].specs(n, k):
        if spec.dtype in (torch.uint8, torch.int8):
            plane = torch.randint(0, 256, spec.shape, dtype=torch.uint8, device=DEVICE).view(spec.dtype)
        elif spec.dtype == torch.float8_e4m3fn:
            codes = torch.randint(0, 256, spec.shape, dtype=torch.uint8, device=DEVICE)
            plane = codes.masked_fill_(codes & 0x7F == 0x7F, 0).view(spec.dtype)
        elif spec.name == "weight":
            plane = torch.randn(spec.shape, dtype=spec.dtype, device=DEVICE) * k**-0.5
        else:
            size = {"fp8_block": 100.0, "w8": 74.0}.get(name, 4.6) * k**0.5
            plane = ((torch.rand(spec.shape, device=DEVICE) + 0.5) / size).to(spec.dtype)
            if spec.name == "minimum":
                plane = -7.5 * planes[1]
        planes.append(plane)
    return LinearWeight(FORMATS[name], (n, k), tuple(planes))


def random_layers() -> list[dict[str, LinearWeight]]:
    """The weights of every layer by name: one in four is attention."""
    return [
        {
            name: random_weight("fp8_block", n, k)
            for name, (n, k, _, _) in SHAPES.items()
            if name != ("gdn_in" if i % 4 == 3 else "attn_in")
        }
        for i in range(LAYERS)
    ]


def product(weight: LinearWeight, gated: bool) -> Callable[[Tensor], Tensor]:
    return partial(kernels.gated_linear if gated else kernels.linear, weight=weight)


def inputs(rows: int, k: int) -> Tensor:
    return torch.randn(rows, k, dtype=torch.bfloat16, device=DEVICE)


def error(got: Tensor, wanted: Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


def predicted(floor: float, launches: int) -> float:
    """Microseconds: weights at 95% of the copy's rate, and 1.5 for each launch to fill and to drain the device."""
    return floor / 0.95 + 1.5 * launches


class Report:
    """Rows as they come, printed and kept in a file."""

    def __init__(self, bandwidth: float, path: Path | None, seconds: float) -> None:
        self.bandwidth, self.path, self.end = bandwidth, path, time.perf_counter() + seconds
        self.rows: list[dict[str, Any]] = []

    def attempt(self, what: str, run: Callable[[], object]) -> None:
        """Runs a section, if there is time left; a failure ends it alone."""
        start = time.perf_counter()
        if start > self.end:
            print(f"-- {what}: no time left", flush=True)
            return
        try:
            run()
        except Exception:  # on a lent machine: what can be measured is
            traceback.print_exc()
        print(f"-- {what}: {time.perf_counter() - start:.1f} s", flush=True)
        self.save()

    def save(self) -> None:
        if self.path is None:
            return
        facts = {
            "date": datetime.date.today().isoformat(),
            "card": torch.cuda.get_device_name(DEVICE),
            "copy_tb_per_s": round(self.bandwidth / 1e12, 3),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f" {json.dumps(k)}: {json.dumps(v)}," for k, v in facts.items()]
        listed = ",\n".join(f"  {json.dumps(row)}" for row in self.rows)
        self.path.write_text("\n".join(["{", *lines, ' "rows": [', listed, " ]", "}", ""]))

    def add(self, nbytes: int | None = None, flops: float | None = None, launches: int = 1, **row: Any) -> None:
        us = row["us"]
        if nbytes is not None:
            floor = nbytes / self.bandwidth * 1e6
            row |= {"floor_us": round(floor, 2), "share": round(floor / us, 3)}
            row["predicted_us"] = round(predicted(floor, launches), 1)
        if flops is not None:
            row["tflop_s"] = round(flops / us / 1e6)
        row["us"] = round(us, 2)
        self.rows.append(row)
        print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)


def check(name: str, weight: LinearWeight, gated: bool) -> None:
    """AssertionError if a product at this shape is wrong, or a row's depends on its neighbours."""
    x = inputs(80, weight.shape[1])
    run, exact = product(weight, gated), (reference.gated_linear if gated else reference.linear)
    wanted = exact(x.float(), weight)
    whole = run(x[:64])
    off = error(whole, wanted[:64])
    assert off < 6e-3, f"{name}: error {off:.1e}"
    for m in (1, 2, 8, 33):
        assert torch.equal(run(x[64 - m : 64]), whole[64 - m :]), f"{name}: a row among {m} differs"
    many = error(run(x), wanted)
    fp8 = weight.format.name == "fp8_block"
    assert many < (6e-2 if fp8 else 8e-3), f"{name}: error {many:.1e} of many rows"
    print(f"{name:8} {weight.format.name:9} {weight.shape}: error {off:.1e} at 64 rows, {many:.1e} at 80", flush=True)


def few_rows(table: LinearTable, weight: LinearWeight, gated: bool, x: Tensor) -> Tensor:
    """As the engine multiplies few rows, with the settings of `table`."""
    sms, halves = multiprocessors(DEVICE), 2 if gated else 1
    config = product_config(table, sms, weight.format.name, *weight.shape, halves)
    return few_rows_with(config, table, x, weight, gated)


def num_launches(weight: LinearWeight) -> int:
    """Of a product of few rows: one, and one more to merge splits."""
    gated = weight.shape == SHAPES["gate_up"][:2]
    halves = 2 if gated else 1
    config = product_config(linear_table(DEVICE), multiprocessors(DEVICE), weight.format.name, *weight.shape, halves)
    return min(config.splits, 2)


def step_of(
    table: LinearTable, layers: list[dict[str, LinearWeight]], head: LinearWeight, rows: int
) -> Callable[[], None]:
    """All products of one decode step, in order."""
    xs = {k: inputs(rows, k) for k in {w.shape[1] for w in layers[0].values()}}

    def run() -> None:
        for layer in layers:
            for name, weight in layer.items():
                few_rows(table, weight, SHAPES[name][2], xs[weight.shape[1]])
        few_rows(table, head, False, xs[head.shape[1]])

    return run


def time_step(
    report: Report, layers: list[dict[str, LinearWeight]], head: LinearWeight, early: int, every_rows: Iterable[int]
) -> None:
    nbytes = sum(w.nbytes for layer in layers for w in layer.values()) + head.nbytes
    table = replace(linear_table(DEVICE), early=early)
    weights = [*(w for layer in layers for w in layer.values()), head]
    launches = sum(num_launches(weight) for weight in weights)
    for rows in every_rows:
        us = time_graph([step_of(table, layers, head, rows)], 5)
        report.add(nbytes, launches=launches, part="step", rows=rows, early=early, us=us)


def copies(layers: list[dict[str, LinearWeight]], name: str) -> list[LinearWeight]:
    weights = [layer[name] for layer in layers if name in layer]
    return weights[: max(-(-COLD // weights[0].nbytes), 3)]


def time_shape(report: Report, name: str, weights: list[LinearWeight], gated: bool, rows: Iterable[int] = ROWS) -> None:
    (n, k), fmt = weights[0].shape, weights[0].format.name
    for m in rows:
        x = inputs(m, k)
        us = time_graph([partial(product(w, gated), x) for w in weights], 3)
        launches = num_launches(weights[0])
        report.add(weights[0].nbytes, launches=launches, part=name, format=fmt, n=n, k=k, rows=m, us=us)


def ways_of_many(weight: LinearWeight) -> dict[str, Callable[[Tensor], Tensor]]:
    """The ways to multiply many rows by an fp8_block weight."""
    table = linear_table(DEVICE)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "library fp8": lambda x: library_product(quantize(x), weight),
        "decode in kernel": lambda x: many_rows_with(table.tiles["fp8_block"], table, x, weight),
        "quantize only": lambda x: quantize(x).codes,
    }
    for rows, block_n, warps, stages in ((128, 128, 8, 3), (128, 128, 8, 4), (64, 128, 4, 4), (128, 64, 8, 4)):
        sizes = TileConfig(rows, block_n, 128, warps, stages)
        ways[f"tiles {rows}x{block_n} w{warps} s{stages}"] = partial(_tiles, sizes, weight)
    return ways


def _tiles(sizes: TileConfig, weight: LinearWeight, x: Tensor) -> Tensor:
    return tile_product(quantize(x), weight, sizes)


def time_many(report: Report, name: str, weight: LinearWeight, rows: int) -> None:
    (n, k), x = weight.shape, inputs(rows, weight.shape[1])
    plain = torch.randn(n, k, dtype=torch.bfloat16, device=DEVICE) * k**-0.5
    ways = ways_of_many(weight) | {"library bf16": lambda x: F.linear(x, plain)}
    for way, run in ways.items():
        try:
            us = time_graph([partial(run, x)], 3)
        except Exception as failure:  # this way is not for this device
            print(f"no {way}: {str(failure).splitlines()[0][:150]}", flush=True)
            continue
        report.add(flops=2.0 * rows * n * k, part=name, n=n, k=k, rows=rows, way=way, us=us)
    us = time_graph([partial(kernels.gated_linear if name == "gate_up" else kernels.linear, x, weight)], 3)
    report.add(flops=2.0 * rows * n * k, part=name, n=n, k=k, rows=rows, way="as chosen", us=us)


def sections(report: Report, layers: list[dict[str, LinearWeight]], head: LinearWeight) -> None:
    attempt, chosen = report.attempt, linear_table(DEVICE).early
    for name, (_, _, gated, _) in SHAPES.items():
        attempt(f"check {name}", partial(check, name, copies(layers, name)[0], gated))
    attempt("check head", partial(check, "head", head, False))
    attempt(f"step, early={chosen}", partial(time_step, report, layers, head, chosen, ROWS))
    for rows, name in itertools.product(MANY_ROWS, ("gate_up", "down", "gdn_in", "out")):
        attempt(f"{name}, {rows} rows", partial(time_many, report, name, copies(layers, name)[0], rows))
    for early in sorted({0, 1, 2} - {chosen}):
        attempt(f"step, early={early}", partial(time_step, report, layers, head, early, (8,)))
    for name, (_, _, gated, _) in SHAPES.items():
        attempt(name, partial(time_shape, report, name, copies(layers, name), gated))
    attempt("head", partial(time_shape, report, "head", [head, random_weight("bf16", *HEAD)], False))
    for fmt in ("w8", "w4"):
        weights = [random_weight(fmt, 5120, 17408) for _ in range(24)]
        attempt(f"check {fmt}", partial(check, "down", weights[0], False))
        attempt(f"down in {fmt}", partial(time_shape, report, "down", weights, False, (1, 8, 64)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "h200-linear.json")
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    report = Report(copy_bandwidth(), options.out, options.seconds)
    torch.cuda.empty_cache()
    print(f"copy {report.bandwidth / 1e12:.3f} TB/s", flush=True)
    layers = random_layers()
    sections(report, layers, random_weight("bf16", *HEAD))


if __name__ == "__main__":
    start = time.time()
    main()
    print(f"{time.time() - start:.0f} s")
