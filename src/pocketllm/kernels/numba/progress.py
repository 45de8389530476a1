"""A line on the terminal while kernels are compiled, which happens once per machine: the results are kept on disk."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from numba.core import event

_EVENT = "numba:compile"  # sent for what is compiled, not for what is loaded from the disk


def warm_up(run: Callable[[], None]) -> None:
    """`run()`, which calls every kernel once; says on stderr what is compiled meanwhile, and how long it took."""
    progress = _Progress()
    event.register(_EVENT, progress)
    try:
        run()
    finally:
        event.unregister(_EVENT, progress)
    progress.finish()


class _Progress(event.Listener):  # type: ignore[misc]  # Numba has no types
    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._count = 0
        self._depth = 0

    def on_start(self, event: Any) -> None:
        self._depth += 1
        if self._count == 0 and self._depth == 1:
            print("compiling kernels (once; kept on disk)", end="", file=sys.stderr, flush=True)

    def on_end(self, event: Any) -> None:
        self._depth -= 1
        self._count += 1
        if self._count % 10 == 0:
            print(".", end="", file=sys.stderr, flush=True)

    def finish(self) -> None:
        if self._count:
            print(f" {self._count} in {time.perf_counter() - self._start:.0f} s", file=sys.stderr, flush=True)
