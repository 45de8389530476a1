"""PocketLLM against llama.cpp (and transformers) on the same GGUF file, in the same run, taking turns.

    python benchmarks/peers.py FILE.gguf [FILE.gguf ...] [--slots 1,2,4,8] [--prompt 128] [--new 64] [--prefill 512]
                               [--rounds 5] [--transformers] [--json]

`requantize.py` makes the files. llama.cpp runs through llama-cpp-python, which `pip` builds for the machine it is on; flash
attention is whatever is faster there. Every engine has a process of its own that stands still (SIGSTOP) while it is not its
turn, the same threads, the same prompts (of the text of this repository's licence) and greedy choice; a first round warms
up. Decode is timed for all slots in one batch, sampling included; prefill is one prompt to its first new token. A round's
figure is the median of its steps; ratios are medians over the rounds of the ratio within a round.

--json keys: benchmark, machine (cpu, cores, threads, load, date, python, versions), prompt, new, prefill, rounds, missing
(peer -> how to get it), and files, each with file, weights (the type of most of its bytes), engines (name -> what its
process said of itself) and rows, each with measure (decode or prefill), slots, tok_s (engine -> all slots together), ratio
(peer -> PocketLLM's speed over the peer's), spread (peer -> smallest and largest ratio of a round), seconds (engine -> each
round's) and, of decode, same_tokens (peer -> share of the tokens, up to the first that differs, that both chose). Near ties
part correct engines sooner or later; a share near 0 means that one of them computes something else.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import statistics
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from common import machine, machine_line, numbers, parser_of, print_json, ratio, show, take_turns
from pocketllm.cli.bench_run import context_needed
from pocketllm.options import EngineOptions
from pocketllm.text.tokenizer import load_tokenizer
from pocketllm.weights.gguf_file import GgufFile

HERE = Path(__file__).resolve().parent
OURS = "pocketllm"
HOW_TO_GET = {
    "llama.cpp": ("llama_cpp", "pip install --no-binary llama-cpp-python llama-cpp-python (needs a C++ compiler)"),
    "transformers": ("transformers", "pip install transformers accelerate"),
}


class Worker:
    """An engine in a process of its own, which runs only while it is asked something."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        command = [sys.executable, str(HERE / "peer_engines.py"), name, json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._answer()

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}: see its error above")
        self._process.send_signal(signal.SIGSTOP)  # idle threads of its pool would spin beside the next engine
        answer: dict[str, Any] = json.loads(line)
        return answer


