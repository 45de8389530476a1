# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
# ruff: noqa: RUF005  (Triton knows no starred tuples)
"""What bridges of several ranks send each other (see `bridge_sums`, `parallel.Place`): words of a number and a stamp.

Whoever adds up looks for words until all have the stamp, which is the kernel's number: nothing orders them, and nothing
counts them. A word is written again only after it has been read: the two sums of a bridge have an inbox each, and nobody
ends a bridge before each program of each rank has added up what it had to of the first sum and sent its part of the second.
The last bridge has no second sum; what reads its parts meets the other ranks by flags instead (`summands`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pocketllm.parallel import FEW_ROWS


@gluon.constexpr_function
def sends_parts(pairs, ranks):
    """Whether parts go to both ranks as they are: those of few rows. Of more rows, or ranks, they would be too many for the
    link and for registers, so each rank adds up its own first."""
    return ranks == 2 and pairs == 2 * FEW_ROWS


@gluon.jit
def open_place(inboxes, stop, rank, RANKS: gl.constexpr):
    """Of a `parallel.Place`: (this rank's inbox, all ranks' inboxes, stop)."""
    own, every = gl.load(inboxes + rank).to(gl.pointer_type(gl.int64)), ()
    for each in gl.static_range(RANKS):
        every = every + (gl.load(inboxes + each).to(gl.pointer_type(gl.int64)),)
    return own, every, stop


@gluon.jit
def send(x, place, at, mask, stamp, RANKS: gl.constexpr):
    """x float32 goes into all ranks' inboxes, this rank's too, at `at`: a number in the low half of a word, stamp [] int32
    in the high one. The memory takes a word as a whole."""
    words = (stamp.to(gl.int64) << 32) | (x.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF)
    for each in gl.static_range(RANKS):
        gl.store(place[1][each] + at, words, mask=mask)


@gluon.jit
def _look(place, at, count, stride, stamp, real, RANKS: gl.constexpr, MOST: gl.constexpr):
    """-> the sum of words' numbers, and 1 if some have not come yet and are waited for, else 0: the same for all warps,
    though `stop` may change between their looks at it. All are asked for at once."""
    inbox, _, stop = place
    shape: gl.constexpr = at.shape
    layout: gl.constexpr = at.type.layout
    total, missing = gl.zeros(shape, gl.float32, layout), gl.zeros(shape, gl.int32, layout)
    for rank in gl.static_range(RANKS):
        sum_of_rank = gl.zeros(shape, gl.float32, layout)
        for i in gl.static_range(MOST):
            there = real & (i < count)
            words = gl.load(inbox + (rank * MOST + i) * stride + at, mask=there, other=0, volatile=True)
            missing |= gl.where(there & ((words >> 32).to(gl.int32) != stamp), 1, 0)
            sum_of_rank += (words & 0xFFFFFFFF).to(gl.int32).to(gl.float32, bitcast=True)
        total += sum_of_rank
    missing = gl.where(gl.load(stop, volatile=True) != 0, 0, missing)
    return total, gl.max(gl.max(missing, axis=1), axis=0)


@gluon.jit
def wait_for_sum(place, at, count, stride, stamp, real, RANKS: gl.constexpr, MOST: gl.constexpr):
    """[R, N] float32: the sum of words [RANKS, MOST, ..], `stride` apart, of which each rank sends `count`: those of a rank
    in order, then the ranks in order. As soon as all have come, or nobody is to wait any more. 0 where `real` is false."""
    total, missing = _look(place, at, count, stride, stamp, real, RANKS, MOST)
    while missing > 0:
        total, missing = _look(place, at, count, stride, stamp, real, RANKS, MOST)
    return total
