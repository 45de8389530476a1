"""From typing a command to the first token, with a warm compile cache: fresh processes, what each of them waits for.

    python benchmarks/startup.py [MODEL] [--rounds 5] [--json]

Every round starts `pocketllm generate --max-tokens 1` (seconds from its start to its end: `command`), and a process that
does the same in steps and times them: importing torch, importing the package, building the engine, the first token.
One run that is not counted comes first: it compiles what is not compiled yet, and brings the files into memory.

--json keys: benchmark (startup), model, rounds, machine, and seconds, the median of each step.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from common import machine, machine_line, parser_of, print_json, show
from pocketllm.options import EngineOptions

STEPS = """
import sys, time
def lap(start):
    print(time.perf_counter() - start)
    return time.perf_counter()
start = time.perf_counter()
import torch
start = lap(start)
from pocketllm import LLM, EngineOptions, SamplingParams
start = lap(start)
llm = LLM(sys.argv[1] or None, EngineOptions.of(threads=int(sys.argv[2])))
start = lap(start)
llm.generate("Hello", SamplingParams(max_tokens=1))
lap(start)
"""
COMMAND = "import sys; from pocketllm.cli.main import main; sys.argv[0] = 'pocketllm'; main()"
NAMES = ("command", "import torch", "import pocketllm", "build the engine", "first token")


def one_round(model: str | None, threads: int) -> list[float]:
    start = time.perf_counter()
    words = [
        "generate",
        "Hello",
        "--max-tokens",
        "1",
        "--threads",
        str(threads),
        *(["--model", model] if model else []),
    ]
    subprocess.run([sys.executable, "-c", COMMAND, *words], check=True, capture_output=True)
    command = time.perf_counter() - start
    steps = subprocess.run(
        [sys.executable, "-c", STEPS, model or "", str(threads)], check=True, capture_output=True, text=True
    )
    return [command, *map(float, steps.stdout.split())]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", nargs="?", help="folder, GGUF file or hub id; default: the embedded model")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    threads = args.threads or EngineOptions().num_threads()
    one_round(args.model, threads)
    rounds = [one_round(args.model, threads) for _ in range(args.rounds)]
    seconds = {
        name: round(statistics.median(values), 3) for name, values in zip(NAMES, zip(*rounds, strict=True), strict=True)
    }
    facts = machine(threads)
    if args.json:
        print_json(
            {
                "benchmark": "startup",
                "model": args.model or "embedded",
                "rounds": args.rounds,
                "machine": facts,
                "seconds": seconds,
            }
        )
        return
    show(
        [machine_line(facts)], ("step", "seconds"), [(name, f"{s:.2f}") for name, s in seconds.items()], left=("step",)
    )


if __name__ == "__main__":
    main()
