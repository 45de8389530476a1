"""Prompt tokens per second, from a prompt to its first new token, by length and KV type.

    python benchmarks/prefill.py [MODEL] [--lengths 128,512,2048] [--kv-cache-dtype auto,...] [--rounds 5] [--json]

One engine for each KV type; lengths and KV types take turns. A prompt longer than the engine's prefill chunk is computed
chunk by chunk, as a server would. Ratios are medians over the rounds of the ratio within a round.

--json keys: benchmark, model, kernels, device, quantization, prefill_chunk, rounds, machine (cpu, cores, threads, load,
date, python, versions), and rows, each with length, kv, ms (median), tok_s, x_kv (speed over that of the first KV type).
"""

from __future__ import annotations

import statistics
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
from pocketllm.cli.bench_run import random_tokens, timed_prefill
from pocketllm.engine.engine import Engine
from pocketllm.models.registry import read_model


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_engine_arguments(parser)
    parser.add_argument("--lengths", type=numbers, default=[128, 512, 2048])
    parser.add_argument("--kv-cache-dtype", type=names, default=["auto"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)

    facts: dict[str, Any] = {"benchmark": "prefill", "machine": machine(engine_options(args).num_threads())}
    checkpoint = read_model(args.model, args.load_format)
    size = {"max_batch_size": 1, "max_context": max(args.lengths) + 1}
    engines = [Engine(checkpoint, engine_options(args, **size, kv_cache_dtype=kv)) for kv in args.kv_cache_dtype]
    kv_names = [engine.plan.kv.kv_format.name for engine in engines]
    cases = {
        (kv, length): partial(timed_prefill, engine, random_tokens(engine, length, 0))
        for kv, engine in zip(kv_names, engines, strict=True)
        for length in args.lengths
    }
    take_turns(cases, 1)  # warms up
    seconds = take_turns(cases, args.rounds)
    rows = [
        {
            "length": length,
            "kv": kv,
            "ms": round(statistics.median(times) * 1e3, 2),
            "tok_s": round(length / statistics.median(times), 1),
            "x_kv": ratio(seconds[kv_names[0], length], times),
        }
        for (kv, length), times in seconds.items()
    ]
    engine = engines[0]
    facts |= {
        "model": checkpoint.name,
        "kernels": engine.kernels.name,
        "device": str(engine.device),
        "quantization": args.quantization,
        "prefill_chunk": engine.options.chunk_tokens(engine.device.type),
        "rounds": args.rounds,
    }
    if args.json:
        print_json({**facts, "rows": rows})
        return
    lines = (
        f"{facts['model']} on {facts['device']}, {facts['kernels']} kernels, chunks of {facts['prefill_chunk']}",
        machine_line(facts["machine"]),
    )
    cells = [[r["length"], r["kv"], f"{r['ms']:.1f}", f"{r['tok_s']:.1f}", f"{r['x_kv']:.2f}"] for r in rows]
    show(lines, ("prompt", "kv", "ms", "tok/s", "x first kv"), cells, ("kv",))


if __name__ == "__main__":
    main()
