# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
"""What a bridge does between two products (see `bridge_kernels`): parts of a tile of 128 columns are added up in order, then
normed or gated, and made pairs. By the program that was the last to write one; of parts that go to other ranks as well, by
the tile's first program, as its own part is the last thing it has to do for the product."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pocketllm.kernels.triton.bridge_ranks import send, sends_parts, wait_for_sum
from pocketllm.kernels.triton.gluon_pieces import is_last, power_of_two, publish, raise_flag, store_pairs


@gluon.constexpr_function
def _rows_at_a_time(pairs):
    """Of 8 to 64 rows (pairs: twice as many). 32 are no quicker than 16."""
    return 16 if pairs >= 32 else 8


@gluon.constexpr_function
def _columns_of(warps, ranks):
    """How threads share rows of 128 columns, of however many rows: sums over columns are in its order. Words for other ranks
    are stored one by one, so neighbours in memory must be of neighbouring threads, or each takes a packet of its own through
    the link."""
    if ranks > 1:
        return gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])
    return gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])


@gluon.constexpr_function
def columns_without_sums(rows, warps):
    """The same where no sum depends on it: few rows are shared by all warps."""
    if rows <= warps:
        return gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0])
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
    group, parts, count, place, rank, num_rows, stamp,
    H: gl.constexpr, PARTS: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr, RANKS: gl.constexpr,
):  # fmt: skip
    """Of a group of 128 columns: the sum of parts [count, M, H] goes into the inboxes [RANKS, M, H]."""
    ROWS: gl.constexpr = _rows_at_a_time(PAIRS)
    layout: gl.constexpr = _columns_of(WARPS, RANKS)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = group * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    for start in range(0, num_rows, ROWS):
        real = start + r < num_rows
        at = ((start + r) * H)[:, None] + column[None, :]
        total = _sum_of_parts(parts, count, num_rows * H, at, real, PARTS, [ROWS, 128], layout)
        send(total, place, rank * num_rows * H + at, real[:, None], stamp, RANKS)


@gluon.jit
def add_and_norm(
    group, parts, count, place, rank, residual, gain, codes, scales, squares, num_rows, stamp,
    H: gl.constexpr, PARTS: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr, RANKS: gl.constexpr,
):  # fmt: skip
    """Of a group of 128 columns: residual [M, H] += the sum of parts [count, M, H]; pairs of it times gain [H]; squares
    [M, H / 128]: their sums.

    With RANKS > 1 the parts of all of them are added up, rank by rank. place: see `open_place`.
    """
    ROWS: gl.constexpr = _rows_at_a_time(PAIRS)
    layout: gl.constexpr = _columns_of(WARPS, RANKS)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = group * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    weight = gl.load(gain + column)
    SENT: gl.constexpr = sends_parts(PAIRS, RANKS)
    MOST: gl.constexpr = PARTS if SENT else 1  # words of a rank
    if RANKS > 1 and not SENT:
        _send_sums(group, parts, count, place, rank, num_rows, stamp, H, PARTS, PAIRS, WARPS, RANKS)
        count = 1
    for start in range(0, num_rows, ROWS):
        row = start + r
        real = row < num_rows
        at = (row * H)[:, None] + column[None, :]
        y = gl.load(residual + at, mask=real[:, None], other=0.0).to(gl.float32)
        if RANKS > 1:
            total = wait_for_sum(place, at, count, num_rows * H, stamp, real[:, None], RANKS, MOST)
        else:
            total = _sum_of_parts(parts, count, num_rows * H, at, real, PARTS, [ROWS, 128], layout)
        y = (y + total).to(residual.dtype.element_ty)
        gl.store(residual + at, y, mask=real[:, None])
        y = y.to(gl.float32)
        gl.store(squares + row * (H // 128) + group, gl.sum(y * y, axis=1), mask=real)
        store_pairs(codes, scales, y * weight[None, :], row, real, group, H, PAIRS, layout)
    publish()


@gluon.jit
def silu_times(gate, up):
    return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def gate_times_up(
    group, gates, gate_count, ups, up_count, width, factors, codes, scales, first, end, num_rows,
    I: gl.constexpr, PARTS: gl.constexpr, PAIRS: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Of rows first .. end - 1, ROWS at a time, and a group of 128 columns: parts of gate and up [.., M, width], times the
    rows' factors (in shared memory) -> pairs of silu(gate) * up, [M, I]. gates, ups: where the group's columns begin."""
    layout: gl.constexpr = columns_without_sums(ROWS, WARPS)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    kept = factors._reinterpret(gl.float32, [factors.shape[0] // ROWS, ROWS], factors.layout)
    stride = num_rows * width
    for start in range(first, end, ROWS):
        row = start + r
        real = row < num_rows
        at = (row * width)[:, None] + column[None, :]
        factor = kept.index(start // ROWS).load(gl.SliceLayout(1, layout))
        gate = _sum_of_parts(gates, gate_count, stride, at, real, PARTS, [ROWS, 128], layout)
        up = _sum_of_parts(ups, up_count, stride, at, real, PARTS, [ROWS, 128], layout)
        gate, up = gate * factor[:, None], up * factor[:, None]
        store_pairs(codes, scales, silu_times(gate, up), row, real, group, I, PAIRS, layout)
    publish()


@gluon.jit
def finish_tile(
    PRODUCT: gl.constexpr, tile, vectors, factors, meetings, places, rank, num_rows, epoch,
    H: gl.constexpr, I: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr, RANKS: gl.constexpr,
    PARTS: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """This program has written its part of a tile: if it is to add the tile up, what comes before the next product."""
    K: gl.constexpr = SIZES[0][PRODUCT]
    counters, flags = meetings[0][PRODUCT], meetings[1][PRODUCT]
    parts, residual, gain, normed, inner, squares = vectors
    if PRODUCT == 1:
        units: gl.constexpr = 2 * I // 128 * K
        group = tile // 2
        _, gates = programs_of(2 * group, K, units)
        _, ups = programs_of(2 * group + 1, K, units)
        if is_last(counters + group, gates + ups):
            columns = parts[1] + group * 128
            gate_times_up(group, columns, gates, columns + I, ups, 2 * I, factors, inner[0], inner[1], 0, num_rows, num_rows,
                          I, PARTS[1], PAIRS, _rows_at_a_time(PAIRS), WARPS)  # fmt: skip
            raise_flag(flags + group, epoch)
    else:
        first, count = programs_of(tile, K, H // 128 * K)
        if first == gl.program_id(0) if sends_parts(PAIRS, RANKS) else is_last(counters + tile, count):
            add_and_norm(tile, parts[PRODUCT], count, places[PRODUCT // 2], rank, residual, gain[PRODUCT // 2], normed[0],
                         normed[1], squares, num_rows, epoch.to(gl.int32), H, PARTS[PRODUCT], PAIRS, WARPS,
                         RANKS)  # fmt: skip
            raise_flag(flags + tile, epoch)
