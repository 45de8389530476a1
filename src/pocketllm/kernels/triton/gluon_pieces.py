# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""What persistent kernels in Gluon (Triton's lower level) share: waiting for kernels and for programs, pairs of e4m3.

Programs that wait for others must all run at the same time: no more than there are multiprocessors, one kernel after the
other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pocketllm.kernels.triton.pairs import round_e4m3, scale_of


@gluon.constexpr_function
def power_of_two(n, least=1):
    """The smallest one that is no less than n, nor than `least`, which is one."""
    return max(least, 1 << (n - 1).bit_length())


@gluon.constexpr_function
def powers(first, end):
    """The powers of two first, 2 first .. below end: how a layout counts through a dimension."""
    return [1 << i for i in range(first.bit_length() - 1, (end - 1).bit_length())]


@gluon.jit
def launch_dependents():
    """The next kernel may start once all programs have come here."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_kernels():
    """Returns once the kernels before have ended."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def publish():
    """What this thread has written to global memory, the copy engine of whoever is told later will read.

    (It takes its time while copies of this program are on their way: to be used where it is needed only.)
    """
    gl.inline_asm_elementwise("fence.proxy.async.global; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_acquire(at):
    """int64 at each address of `at`. What was written before that number can be read afterwards."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b64 $0, [$1];", "=l,l", [at], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def is_last(counter, expected):
    """Whether this is the last of `expected` programs to come here. What all of them have written before, it can read.

    counter [] int64 is 0 before the first and after the last.
    """
    gl.thread_barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        gl.store(counter, 0)
    return last


@gluon.jit
def arrive(counter):
    """One more has come: what this program has written can be read by who has waited for it (`wait_for_count`)."""
    gl.thread_barrier()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


@gluon.jit
def wait_for_count(counter, count):
    """Returns once a counter [] int64 is no less than count."""
    while load_acquire(counter) < count:
        pass


@gluon.jit
def raise_flag(flag, value):
    """Says that what this program has written can be read (by the copy engine, if it has also called `publish`)."""
    gl.thread_barrier()
    gl.atomic_xchg(flag, value, sem="release", scope="gpu")


@gluon.jit
def wait_for_flags(flags, FLAGS: gl.constexpr, first, last, value, WARPS: gl.constexpr):
    """Returns once flags [FLAGS] int64 of first .. last - 1 are no less than value. -> whether all of them were."""
    PADDED: gl.constexpr = power_of_two(FLAGS, 32)
    i = gl.arange(0, PADDED, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    at = flags + gl.minimum(i, FLAGS - 1)
    low = gl.where(load_acquire(at) < value, i, PADDED)
    while gl.max(gl.where((low >= first) & (low < last), 1, 0), axis=0) > 0:
        low = gl.where(load_acquire(at) < value, i, PADDED)
    return gl.min(low, axis=0) == PADDED


@gluon.jit
def store_pairs(codes, scales, v, row, real, group, K: gl.constexpr, PAIRS: gl.constexpr, layout: gl.constexpr):
    """v [R, 128] float32, columns of a group of rows `row` -> their places in a `types.Paired` (PAIRS = 2 R of it).

    Not where `real` [R] is false.
    """
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    largest = gl.max(gl.abs(v), axis=1)
    scale, inverse = scale_of(largest)
    v = v * inverse[:, None]
    high = round_e4m3(v)
    low = round_e4m3((v - high) * 16.0)
    at = codes + (row * K)[:, None] + (group * 128 + c)[None, :]
    gl.store(at, high.to(gl.float8e4nv), mask=real[:, None])
    gl.store(at + PAIRS // 2 * K, low.to(gl.float8e4nv), mask=real[:, None])
    at = scales + group * PAIRS + row
    gl.store(at, scale, mask=real)
    gl.store(at + PAIRS // 2, scale * 0.0625, mask=real)
