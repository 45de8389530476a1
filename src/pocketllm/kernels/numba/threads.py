"""The thread pool that the functions of this backend share: one per process, like torch's own number of threads.

It is made at first use with a thread per core this process may run on; the engine sets the number it was given first.
"""

from __future__ import annotations

import os

from pocketllm.kernels.numba.runtime import ThreadPool

_pools: list[ThreadPool] = []  # none or one


def pool() -> ThreadPool:
    if not _pools:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        _pools.append(ThreadPool(cores))
    return _pools[0]


def pool_handle() -> int:
    """What kernels take as `pool`."""
    return pool().handle


def set_num_threads(num_threads: int) -> None:
    """Threads of all later calls, this one's included. Not to be called while a kernel runs."""
    if _pools and _pools[0].num_threads == num_threads:
        return
    fresh = ThreadPool(num_threads)
    if _pools:
        _pools.pop().close()
    _pools.append(fresh)
