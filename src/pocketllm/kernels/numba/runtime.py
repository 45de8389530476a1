"""Threads for Numba kernels: `parallel_for` inside `@njit` code, over a small pool of our own.

    @kernel
    def scale_rows(begin, end, x, width, factor):      # one chunk: rows begin .. end - 1
        ...

    @kernel
    def scale(pool, x, rows, width, factor):           # called from Python, with pool = ThreadPool(n).handle
        parallel_for(pool, scale_rows, rows, 16, (x, width, factor))

A job is `items` cut into chunks of `grain`, which threads claim one by one through an atomic ticket. The caller works
too and never waits for a thread that claimed nothing, so a worker that sleeps or has lost its core costs speed only.
Which thread runs a chunk can't matter to a kernel: results are the same for any number of threads.

Idle workers spin for `SPIN_CYCLES` (about 0.15 ms, longer than the gap between two kernels of a decode step), then
sleep on a POSIX condition variable. A job that finds the pool busy (a second Python thread, or a job inside a job) runs
on its caller alone.

Why not `prange`. Measured 2026-11-29 on 2 cores of a Zen 5 EPYC with Numba 0.68, an empty job on 2 threads, called from
Python: Numba's workqueue layer takes 57 us, its OpenMP layer 1.5 us, this pool 0.5 us (2 chunks) to 3.3 us (16 chunks;
0.2 us of each are the call itself); 2 to 3 us when the worker must be woken. OpenMP would do, but needs a libgomp that
the wheel does not bring (without it Numba falls back to workqueue), cuts the work in fixed halves, so that a core lent
to another process stalls every call, and spins against torch's own OpenMP pool. Keep torch at one thread beside this
pool: `torch.set_num_threads(1)`.

Pool memory, in 64-byte lines so that threads do not share one by accident:

    TICKET    generation << 32 | chunks left to claim     PENDING   chunks not yet finished
    JOB       function, arguments, items, grain            BUSY      1 while a job runs
    SLEEPERS  workers asleep; STOP 1: workers return       MUTEX, CONDITION  for sleeping
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

SPIN_CYCLES = 400_000  # about 0.15 ms
_YIELD_AFTER = 2_000  # polls of a waiting caller before it lends its core to whoever still works

_TICKET, _PENDING, _FUNCTION, _ARGUMENTS, _ITEMS, _GRAIN = 0, 64, 128, 136, 144, 152
_BUSY, _SLEEPERS, _STOP, _MUTEX, _CONDITION, _SIZE = 192, 256, 264, 320, 448, 640
_LEFT = (1 << 32) - 1  # mask of the ticket's chunks left

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_VOID, _BYTES = ir.VoidType(), ir.PointerType(ir.IntType(8))
_CHUNK = ir.FunctionType(_VOID, [_I64, _I64, _I64])  # begin, end, address of the arguments


# -- how kernels are compiled ----------------------------------------------------------------------------------------


@cache
def _source_stamp() -> tuple[tuple[str, int, int], ...]:
    """Changes with any file kernels are made of. Numba's own stamp is of the caller's file alone."""
    package = Path(__file__).parents[2]
    files = [f for part in ("kernels", "cache") for f in (package / part).rglob("*.py")]
    return tuple((str(f.relative_to(package)), (s := f.stat()).st_mtime_ns, s.st_size) for f in sorted(files))


def kernel(function: Callable[..., Any]) -> Any:
    """`@njit` as all kernels here use it: without the GIL, cached on disk, IEEE arithmetic, no division checks."""
    dispatcher = njit(nogil=True, cache=True, error_model="numpy")(function)
    index = dispatcher._cache._cache_file
    index._source_stamp = (index._source_stamp, _source_stamp())
    return dispatcher


# -- atomics and calls -----------------------------------------------------------------------------------------------


def _word(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, ir.PointerType(_I64))


@intrinsic
def _load(typingctx: Any, address: Any) -> Any:
    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        return b.load_atomic(_word(b, a[0]), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _store(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        b.store_atomic(a[1], _word(b, a[0]), "seq_cst", 8)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _add(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        return b.atomic_rmw("add", _word(b, a[0]), a[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _swap_if(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Compare and swap; whether it swapped."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        return b.extract_value(b.cmpxchg(_word(b, a[0]), a[1], a[2], "seq_cst", "seq_cst"), 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def _cycles(typingctx: Any) -> Any:
    """The CPU's time stamp counter."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        counter = cgutils.get_or_insert_function(b.module, ir.FunctionType(_I64, []), "llvm.readcyclecounter")
        return b.call(counter, [])

    return types.int64(), codegen


