"""`Report`: facts and rows of a benchmark, kept in a file as they come; its parts have so many seconds each."""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Report:
    """Facts and rows, printed as they come and kept in a file."""

    def __init__(self, name: str, path: Path | None, seconds: float) -> None:
        self._path, self._end, self._start = path, time.monotonic() + seconds, time.monotonic()
        self.facts: dict[str, Any] = {"benchmark": name, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        self.rows: list[dict[str, Any]] = []

    def fact(self, name: str, value: Any) -> None:
        self.facts[name] = value
        print(f"[{time.monotonic() - self._start:6.1f} s] {name}: {json.dumps(value)}", flush=True)
        self._write()

    def row(self, **values: Any) -> None:
        self.rows.append(values)
        print(f"[{time.monotonic() - self._start:6.1f} s] {json.dumps(values)}", flush=True)
        self._write()

    def part(self, name: str, seconds: float, run: Callable[[], None]) -> None:
        """`run()`, given up after so many seconds (at the next Python instruction)."""
        left = self._end - time.monotonic()
        if left < 5:
            self.fact(f"{name} left out", f"{left:.0f} s left")
            return
        began = time.monotonic()
        try:
            with _alarm(min(seconds, left)):
                run()
        except Exception as error:
            traceback.print_exc()
            self.fact(f"{name} failed", f"{type(error).__name__}: {error}"[:500])
        self.fact(f"{name} seconds", round(time.monotonic() - began, 1))

    def _write(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lines = ",\n".join(f"  {json.dumps(row)}" for row in self.rows)
            head = json.dumps(self.facts, indent=1)[:-2]
            self._path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
