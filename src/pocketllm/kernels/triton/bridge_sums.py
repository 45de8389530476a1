# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
# ruff: noqa: RUF005  (Triton knows no starred tuples)
"""What a bridge does between two products (see `bridge_kernels`): parts of a tile of 128 columns are added up in order, by
the program that was the last to write one, then normed or gated, and made pairs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pocketllm.kernels.triton.gluon_pieces import (
    is_last,
    power_of_two,
    publish,
    raise_flag,
    stamped,
    store_pairs,
    wait_for_words,
)


@gluon.constexpr_function
def _rows_at_a_time(pairs):
    """Of 8 to 64 rows (pairs: twice as many): more in flight are quicker, but with 64 there are no registers for them."""
    return 16 if pairs >= 32 else 8


@gluon.constexpr_function
def _columns_of(warps, ranks):
    """How threads share rows of 128 columns. Words for other ranks are stored one by one, so neighbours in memory must be of
    neighbouring threads, or each takes a packet of its own through the link."""
    if ranks > 1:
        return gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])
    return gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])


@gluon.jit
def _sum_of_parts(parts, count, stride, at, real, PARTS: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The sum of `count` parts, of PARTS at most, that lie `stride` apart. All are asked for at once."""
    total = gl.zeros(shape, gl.float32, layout)
    for part in gl.static_range(PARTS):
        total += gl.load(parts + part * stride + at, mask=real[:, None] & (part < count), other=0.0)
    return total


@gluon.jit
def row_factors(squares, row, real, eps, H: gl.constexpr, over: gl.constexpr):
    """1 / sqrt(mean of squares + eps) of rows `row` [R]. over: layout of [R, groups]."""
    groups: gl.constexpr = H // 128
    j = gl.arange(0, power_of_two(groups), layout=gl.SliceLayout(0, over))
    inside = real[:, None] & (j < groups)[None, :]
    each = gl.load(squares + row[:, None] * groups + j[None, :], mask=inside, other=0.0)
    return gl.rsqrt(gl.sum(each, axis=1) / H + eps)


@gluon.jit
def programs_of(tile, UNITS_K: gl.constexpr, units):
    """(first, how many) of the programs that have units of a tile, of UNITS_K each and `units` in all."""
    programs = gl.num_programs(0)
    first = ((tile * UNITS_K + 1) * programs - 1) // units
    return first, ((tile + 1) * UNITS_K * programs - 1) // units - first + 1


@gluon.jit
def _send_sums(
    group, parts, count, inboxes, rank, num_rows, epoch,
    H: gl.constexpr, PARTS: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr, RANKS: gl.constexpr,
):  # fmt: skip
    """Of a group of 128 columns: the sum of parts [count, M, H] goes into the other ranks' inboxes, as words
    [RANKS, M, H] with epoch for a stamp. -> this rank's inbox.

    A word is written again only after it has been read. The two sums of a bridge have an inbox each; and a rank that sends
    the first sum of the next bridge has had all of this one's second sum from the others, who had read the first by then.
    """
    ROWS: gl.constexpr = _rows_at_a_time(PAIRS)
    layout: gl.constexpr = _columns_of(WARPS, RANKS)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = group * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    own = gl.load(inboxes + rank).to(gl.pointer_type(gl.int64))
    theirs = ()
    for peer in gl.static_range(RANKS):
        theirs = theirs + (gl.load(inboxes + peer).to(gl.pointer_type(gl.int64)),)
    for start in range(0, num_rows, ROWS):
        real = start + r < num_rows
        at = ((start + r) * H)[:, None] + column[None, :]
        total = _sum_of_parts(parts, count, num_rows * H, at, real, PARTS, [ROWS, 128], layout)
        words = stamped(total, epoch.to(gl.int32))
        for peer in gl.static_range(RANKS):
            gl.store(theirs[peer] + rank * num_rows * H + at, words, mask=real[:, None] & (peer != rank))
    return own


