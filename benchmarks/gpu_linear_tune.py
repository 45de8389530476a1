"""Finds sizes for the products of few rows on one GPU, at the shapes of Qwen3.5-27B, and times the table's.

    python benchmarks/gpu_linear_tune.py [--seconds N] [--only check|time|tune ...] [--workers N] [--table FILE]

check: for each shape, with the sizes of the device's table, the error against float32 and the numbers of rows at which a
row's bits differ (there must be none). time: all products of a decode step (`step`) and each shape by itself at 1, 8, 32
and 64 rows, over enough copies that no L2 holds them; `floor` is the time in which a device-to-device copy would move the
weights. tune: a grid of sizes for each shape and number of rows, the best four ways to split the sum first (with the time
at 8 rows without adding up the splits, as where the next kernel does it); the best entries, for `shapes` of the table, are
checked, printed, written to --table, and timed as a step.

Kernels are compiled ahead by worker processes. A section or a candidate that fails is reported, and the others go on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from gpu_attention import copy_bandwidth
from gpu_compiler import Case, Compiler
from gpu_linear import DEVICE, HEAD, SHAPES, Report, copies, error, inputs, random_layers, random_weight
from pocketllm.kernels import reference
from pocketllm.kernels.triton.linear import few_rows_with
from pocketllm.kernels.triton.linear_tuning import ProductConfig, linear_table, product_config
from pocketllm.kernels.triton.tune import time_graph
from pocketllm.kernels.triton.tuning import multiprocessors
from pocketllm.kernels.types import LinearWeight

ROWS, TUNED_ROWS = (1, 8, 32, 64), (8, 16, 32, 64)
CASES: dict[str, Case] = {
    **{name: ("fp8_block", n, k, gated) for name, (n, k, gated, _) in SHAPES.items()},
    "head": ("bf16", *HEAD, False),
    **{fmt: (fmt, 5120, 17408, False) for fmt in ("w8", "w4")},
}
Configs = dict[str, ProductConfig]  # for each of CASES


@cache
def table_configs() -> Configs:
    table, sms = linear_table(DEVICE), multiprocessors(DEVICE)
    return {name: product_config(table, sms, *case[:3], 2 if case[3] else 1) for name, case in CASES.items()}


def grid(case: Case, block_k: int) -> dict[int, list[list[ProductConfig]]]:
    """Splits -> for each of TUNED_ROWS the sizes (outputs, warps, stages) that are tried with so many."""
    _, n, k, gated = case
    tiles, groups = -(-k // block_k), {}
    few = ((32, 2, 4), (32, 2, 6), (32, 2, 8), (64, 2, 4), (64, 2, 6), (64, 4, 4), (64, 4, 6), (128, 4, 4))
    some = ((64, 2, 4), (64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 4, 5), (256, 8, 3))
    most = ((64, 4, 4), (64, 4, 5), (128, 4, 3), (128, 4, 4), (128, 8, 3), (128, 8, 4), (256, 8, 3))
    for splits in (1, 2, 3, 4, 6, 8):
        if splits == 1 or (-(-n // 64) * splits <= 16 * multiprocessors(DEVICE) and tiles >= 4 * splits):
            sizes: Sequence[Sequence[tuple[int, int, int]]] = (few, some, some, most)
            if gated and splits == 1:  # each output stands for two
                sizes = few, ((32, 2, 4), (64, 4, 4)), ((32, 2, 4), (64, 4, 4)), ((64, 4, 3), (64, 8, 3))
            groups[splits] = [[ProductConfig(b, block_k, w, s, splits) for b, w, s in of_rows] for of_rows in sizes]
    return groups


def call_of(config: ProductConfig, case: Case, x: Tensor) -> Callable[[LinearWeight], Tensor]:
    table, gated = linear_table(DEVICE), case[3]
    return lambda weight: few_rows_with(config, table, x, weight, gated)


def attempt_time(calls: list[Callable[[], object]], repeats: int = 3) -> float:
    try:
        return time_graph(calls, repeats)
    except Exception as failure:  # does not fit the device
        print(f"   no: {type(failure).__name__} {str(failure).splitlines()[0][:100]}", flush=True)
        return float("inf")


def time_of(config: ProductConfig, case: Case, rows: int, weights: list[LinearWeight]) -> float:
    call = call_of(config, case, inputs(rows, case[2]))
    return attempt_time([partial(call, weight) for weight in weights])


def check(title: str, configs: Configs, name: str, weight: LinearWeight) -> None:
    case = CASES[name]
    x = inputs(64, case[2])
    exact = (reference.gated_linear if case[3] else reference.linear)(x.float(), weight)

    def run(rows: int) -> Tensor:
        return call_of(configs[name], case, x[64 - rows :])(weight)

    whole = run(64)
    differ = [m for m in (1, 2, 8, 16, 17, 32, 33) if not torch.equal(run(m), whole[64 - m :])]
    verdict = f"BITS DIFFER at {differ} rows" if differ else "bits ok"
    off = error(whole, exact)
    print(f"{name:8} {title:6} error {off:.1e}  {verdict}{'' if off < 6e-3 else '  WRONG'}", flush=True)


def time_case(title: str, configs: Configs, name: str, weights: list[LinearWeight], floor: float) -> None:
    times = [time_of(configs[name], CASES[name], rows, weights) for rows in ROWS]
    listed = " ".join(f"{t:7.1f}" for t in times)
    print(f"{name:8} {title:6} us at {ROWS} rows: {listed}   floor {floor:.1f}", flush=True)


def step(configs: Configs, layers: list[dict[str, LinearWeight]], head: LinearWeight, rows: int) -> float:
    """Milliseconds of all products of a decode step."""
    xs = {k: inputs(rows, k) for k in {w.shape[1] for w in (*layers[0].values(), *layers[3].values())}}

    def run() -> None:
        for layer in (*layers, {"head": head}):
            for name, weight in layer.items():
                call_of(configs[name], CASES[name], xs[weight.shape[1]])(weight)

    return attempt_time([run], 5) / 1e3


def time_steps(title: str, configs: Configs, layers: list[dict[str, LinearWeight]], head: LinearWeight) -> None:
    times = [step(configs, layers, head, rows) for rows in ROWS]
    print(f"step {title:6} ms at {ROWS} rows: " + " ".join(f"{t:6.2f}" for t in times), flush=True)


def tune_case(name: str, weights: list[LinearWeight], block_k: int) -> ProductConfig:
    """The splits with the least 2 t(8) + t(32) + t(64), with their best sizes for each number of rows."""
    case, table = CASES[name], linear_table(DEVICE)
    ranking: list[tuple[float, list[float], int, list[ProductConfig]]] = []
    for splits, by_rows in grid(case, block_k).items():
        times, best = [], []
        for rows, configs in zip(TUNED_ROWS, by_rows, strict=True):
            tried = {config: time_of(config, case, rows, weights) for config in configs}
            best.append(min(tried, key=lambda config: tried[config]))
            times.append(tried[best[-1]])
        ranking.append((2 * times[0] + sum(times[2:]), times, splits, best))
    ranking.sort(key=lambda entry: entry[0])
    for _, times, splits, best in ranking[:4]:
        sizes = " ".join(f"{c.block_n}w{c.warps}s{c.stages}" for c in best)
        x, memory = inputs(8, case[2]), partial(torch.empty, device=DEVICE)
        call = partial(few_rows_with, best[0], table, x, gated=False, memory=memory)
        apart = attempt_time([partial(call, weight=w) for w in weights])
        listed = " ".join(f"{t:6.1f}" for t in times)
        line = f"tune {name:8} splits {splits} {sizes:33} us at {TUNED_ROWS}: {listed}"
        print(f"{line}  not added up at 8: {apart:.1f}", flush=True)
    few, *others = ranking[0][3]
    more = tuple((rows, c.block_n, c.warps, c.stages) for rows, c in zip(TUNED_ROWS[1:], others, strict=True))
    return ProductConfig(few.block_n, few.block_k, few.warps, few.stages, few.splits, more)


def as_entry(case: Case, config: ProductConfig) -> str:
    sizes = {"block_n": config.block_n, "block_k": config.block_k, "warps": config.warps, "stages": config.stages}
    more = {"splits": config.splits, "more": config.more}
    return json.dumps({"format": case[0], "n": case[1], "k": case[2]} | sizes | more)


def tune_all(
    report: Report, layers: list[dict[str, LinearWeight]], weights: dict[str, list[LinearWeight]], path: Path | None
) -> None:
    found = dict(table_configs())

    def section(name: str) -> None:
        found[name] = tune_case(name, weights[name], found[name].block_k)
        check("tuned", found, name, weights[name][0])

    for name in CASES:
        report.attempt(f"tune {name}", partial(section, name))
    entries = ",".join(f"\n      {as_entry(CASES[name], config)}" for name, config in found.items())
    print(entries, flush=True)
    if path is not None:
        shapes = re.compile(r'"shapes": \[(?:\]|.*?\n    \])', re.DOTALL)
        path.write_text(shapes.sub(f'"shapes": [{entries}\n    ]', path.read_text(), count=1))
    report.attempt("step, tuned", partial(time_steps, "tuned", found, layers, weights["head"][0]))


def ask(compiler: Compiler, only: Sequence[str]) -> None:
    table, configs = linear_table(DEVICE), table_configs()
    for name, case in CASES.items():
        for rows in (8, 16, 32, 64):
            compiler.ask(configs[name], table, case, rows)
        if "tune" in only:
            for by_rows in grid(case, configs[name].block_k).values():
                for rows, tried in zip(TUNED_ROWS, by_rows, strict=True):
                    for config in tried:
                        compiler.ask(config, table, case, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=75)
    parser.add_argument("--only", nargs="+", choices=("check", "time", "tune"), default=["check", "time", "tune"])
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    compiler = Compiler(options.workers)
    ask(compiler, options.only)
    torch.manual_seed(0)
    report = Report(copy_bandwidth(), None, options.seconds)
    print(f"copy {report.bandwidth / 1e12:.3f} TB/s", flush=True)
    layers = random_layers()
    weights = {name: copies(layers, name) for name in SHAPES}
    weights |= {"head": [random_weight("bf16", *HEAD) for _ in range(2)]}
    weights |= {fmt: [random_weight(fmt, *CASES[fmt][1:3]) for _ in range(24)] for fmt in ("w8", "w4")}
    compiler.wait(options.seconds * 0.6)  # what compiles also runs its kernels, beside those that are timed
    for name, only in itertools.product(CASES, ("check", "time")):
        if only == "check" and only in options.only:
            report.attempt(f"check {name}", partial(check, "table", table_configs(), name, weights[name][0]))
        elif only in options.only:
            floor = weights[name][0].nbytes / report.bandwidth * 1e6
            report.attempt(name, partial(time_case, "table", table_configs(), name, weights[name], floor))
    if "time" in options.only:
        report.attempt("step", partial(time_steps, "table", table_configs(), layers, weights["head"][0]))
    if "tune" in options.only:
        tune_all(report, layers, weights, options.table)
    compiler.close()


if __name__ == "__main__":
    began = time.time()
    main()
    print(f"{time.time() - began:.0f} s")
