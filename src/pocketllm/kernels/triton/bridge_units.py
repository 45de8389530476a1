# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
# ruff: noqa: RUF005  (Triton knows no starred tuples)
"""What a bridge's products are made of (see `bridge_kernels`): a unit is multiplied, a tile's results are stored."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from pocketllm.kernels.triton.bridge_ranks import send
from pocketllm.kernels.triton.bridge_sums import row_factors
from pocketllm.kernels.triton.gluon_pieces import wait_for_flags

_TOGETHER = gl.constexpr(16)  # rows up to which registers hold the products of all groups of a unit


@gluon.jit
def _tile(smem, place, group: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr):
    """One of the tiles [ROWS, 128] at a place."""
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    return smem.index(place)._reinterpret(gl.float8e4nv, [GROUPS, ROWS, 128], flat).index(group)


@gluon.jit
def _start(ring, g, group: gl.constexpr, PAIRS: gl.constexpr, nothing, GROUPS: gl.constexpr):
    """A group's product, on its way."""
    w_smem, x_smem, _, _, _, _, _ = ring
    w = _tile(w_smem, g % w_smem.shape[0], group, 128, GROUPS)
    x = _tile(x_smem, g % x_smem.shape[0], group, PAIRS, GROUPS).permute((1, 0))
    return warpgroup_mma(w, x, nothing, use_acc=False, is_async=True)


@gluon.jit
def _factors(kept, i, ring, g, group: gl.constexpr, layout: gl.constexpr):
    """What to multiply a group's products by: the rows' scales times the weight's. [1, PAIRS]"""
    of_weight = kept._reinterpret(gl.float32, [kept.shape[0], kept.shape[1], 1], kept.layout).index(i)
    of_rows = ring[2].index(g % ring[2].shape[0]).slice(group, 1)
    return of_rows.load(layout) * of_weight.slice(group, 1).load(layout)


@gluon.jit
def _add(sums, product, factors):
    return gl.fma(product, gl.broadcast(factors, sums)[0], sums)


@gluon.jit
def _done(ring, g):
    """The g-th unit has been read."""
    w_smem, x_smem, _, _, _, weights_read, rows_read = ring
    mbarrier.arrive(weights_read.index(g % w_smem.shape[0]))
    mbarrier.arrive(rows_read.index(g % x_smem.shape[0]))


@gluon.jit
def add_unit(sums, nothing, kept, i, ring, g, GROUPS: gl.constexpr, ROWS: gl.constexpr):
    """sums [128, 2 ROWS] and the product of this program's g-th unit, the i-th of its run.

    nothing: zeros like sums; kept: the weight's scales of the run's units, [.., GROUPS]; ring: `bridge_feed.feed_weights`.
    """
    PAIRS: gl.constexpr = 2 * ROWS
    w_smem, x_smem, _, weights_here, rows_here, _, _ = ring
    WEIGHT_PLACES: gl.constexpr = w_smem.shape[0]
    ROW_PLACES: gl.constexpr = x_smem.shape[0]
    layout: gl.constexpr = sums.type.layout
    mbarrier.wait(weights_here.index(g % WEIGHT_PLACES), g // WEIGHT_PLACES & 1)
    mbarrier.wait(rows_here.index(g % ROW_PLACES), g // ROW_PLACES & 1)
    if ROWS > _TOGETHER:  # registers hold one product
        for group in gl.static_range(GROUPS):
            group_factors = _factors(kept, i, ring, g, group, layout)
            product = warpgroup_mma_wait(0, deps=[_start(ring, g, group, PAIRS, nothing, GROUPS)])
            if group == GROUPS - 1:
                _done(ring, g)
            sums = _add(sums, product, group_factors)
    else:
        started, unit_factors = (), ()
        for group in gl.static_range(GROUPS):
            started = started + (_start(ring, g, group, PAIRS, nothing, GROUPS),)
            unit_factors = unit_factors + (_factors(kept, i, ring, g, group, layout),)
        for group in gl.static_range(GROUPS):
            product = warpgroup_mma_wait(GROUPS - 1 - group, deps=[started[group]])
            if group == GROUPS - 1:
                _done(ring, g)
            sums = _add(sums, product, unit_factors[group])
    return sums


@gluon.jit
def whole(sums, ROWS: gl.constexpr):
    """sums [128, 2 ROWS] of high and low parts -> their sums [128, ROWS]."""
    return gl.sum(sums.reshape([128, 2, ROWS]), axis=1)


@gluon.jit
def _places_of(both, tile, N, num_rows):
    """Of a tile's results [128, ROWS], rows' and columns' places in [M, N], and which are of real rows."""
    layout: gl.constexpr = both.type.layout
    m = gl.arange(0, both.shape[1], layout=gl.SliceLayout(0, layout))
    n = gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
    return (m * N)[None, :], (tile * 128 + n)[:, None], (m < num_rows)[None, :]


@gluon.jit
def store_tile(sums, factors, out, tile, N, num_rows, ROWS: gl.constexpr):
    """sums (see `whole`), times factors [ROWS] or None, in shared memory -> columns of a tile of `out` [M, N]."""
    both = whole(sums, ROWS)
    if factors is not None:
        both = both * factors.load(gl.SliceLayout(0, both.type.layout))[None, :]
        if ROWS > 8:  # two bytes here and two there would be many stores
            both = both.to(out.dtype.element_ty)
            both = gl.convert_layout(both, gl.BlockedLayout([4, 1], [32, 1], [1, gl.num_warps()], [0, 1]))
    row, column, real = _places_of(both, tile, N, num_rows)
    gl.store(out + row + column, both.to(out.dtype.element_ty), mask=real)


@gluon.jit
def send_tile(sums, place, part, tile, N, num_rows, epoch, ROWS: gl.constexpr, RANKS: gl.constexpr):
    """The same without factors, to a tile's columns of a part of inboxes [.., M, N]."""
    both = whole(sums, ROWS)
    row, column, real = _places_of(both, tile, N, num_rows)
    send(both, place, part * num_rows * N + row + column, real, epoch.to(gl.int32), RANKS)


@gluon.jit
def clear_tile(out, tile, N, num_rows, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Zeros in a tile's columns of `out` [M, N]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    n = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    at = out + (m * N)[:, None] + (tile * 128 + n)[None, :]
    gl.store(at, gl.zeros([ROWS, 128], gl.float32, layout), mask=(m < num_rows)[:, None])


@gluon.jit
def keep_factors(
    factors, squares, flags, num_rows, eps, epoch, H: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Of all rows, in shared memory [ROWS], as soon as the squares of all columns are there."""
    wait_for_flags(flags, H // 128, 0, H // 128, epoch, WARPS)
    over: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, over))
    factors.store(row_factors(squares, row, row < num_rows, eps, H, over))
