"""Full decode steps, sampling included: how speed grows with slots, and how near it comes to the memory's bandwidth.

    python benchmarks/decode.py [MODEL] [--slots 1,2,4,8,16] [--contexts 256] [--kv-cache-dtype auto,...] [--json]
    python benchmarks/decode.py [MODEL] --lone [N] [--contexts 256] [--kv-cache-dtype auto,...] [--json]

One engine of the most slots for each KV type; numbers of slots and KV types take turns, so that a machine that drifts
meets all of them alike. Ratios are medians over the rounds of the ratio within a round; so is the share of the bandwidth,
which a plain read loop shows at the start of the same round.

--lone [N]: instead, the latency of a lone request's decode step on an engine of N slots (default 8) over that on an
engine of 1.

--json keys: benchmark (decode or lone), model, kernels, device, quantization, steps, rounds, machine (cpu, cores, threads,
load, date, python, versions), bandwidth (bytes/s, median), and rows, each with context, kv, filled (prefill or random, as
in `pocketllm bench`), slots, step_ms, tok_s (all slots), scaling (throughput over that of the first number of slots), x_kv
(throughput over that of the first KV type), bytes_per_step, gb_s, share_of_bandwidth. With --lone each row has context, kv,
filled, slots, step_ms and latency (over the engine of 1 slot).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from common import (
    add_engine_arguments,
    engine_options,
    machine,
    machine_line,
    names,
    numbers,
    parser_of,
    print_json,
    ratio,
    show,
    take_turns,
)  # fmt: skip
from pocketllm.cli.bench_run import (
    bytes_per_step,
    choose_fill,
    context_needed,
    random_tokens,
    read_bandwidth,
    timed_decode,
    timed_prefill,
)  # fmt: skip
from pocketllm.engine.engine import Engine
from pocketllm.models.registry import Checkpoint, read_model

PROBE = 64  # prompt tokens of the prefill that warms up, and that tells how long computing the contexts would take
COLUMNS = ("context", "kv", "slots", "ms/step", "tok/s", "scaling", "x first kv", "MB/step", "GB/s", "of bandwidth")


@dataclass(frozen=True)
class Timed:
    """One case of one round."""

    step_seconds: float  # median
    context: float


class Subject:
    """An idle engine, and how its contexts come about."""

    def __init__(self, checkpoint: Checkpoint, options: Any, context: int, steps: int, fill: str) -> None:
        self.engine = Engine(checkpoint, options)
        self.context, self.steps = context, steps
        self.slots = options.max_batch_size
        self.kv = self.engine.plan.kv.kv_format.name
        prompt = random_tokens(self.engine, PROBE, 0)
        seconds = min(timed_prefill(self.engine, prompt) for _ in range(2)) / PROBE * context * self.slots
        self.filled = choose_fill(fill, seconds)

    def decode(self, slots: int) -> Timed:
        prompts = [random_tokens(self.engine, self.context + 1, seed) for seed in range(slots)]
        decode = timed_decode(self.engine, prompts, self.steps, self.filled)
        return Timed(statistics.median(decode.step_seconds), decode.context)


def measure_scaling(subjects: list[Subject], args: Any, bandwidth: Callable[[], float]) -> list[dict[str, Any]]:
    """The rows of one context."""
    cases = {(s.kv, n): partial(s.decode, n) for s in subjects for n in args.slots}
    take_turns(cases, 1)  # warms up
    results = take_turns({"read": bandwidth, **cases}, args.rounds)
    read = results.pop("read")
    rows = []
    for subject in subjects:
        for n in args.slots:
            times = [timed.step_seconds for timed in results[subject.kv, n]]
            rates = [n / seconds for seconds in times]
            first = [args.slots[0] / timed.step_seconds for timed in results[subject.kv, args.slots[0]]]
            plain = [n / timed.step_seconds for timed in results[subjects[0].kv, n]]
            nbytes = bytes_per_step(subject.engine, results[subject.kv, n][0].context, n)
            rows.append(
                {
                    "context": subject.context,
                    "kv": subject.kv,
                    "filled": subject.filled,
                    "slots": n,
                    "step_ms": round(statistics.median(times) * 1e3, 3),
                    "tok_s": round(statistics.median(rates), 2),
                    "scaling": ratio(rates, first),
                    "x_kv": ratio(rates, plain),
                    "bytes_per_step": nbytes,
                    "gb_s": round(nbytes / statistics.median(times) / 1e9, 2),
                    "share_of_bandwidth": ratio([nbytes / seconds for seconds in times], read),
                }
            )
    return rows


def measure_lone(subjects: list[Subject], args: Any) -> list[dict[str, Any]]:
    """A row for each engine, the first of 1 slot."""
    cases = {s.slots: partial(s.decode, 1) for s in subjects}
    take_turns(cases, 1)  # warms up
    results = {n: [timed.step_seconds for timed in found] for n, found in take_turns(cases, args.rounds).items()}
    return [
        {
            "context": subject.context,
            "kv": subject.kv,
            "filled": subject.filled,
            "slots": subject.slots,
            "step_ms": round(statistics.median(results[subject.slots]) * 1e3, 3),
            "latency": ratio(results[subject.slots], results[subjects[0].slots]),
        }
        for subject in subjects
    ]


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_engine_arguments(parser)
    parser.add_argument("--slots", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--contexts", type=numbers, default=[256], help="tokens in each slot before the first step")
    parser.add_argument("--kv-cache-dtype", type=names, default=["auto"])
    parser.add_argument("--steps", type=int, default=32, help="decode steps timed per case and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fill", choices=("auto", "prefill", "random"), default="auto")
    parser.add_argument("--lone", type=int, nargs="?", const=8, metavar="N")
    args = parser.parse_args(argv)
    if args.lone == 1:
        parser.error("--lone 1 compares an engine with itself: give 2 or more slots")

    facts: dict[str, Any] = {"benchmark": "lone" if args.lone else "decode"}
    facts["machine"] = machine(engine_options(args).num_threads())
    checkpoint = read_model(args.model, args.load_format)
    rows: list[dict[str, Any]] = []
    read: list[float] = []

    def bandwidth() -> float:
        read.append(read_bandwidth(engine.device, engine.options.num_threads()))
        return read[-1]

    for context in args.contexts:
        for kvs in [[kv] for kv in args.kv_cache_dtype] if args.lone else [args.kv_cache_dtype]:
            needed = max(context_needed(context, args.steps), PROBE + 1)
            subjects = [
                Subject(
                    checkpoint,
                    engine_options(args, max_batch_size=slots, max_context=needed, kv_cache_dtype=kv),
                    context,
                    args.steps,
                    args.fill,
                )
                for kv in kvs
                for slots in ([1, args.lone] if args.lone else [max(args.slots)])
            ]
            engine = subjects[0].engine
            bandwidth()
            rows += measure_lone(subjects, args) if args.lone else measure_scaling(subjects, args, bandwidth)
            del subjects  # before the next ones are planned
    facts |= {
        "model": checkpoint.name,
        "kernels": engine.kernels.name,
        "device": str(engine.device),
        "quantization": args.quantization,
        "steps": args.steps,
        "rounds": args.rounds,
        "bandwidth": round(statistics.median(read)),
    }
    if args.json:
        print_json({**facts, "rows": rows})
        return
    lines = (
        f"{facts['model']} on {facts['device']}, {facts['kernels']} kernels, reads {facts['bandwidth'] / 1e9:.1f} GB/s",
        machine_line(facts["machine"]),
    )
    if args.lone:
        keys = ("context", "kv", "slots", "step_ms", "latency")
        show(
            lines,
            ("context", "kv", "engine of", "ms/step", "latency"),
            ([row[k] for k in keys] for row in rows),
            ("kv",),
        )
        return
    show(lines, COLUMNS, map(_cells, rows), ("kv",))
    if any(row["filled"] == "random" for row in rows):
        print("* random values in the cache instead of a computed context")


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['context']}{'*' * (row['filled'] == 'random')}",
        row["kv"],
        str(row["slots"]),
        f"{row['step_ms']:.2f}",
        f"{row['tok_s']:.1f}",
        f"{row['scaling']:.2f}",
        f"{row['x_kv']:.2f}",
        f"{row['bytes_per_step'] / 1e6:.1f}",
        f"{row['gb_s']:.1f}",
        f"{row['share_of_bandwidth']:.0%}",
    ]


if __name__ == "__main__":
    main()