@intrinsic
def _pause(typingctx: Any) -> Any:
    """Tells the core that this is a spin loop."""
    triple = llvm.get_process_triple()

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        if triple.startswith("x86_64"):
            hint = cgutils.get_or_insert_function(b.module, ir.FunctionType(_VOID, []), "llvm.x86.sse2.pause")
            b.call(hint, [])
        elif triple.startswith(("aarch64", "arm64")):
            hint = cgutils.get_or_insert_function(b.module, ir.FunctionType(_VOID, [_I32]), "llvm.aarch64.hint")
            b.call(hint, [ir.Constant(_I32, 1)])  # yield
        return ctx.get_dummy_value()

    return types.void(), codegen


def _libc(symbol: str, num_arguments: int) -> Any:
    """An intrinsic that calls a C function of this process with that many addresses and drops its result."""

    def call(ctx: Any, b: Any, a: Any) -> Any:
        fnty = ir.FunctionType(_I32, [_BYTES] * num_arguments)
        b.call(cgutils.get_or_insert_function(b.module, fnty, symbol), [b.inttoptr(v, _BYTES) for v in a])
        return ctx.get_dummy_value()

    def nullary(typingctx: Any) -> Any:
        return types.void(), lambda ctx, b, sig, a: call(ctx, b, a)

    def unary(typingctx: Any, first: Any) -> Any:
        return types.void(types.int64), lambda ctx, b, sig, a: call(ctx, b, a)

    def binary(typingctx: Any, first: Any, second: Any) -> Any:
        return types.void(types.int64, types.int64), lambda ctx, b, sig, a: call(ctx, b, a)

    return intrinsic((nullary, unary, binary)[num_arguments])


_sched_yield = _libc("sched_yield", 0)
_mutex_lock = _libc("pthread_mutex_lock", 1)
_mutex_unlock = _libc("pthread_mutex_unlock", 1)
_condition_wait = _libc("pthread_cond_wait", 2)
_condition_broadcast = _libc("pthread_cond_broadcast", 1)


@intrinsic
def _call_chunk(typingctx: Any, function: Any, begin: Any, end: Any, arguments: Any) -> Any:
    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        b.call(b.inttoptr(a[0], ir.PointerType(_CHUNK)), [a[1], a[2], a[3]])
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


# -- the pool --------------------------------------------------------------------------------------------------------