@gluon.jit
def add_and_norm(
    group, parts, count, place, rank, residual, gain, codes, scales, squares, num_rows, epoch,
    H: gl.constexpr, PARTS: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr, RANKS: gl.constexpr,
):  # fmt: skip
    """Of a group of 128 columns: residual [M, H] += the sum of parts [count, M, H]; pairs of it times gain [H]; squares
    [M, H / 128]: their sums.

    With RANKS > 1 the sums of all of them are added, rank by rank: place = (inboxes, stop) of a `parallel.Place`.
    """
    ROWS: gl.constexpr = _rows_at_a_time(PAIRS)
    layout: gl.constexpr = _columns_of(WARPS, RANKS)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = group * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    weight = gl.load(gain + column)
    inbox = None
    if RANKS > 1:
        inbox = _send_sums(group, parts, count, place[0], rank, num_rows, epoch, H, PARTS, PAIRS, WARPS, RANKS)
    for start in range(0, num_rows, ROWS):
        row = start + r
        real = row < num_rows
        at = (row * H)[:, None] + column[None, :]
        y = gl.load(residual + at, mask=real[:, None], other=0.0).to(gl.float32)
        total = _sum_of_parts(parts, count, num_rows * H, at, real, PARTS, [ROWS, 128], layout)
        if RANKS > 1:
            own, total = total, gl.zeros([ROWS, 128], gl.float32, layout)
            for each in gl.static_range(RANKS):
                words, theirs = inbox + each * num_rows * H + at, real[:, None] & (each != rank)
                sent = wait_for_words(words, epoch.to(gl.int32), theirs, place[1])
                total += gl.where(each == rank, own, sent)
        y = (y + total).to(residual.dtype.element_ty)
        gl.store(residual + at, y, mask=real[:, None])
        y = y.to(gl.float32)
        gl.store(squares + row * (H // 128) + group, gl.sum(y * y, axis=1), mask=real)
        store_pairs(codes, scales, y * weight[None, :], row, real, group, H, PAIRS, layout)
    publish()


@gluon.jit
def gate_times_up(
    group, parts, gate_count, up_count, factors, codes, scales, num_rows,
    I: gl.constexpr, PARTS: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Of a group of 128 columns: parts [.., M, 2 I], times the rows' factors (in shared memory) -> pairs of
    silu(gate) * up, [M, I]."""
    ROWS: gl.constexpr = _rows_at_a_time(PAIRS)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = group * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    kept = factors._reinterpret(gl.float32, [factors.shape[0] // ROWS, ROWS], factors.layout)
    stride = num_rows * (2 * I)
    for start in range(0, num_rows, ROWS):
        row = start + r
        real = row < num_rows
        at = (row * (2 * I))[:, None] + column[None, :]
        factor = kept.index(start // ROWS).load(gl.SliceLayout(1, layout))
        gate = _sum_of_parts(parts, gate_count, stride, at, real, PARTS, [ROWS, 128], layout)
        up = _sum_of_parts(parts + I, up_count, stride, at, real, PARTS, [ROWS, 128], layout)
        gate, up = gate * factor[:, None], up * factor[:, None]
        store_pairs(codes, scales, gate / (1.0 + gl.exp(-gate)) * up, row, real, group, I, PAIRS, layout)
    publish()


@gluon.jit
def finish_tile(
    PRODUCT: gl.constexpr, tile, vectors, factors, meetings, places, rank, num_rows, epoch,
    H: gl.constexpr, I: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr, RANKS: gl.constexpr,
    PARTS: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """This program has written its part of a tile: if the others have, too, what comes before the next product."""
    K: gl.constexpr = SIZES[0][PRODUCT]
    counters, flags = meetings[0][PRODUCT], meetings[1][PRODUCT]
    parts, residual, gain, normed, inner, squares = vectors
    if PRODUCT == 1:
        units: gl.constexpr = 2 * I // 128 * K
        group = tile // 2
        _, gates = programs_of(2 * group, K, units)
        _, ups = programs_of(2 * group + 1, K, units)
        if is_last(counters + group, gates + ups):
            gate_times_up(group, parts[1], gates, ups, factors, inner[0], inner[1], num_rows, I, PARTS[1], PAIRS, WARPS)
            raise_flag(flags + group, epoch)
    else:
        _, count = programs_of(tile, K, H // 128 * K)
        if is_last(counters + tile, count):
            add_and_norm(tile, parts[PRODUCT], count, places[PRODUCT // 2], rank, residual, gain[PRODUCT // 2], normed[0],
                         normed[1], squares, num_rows, epoch, H, PARTS[PRODUCT], PAIRS, WARPS, RANKS)  # fmt: skip
            raise_flag(flags + tile, epoch)
