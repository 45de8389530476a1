"""CUDA graphs: a pass's launches recorded once, and sent to the device by one call from then on.

All graphs take their memory from one pool. Only one runs at a time, and none needs what another left there but its result,
which it keeps; so the pool is about as large as the largest pass needs. It lives as long as a graph does that uses it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from triton import knobs

from pocketllm.kernels.triton.numerics import INTERPRETED

captures = not INTERPRETED
# Beyond, a GPU takes longer than Python calls its kernels. Up to 64 tokens, weights are decoded for products of 16 bits.
short_prefills = (16, 32, 64, 128, 192, 256, 384, 512)

_graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # those that are still in use


def capture(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor] | None]:
    """As `Kernels.capture`: a CUDA graph. In the interpreter there is no device, and nothing to record."""
    if INTERPRETED:
        return run(), None
    # Compiles; and what libraries do at a first call must not be recorded. On the current stream, as the replays: another
    # engine's bridge beside one of ours would wait for multiprocessors that ours has, and ours for those that it has.
    run()
    graph, pool = torch.cuda.CUDAGraph(), next((other.pool() for other in _graphs), None)
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may use the device
        result = run()
    _graphs.add(graph)

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay(), replay


def warm_up(run: Callable[[], None]) -> None:
    """`run()`, which calls every kernel; says on stderr how many were compiled meanwhile. Triton keeps them on disk."""
    compiled = 0
    start = time.perf_counter()
    before = knobs.compilation.listener

    def listen(*, cache_hit: bool, **_: Any) -> None:
        nonlocal compiled
        compiled += not cache_hit

    knobs.compilation.listener = listen
    try:
        run()
    finally:
        knobs.compilation.listener = before
    if compiled:
        print(
            f"compiled {compiled} kernels in {time.perf_counter() - start:.0f} s (once; kept on disk)", file=sys.stderr
        )