def prompts_of(file: Path, length: int, count: int) -> list[list[int]]:
    """Token ids of `count` different pieces of a text that any model continues without hesitation."""
    ids = load_tokenizer(file).encode((HERE.parent / "LICENSE").read_text(), add_special=False)
    step = max(1, len(ids) // count)
    ids *= 2 + length // len(ids)
    return [ids[i * step : i * step + length] for i in range(count)]


def weights_of(file: Path) -> str:
    """The type that holds most of the bytes of the layers' matrices."""
    sizes: Counter[str] = Counter()
    for name, tensor in GgufFile(file).tensors.items():
        if name.startswith("blk."):
            sizes[tensor.type.name] += tensor.nbytes
    return sizes.most_common(1)[0][0]


def same_tokens(a: list[list[int]], b: list[list[int]]) -> float:
    same = 0
    for ours, theirs in zip(a, b, strict=True):
        differs = (i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        same += next(differs, len(ours))
    return round(same / sum(map(len, a)), 3)


def compare(file: Path, names: list[str], args: Any, threads: int) -> dict[str, Any]:
    """The entry of one file."""
    slots = max(args.slots)
    tokens = max(context_needed(args.prompt, args.new), args.prefill + 1)
    settings = {"model": str(file), "threads": threads, "slots": slots, "tokens": tokens}
    options = {OURS: {"kv_cache_dtype": args.kv_cache_dtype, "kernels": args.kernels}}
    tasks: dict[tuple[str, int], dict[str, Any]] = {("prefill", 1): {"prompt": prompts_of(file, args.prefill, 1)[0]}}
    for n in args.slots:
        tasks["decode", n] = {"prompts": prompts_of(file, args.prompt, slots)[:n], "steps": args.new}
    with ExitStack() as stack:
        workers = []
        for name in names:
            workers.append(Worker(name, {**settings, "options": options.get(name, {})}))
            stack.callback(workers[-1].close)
        cases = {(key, w.name): partial(w.ask, task) for key, task in tasks.items() for w in workers}
        take_turns(cases, 1)  # warms up
        answers = take_turns(cases, args.rounds)
        facts = {w.name: w.facts for w in workers}
    rows = []
    for measure, n in tasks:
        found = {name: answers[(measure, n), name] for name in names}
        seconds = {name: [answer["seconds"] for answer in found[name]] for name in names}
        count = n if measure == "decode" else args.prefill
        row: dict[str, Any] = {"measure": measure, "slots": n}
        row["tok_s"] = {name: round(count / statistics.median(seconds[name]), 2) for name in names}
        row["ratio"] = {name: ratio(seconds[name], seconds[OURS]) for name in names[1:]}
        row["spread"] = {name: _spread(seconds[name], seconds[OURS]) for name in names[1:]}
        row["seconds"] = {name: [round(s, 6) for s in seconds[name]] for name in names}
        if measure == "decode":
            ours = found[OURS][-1]["tokens"]
            row["same_tokens"] = {name: same_tokens(ours, found[name][-1]["tokens"]) for name in names[1:]}
        rows.append(row)
    return {"file": file.name, "weights": weights_of(file), "engines": facts, "rows": rows}


def _spread(theirs: list[float], ours: list[float]) -> list[float]:
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    return [round(min(ratios), 3), round(max(ratios), 3)]


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.gguf")
    parser.add_argument("--slots", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens before decode")
    parser.add_argument("--new", type=int, default=64, help="decode steps timed per case and round")
    parser.add_argument("--prefill", type=int, default=512, help="prompt tokens of the prefill measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-cache-dtype", default="fp16", help="PocketLLM's; llama.cpp's is fp16")
    parser.add_argument("--kernels", default="auto", help="PocketLLM's")
    parser.add_argument("--transformers", action="store_true", help="transformers too (slow)")
    args = parser.parse_args(argv)
    if absent := [file for file in args.files if not file.is_file()]:
        parser.error(f"{absent[0]}: no such file")

    threads = EngineOptions(threads=args.threads).num_threads()
    facts = {"benchmark": "peers", "machine": machine(threads)}
    wanted = ["llama.cpp", *["transformers"] * args.transformers]
    missing = {name: HOW_TO_GET[name][1] for name in wanted if importlib.util.find_spec(HOW_TO_GET[name][0]) is None}
    for name, how in missing.items():
        print(f"left out: {name} is not installed: {how}", file=sys.stderr)
    names = [OURS, *(name for name in wanted if name not in missing)]
    if len(names) == 1:
        raise SystemExit("there is no peer to compare with")
    facts |= {key: getattr(args, key) for key in ("prompt", "new", "prefill", "rounds")} | {"missing": missing}
    files = [compare(file, names, args, threads) for file in args.files]
    if args.json:
        print_json({**facts, "files": files})
        return
    show((machine_line(facts["machine"]), *_settings(files[0]["engines"])), (), ())
    columns = ["weights", "measure", "slots", OURS]
    for name in names[1:]:
        columns += [name, f"x {name}", "spread", "same tokens"]
    show((), columns, (_cells(entry["weights"], row) for entry in files for row in entry["rows"]), columns[:2])


def _settings(engines: dict[str, dict[str, Any]]) -> list[str]:
    texts = {name: ", ".join(f"{k} {v}" for k, v in facts.items() if k != "system") for name, facts in engines.items()}
    return [f"{name}: {text}" for name, text in texts.items()]


def _cells(weights: str, row: dict[str, Any]) -> list[str]:
    cells = [weights, row["measure"], str(row["slots"]), f"{row['tok_s'][OURS]:.1f}"]
    for name, value in row["ratio"].items():
        low, high = row["spread"][name]
        same = f"{row['same_tokens'][name]:.0%}" if "same_tokens" in row else ""
        cells += [f"{row['tok_s'][name]:.1f}", f"{value:.2f}", f"{low:.2f}-{high:.2f}", same]
    return cells


if __name__ == "__main__":
    main()
