"""What the benchmarks share: facts about the machine, turns instead of series, one table or one JSON line."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from pocketllm.options import EngineOptions

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

PACKAGES = ("pocketllm", "torch", "numba", "llama-cpp-python", "transformers")


def machine(threads: int) -> dict[str, Any]:
    """Keys: cpu, cores, threads, load (average of the last minute), date, python, versions (package -> version)."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


def machine_line(facts: dict[str, Any]) -> str:
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads, load {facts['load']}, {facts['date']}"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def take_turns(cases: dict[Key, Callable[[], Value]], rounds: int) -> dict[Key, list[Value]]:
    """Runs every case once a round, forwards and backwards in turn (A B, B A, ...), so that drift meets all alike."""
    results: dict[Key, list[Value]] = {key: [] for key in cases}
    for i in range(rounds):
        for key in list(cases)[:: -1 if i % 2 else 1]:
            results[key].append(cases[key]())
    return results


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median over the rounds of a / b."""
    return round(statistics.median(x / y for x, y in zip(a, b, strict=True)), 3)


def numbers(text: str) -> list[int]:
    """The type of an argument like 1,2,4."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise ValueError("from 1 on")
    return values


def names(text: str) -> list[str]:
    """The type of an argument like fp16,fp8."""
    return [part.strip() for part in text.split(",")]


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the script's docstring, with the arguments all benchmarks have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="default: a thread per core")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of the table")
    return parser


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="folder, GGUF file, hub id or shape; default: the embedded model")
    for name, default in (("quantization", "auto"), ("kernels", "auto"), ("load-format", "auto")):
        parser.add_argument(f"--{name}", default=default, help="as `pocketllm bench` has it")


def engine_options(args: argparse.Namespace, **more: Any) -> EngineOptions:
    """From the arguments of `parser_of` and `add_engine_arguments`."""
    return EngineOptions.of(
        threads=args.threads,
        quantization=args.quantization,
        kernels=args.kernels,
        load_format=args.load_format,
        **more,
    )


def show(
    lines: Iterable[str], columns: Sequence[str], rows: Iterable[Sequence[object]], left: Sequence[str] = ()
) -> None:
    """Lines, then a plain table; columns named in `left` hold words."""
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for line in lines:
        out.print(line, style="dim", markup=False, soft_wrap=True)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(str, row))
    out.print(table)


def print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, ensure_ascii=False), flush=True)