@njit(nogil=True)
def _work(pool):
    """Claims and runs chunks until none are left to claim."""
    while True:
        ticket = _load(pool + _TICKET)
        left = ticket & _LEFT
        if left == 0:
            return
        if _swap_if(pool + _TICKET, ticket, ticket - 1):
            # The job can't end before this chunk does: its description is stable from here on, and only from here on.
            items, grain = _load(pool + _ITEMS), _load(pool + _GRAIN)
            begin = ((items + grain - 1) // grain - left) * grain
            _call_chunk(_load(pool + _FUNCTION), begin, min(begin + grain, items), _load(pool + _ARGUMENTS))
            _add(pool + _PENDING, -1)


@njit(nogil=True)
def _run(pool, function, arguments, items, grain):
    if pool == 0 or items <= grain or not _swap_if(pool + _BUSY, 0, 1):
        if items > 0:
            _call_chunk(function, 0, items, arguments)
        return
    chunks = (items + grain - 1) // grain
    _store(pool + _FUNCTION, function)
    _store(pool + _ARGUMENTS, arguments)
    _store(pool + _ITEMS, items)
    _store(pool + _GRAIN, grain)
    _store(pool + _PENDING, chunks)
    generation = (_load(pool + _TICKET) >> 32) + 1
    _store(pool + _TICKET, ((generation & 0x3FFFFFFF) << 32) | chunks)
    if _load(pool + _SLEEPERS) > 0:  # set before a worker's last look at the ticket: one of us sees the other
        _mutex_lock(pool + _MUTEX)
        _condition_broadcast(pool + _CONDITION)
        _mutex_unlock(pool + _MUTEX)
    _work(pool)
    polls = 0
    while _load(pool + _PENDING) > 0:
        polls += 1
        if polls > _YIELD_AFTER:
            _sched_yield()
        else:
            _pause()
    _store(pool + _BUSY, 0)


@kernel
def _worker(pool):
    """A worker's life: work, spin for a while, sleep."""
    while _load(pool + _STOP) == 0:
        _work(pool)
        start = _cycles()
        while _load(pool + _TICKET) & _LEFT == 0 and _load(pool + _STOP) == 0:
            if _cycles() - start < SPIN_CYCLES:
                _pause()
                continue
            _mutex_lock(pool + _MUTEX)
            _add(pool + _SLEEPERS, 1)
            if _load(pool + _TICKET) & _LEFT == 0 and _load(pool + _STOP) == 0:
                _condition_wait(pool + _CONDITION, pool + _MUTEX)
            _add(pool + _SLEEPERS, -1)
            _mutex_unlock(pool + _MUTEX)
            start = _cycles()


@intrinsic
def parallel_for(typingctx: Any, pool: Any, chunk: Any, items: Any, grain: Any, arguments: Any) -> Any:
    """Calls chunk(begin, end, *arguments) over 0 .. items in pieces of `grain` on the pool's threads; waits for all.

    For use inside kernels. `chunk` is a `@kernel` that returns nothing, raises nothing and writes only what no other
    chunk touches. With pool 0, or items <= grain, it is one plain call.
    """
    chunk_sig = chunk.get_call_type(typingctx, (types.int64, types.int64, *arguments.types), {})

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        pool, _, items, grain, values = a
        entry = _chunk_entry(ctx, b, chunk.dispatcher, chunk_sig, arguments)
        packed = cgutils.alloca_once_value(b, values)
        args = [pool, b.ptrtoint(entry, _I64), b.ptrtoint(packed, _I64), items, grain]
        return ctx.compile_internal(b, _call_run, types.void(*(types.int64,) * 5), args)

    return types.void(types.int64, chunk, types.int64, types.int64, arguments), codegen


def _chunk_entry(ctx: Any, b: ir.IRBuilder, dispatcher: Any, sig: Any, arguments: Any) -> ir.Function:
    """A C function `void(begin, end, address of the arguments' tuple)` in b's module that calls the compiled chunk."""
    entry = ir.Function(b.module, _CHUNK, name=b.module.get_unique_name("chunk"))
    entry.linkage = "internal"
    inner = ir.IRBuilder(entry.append_basic_block())
    begin, end, address = entry.args
    packed = inner.load(inner.inttoptr(address, ir.PointerType(ctx.get_value_type(arguments))))
    values = [inner.extract_value(packed, i) for i in range(len(arguments.types))]
    compiled = dispatcher.get_compile_result(sig)
    ctx.add_linking_libs((compiled.library,))
    callee = ctx.declare_function(b.module, compiled.fndesc)
    ctx.call_conv.call_function(inner, callee, sig.return_type, sig.args, [begin, end, *values])
    inner.ret_void()
    return entry


def _call_run(pool, function, arguments, items, grain):
    _run(pool, function, arguments, items, grain)


class ThreadPool:
    """`num_threads - 1` workers beside the calling thread. Kernels take `handle` (0 without workers) as `pool`."""

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads = {num_threads}: must be at least 1")
        self.num_threads = num_threads
        self.handle = 0
        if num_threads > 1:
            self._memory = ctypes.create_string_buffer(_SIZE + 64)
            self.handle = -(-ctypes.addressof(self._memory) // 64) * 64
            libc = ctypes.CDLL(None)
            libc.pthread_mutex_init(ctypes.c_void_p(self.handle + _MUTEX), None)
            libc.pthread_cond_init(ctypes.c_void_p(self.handle + _CONDITION), None)
            _worker.compile((types.int64,))  # here, not in the threads, where it would hold the GIL while we go on
            workers = [
                threading.Thread(target=_worker, args=(self.handle,), name=f"kernel-{i}", daemon=True)
                for i in range(1, num_threads)
            ]
            for worker in workers:
                worker.start()
            self._close = weakref.finalize(self, _stop, self.handle, self._memory, workers)

    def close(self) -> None:
        """Ends the workers; also done when the pool is collected and at exit."""
        if self.handle:
            self._close()
            self.handle = 0


@kernel
def _request_stop(pool):
    _store(pool + _STOP, 1)
    _mutex_lock(pool + _MUTEX)
    _condition_broadcast(pool + _CONDITION)
    _mutex_unlock(pool + _MUTEX)


def _stop(handle: int, memory: object, workers: list[threading.Thread]) -> None:
    """`memory` is passed to keep it alive until the workers are gone."""
    _request_stop(handle)
    for worker in workers:
        worker.join()
