# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
# ruff: noqa: SIM102, RUF005  (conditions the compiler knows, and ones that it does not; Triton knows no starred tuples)
"""`bridge_kernel`: all that lies between two mixers of a block, for few rows, in one persistent kernel.

At few rows a product takes as long as its weights take to read, and what a device loses is at the ends of kernels: memory
idles while the last programs finish, the next kernel starts, and its first tiles travel; 4 to 7 us of each 10 to 45. Here
one program on each multiprocessor walks through four products:

    out projection | add, norm | gate and up | silu * up | down | add, norm | the next mixer's projections

Two of its warps ask for weights and rows in the order in which they will be needed (`bridge_feed`), the others multiply
(here). What lies between two products is done by tiles of 128 columns, each by one of the programs that made a part of it,
mostly the last to finish (`bridge_sums`), which then raises the tile's flag. A program goes on with the columns that are
there; only the norm's factor, at the end of a tile, needs all of them. While it waits, the ring fills.

Weights are multiplied as stored, by FP8 tensor cores; rows are pairs of e4m3 (`pairs`). The norm's factor is a number a row:
what is rounded is x times the norm's weight, and the product of it is multiplied by the factor at its end.

Units. A product [M, N] is cut into tiles of 128 outputs, and those along K into units of 256 columns: two groups, whose
products are scaled and added in order. Units are numbered tile by tile, and a program has a run of them. So a tile may have
several programs, each of which writes a part; they are added up in order. Which programs depends on the weight's shape and
the number of multiprocessors alone: a row's bits do not depend on how many rows there are, nor on which program is last.

Nobody overwrites what another still reads. A tile of `down` has a part of every column of silu * up, so the first of its
tiles that is added up comes after all programs are through with gate and up: only then are the norm's rows made anew.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pocketllm.kernels.triton.bridge_feed import feed_rows, feed_weights, unit_k, weight_tile
from pocketllm.kernels.triton.bridge_ranks import open_place, send, sends_parts
from pocketllm.kernels.triton.bridge_sums import finish_tile, programs_of, row_factors
from pocketllm.kernels.triton.gluon_pieces import launch_dependents, load_acquire, wait_for_flags, wait_for_kernels

_TOGETHER = gl.constexpr(16)  # rows up to which registers hold the products of all groups of a unit


@gluon.jit
def _tile(smem, slot, group: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr):
    """One of the tiles [ROWS, 128] in a slot."""
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    return smem.index(slot)._reinterpret(gl.float8e4nv, [GROUPS, ROWS, 128], flat).index(group)


@gluon.jit
def _start(ring, slot, group: gl.constexpr, PAIRS: gl.constexpr, nothing, GROUPS: gl.constexpr):
    """A group's product, on its way."""
    w_smem, x_smem, _, _, _, _ = ring
    w, x = _tile(w_smem, slot, group, 128, GROUPS), _tile(x_smem, slot, group, PAIRS, GROUPS).permute((1, 0))
    return warpgroup_mma(w, x, nothing, use_acc=False, is_async=True)


@gluon.jit
def _factors(kept, i, scales_smem, slot, group: gl.constexpr, layout: gl.constexpr):
    """What to multiply a group's products by: the rows' scales times the weight's. [1, PAIRS]"""
    of_weight = kept._reinterpret(gl.float32, [kept.shape[0], kept.shape[1], 1], kept.layout).index(i)
    return scales_smem.index(slot).slice(group, 1).load(layout) * of_weight.slice(group, 1).load(layout)


@gluon.jit
def _add(sums, product, factors):
    return gl.fma(product, gl.broadcast(factors, sums)[0], sums)


@gluon.jit
def _whole(sums, tile, N, num_rows, ROWS: gl.constexpr):
    """sums [128, 2 ROWS] of high and low parts -> their sums [128, ROWS], their rows' and columns' places in
    [M, N], and which are of real rows."""
    both = gl.sum(sums.reshape([128, 2, ROWS]), axis=1)
    layout: gl.constexpr = both.type.layout
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    n = gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
    return both, (m * N)[None, :], (tile * 128 + n)[:, None], (m < num_rows)[None, :]


@gluon.jit
def _store_tile(sums, factors, out, tile, N, num_rows, ROWS: gl.constexpr):
    """sums (see `_whole`), times factors [ROWS] or None, in shared memory -> columns of a tile of `out` [M, N]."""
    both, row, column, real = _whole(sums, tile, N, num_rows, ROWS)
    if factors is not None:
        both = both * factors.load(gl.SliceLayout(0, both.type.layout))[None, :]
    gl.store(out + row + column, both.to(out.dtype.element_ty), mask=real)


@gluon.jit
def _send_tile(sums, place, part, tile, N, num_rows, epoch, ROWS: gl.constexpr, RANKS: gl.constexpr):
    """The same without factors, to a tile's columns of a part of inboxes [.., M, N]."""
    both, row, column, real = _whole(sums, tile, N, num_rows, ROWS)
    send(both, place, part * num_rows * N + row + column, real, epoch.to(gl.int32), RANKS)


@gluon.jit
def _clear_tile(out, tile, N, num_rows, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Zeros in a tile's columns of `out` [M, N]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    n = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    at = out + (m * N)[:, None] + (tile * 128 + n)[None, :]
    gl.store(at, gl.zeros([ROWS, 128], gl.float32, layout), mask=(m < num_rows)[:, None])


@gluon.jit
def keep_scales(PRODUCT: gl.constexpr, scales, plan, smem, WARPS: gl.constexpr, SIZES: gl.constexpr):
    """The weight's scales of all of this program's units of a product -> smem [units, GROUPS].

    Ahead of all work: a load on its own takes several units' time while the copy engine keeps memory busy.
    """
    UNITS_K: gl.constexpr = SIZES[0][PRODUCT]
    GROUPS: gl.constexpr = SIZES[2]
    layout: gl.constexpr = gl.BlockedLayout([1, GROUPS], [32, 1], [WARPS, 1], [1, 0])
    i = gl.arange(0, smem.shape[0], layout=gl.SliceLayout(1, layout))
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, layout))
    _, firsts, ends, in_tiles, _ = plan
    base = ends[PRODUCT - 1] if PRODUCT > 0 else 0
    real = i < ends[PRODUCT] - base
    unit = firsts[PRODUCT] + i
    k, tile = unit_k(unit, UNITS_K, SIZES[1][PRODUCT]), unit // UNITS_K
    if PRODUCT < 3:
        at = (weight_tile(PRODUCT, tile, SIZES) * UNITS_K + k) * GROUPS
        values = gl.load(scales[0] + at[:, None] + group[None, :], mask=real[:, None], other=0.0)
    else:
        wide = tile < in_tiles
        at = (gl.where(wide, tile, tile - in_tiles) * UNITS_K + k) * GROUPS
        values = gl.load(scales[0] + at[:, None] + group[None, :], mask=(real & wide)[:, None], other=0.0)
        values += gl.load(
            scales[1] + at[:, None] + group[None, :], mask=(real & (tile >= in_tiles))[:, None], other=0.0
        )
    smem.store(values)


@gluon.jit
def _keep_factors(
    factors, squares, flags, num_rows, eps, epoch, H: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Of all rows, in shared memory [ROWS], as soon as the squares of all columns are there."""
    wait_for_flags(flags, H // 128, 0, H // 128, epoch, WARPS)
    over: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, over))
    factors.store(row_factors(squares, row, row < num_rows, eps, H, over))


@gluon.jit
def multiply(
    PRODUCT: gl.constexpr, kept, out, plan, ring, factors, vectors, meetings, places, rank, num_rows, eps, epoch, N,
    H: gl.constexpr, I: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    RANKS: gl.constexpr, PARTS: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """This program's units of a product [M, N]; kept: their scales (`keep_scales`). A tile's part goes to its place among
    the PARTS [.., M, N] of `out`, or into the ranks' inboxes, and `finish_tile` goes on; of the last product, whole tiles,
    times the rows' factors, go to the two of `out`. factors: shared memory [ROWS].

    SIZES: of each product units of a tile, and by how many one tile begins after the one before; groups of a unit.
    plan: see `bridge_kernel`; ring: `bridge_feed.feed_weights`; epoch: what flags are raised to.
    """
    PAIRS: gl.constexpr = 2 * ROWS
    K: gl.constexpr = SIZES[0][PRODUCT]
    GROUPS: gl.constexpr = SIZES[2]
    SENDS: gl.constexpr = PRODUCT != 1 and sends_parts(PAIRS, RANKS)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PAIRS, 32])
    _, firsts, ends, in_tiles, tiles = plan
    _, _, x_scales, weights_here, rows_here, all_read = ring
    squares, flags = vectors[5], meetings[1]
    base = ends[PRODUCT - 1] if PRODUCT > 0 else 0
    first, count = firsts[PRODUCT], ends[PRODUCT] - base
    slot, parity = base % STAGES, base // STAGES & 1
    nothing = gl.zeros([128, PAIRS], gl.float32, layout)
    sums = nothing
    normed = gl.to_tensor(0)  # whether the rows' factors are there
    for i in range(count):
        unit = first + i
        tile = unit // K
        mbarrier.wait(weights_here.index(slot), parity)
        mbarrier.wait(rows_here.index(slot), parity)
        if ROWS > _TOGETHER:  # registers hold one product
            for group in gl.static_range(GROUPS):
                group_factors = _factors(kept, i, x_scales, slot, group, layout)
                product = warpgroup_mma_wait(0, deps=[_start(ring, slot, group, PAIRS, nothing, GROUPS)])
                if group == GROUPS - 1:
                    mbarrier.arrive(all_read.index(slot))
                sums = _add(sums, product, group_factors)
        else:
            started, unit_factors = (), ()
            for group in gl.static_range(GROUPS):
                started = started + (_start(ring, slot, group, PAIRS, nothing, GROUPS),)
                unit_factors = unit_factors + (_factors(kept, i, x_scales, slot, group, layout),)
            for group in gl.static_range(GROUPS):
                product = warpgroup_mma_wait(GROUPS - 1 - group, deps=[started[group]])
                if group == GROUPS - 1:
                    mbarrier.arrive(all_read.index(slot))
                sums = _add(sums, product, unit_factors[group])
        slot += 1
        if slot == STAGES:
            slot = 0
            parity ^= 1
        stop = (unit + 1) % K == 0
        if stop | (i + 1 == count):
            if PRODUCT == 3:
                if normed == 0:
                    _keep_factors(factors, squares, flags[2], num_rows, eps, epoch, H, ROWS, WARPS)
                normed = 1
                if tile < in_tiles:
                    _store_tile(sums, factors, out[0], tile, in_tiles * 128, num_rows, ROWS)
                else:
                    _store_tile(sums, factors, out[1] + (tile - in_tiles) * 128 * num_rows, 0, 128, num_rows, ROWS)
            else:
                begun, programs = programs_of(tile, K, N // 128 * K)
                part = gl.program_id(0) - begun
                at = out + part * num_rows * N
                if SENDS and PRODUCT == 0:
                    _send_tile(sums, places[0], rank * PARTS[0] + part, tile, N, num_rows, epoch, ROWS, RANKS)
                elif SENDS:
                    if tiles > 0:
                        _send_tile(sums, places[1], rank * PARTS[2] + part, tile, N, num_rows, epoch, ROWS, RANKS)
                    else:
                        _store_tile(sums, None, at, tile, N, num_rows, ROWS)
                else:
                    _store_tile(sums, None, at, weight_tile(PRODUCT, tile, SIZES), N, num_rows, ROWS)
                if PRODUCT == 2:  # of the last bridge, whoever reads the parts adds up all there may be
                    if stop & (tiles == 0):
                        for other in range(programs, PARTS[2]):
                            _clear_tile(out + other * num_rows * N, tile, N, num_rows, ROWS, WARPS)
                if PRODUCT == 1:
                    if normed == 0:
                        _keep_factors(factors, squares, flags[0], num_rows, eps, epoch, H, ROWS, WARPS)
                    normed = 1
                if (PRODUCT < 2) | (tiles > 0):
                    finish_tile(PRODUCT, tile, vectors, factors, meetings, places, rank, num_rows, epoch, H, I, PAIRS, WARPS,
                                RANKS, PARTS, SIZES)  # fmt: skip
            sums = nothing


@gluon.jit
def work(
    plan, ring, kept, scales, outs, factors, vectors, meetings, own, inboxes, stop, rank, num_rows, eps,
    H: gl.constexpr, I: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    RANKS: gl.constexpr, PARTS: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """What all warps do but the two that feed them.

    vectors: what is added up, and what becomes of it. meetings: counters and flags of the first three products' tiles,
    int64. own: how many kernels this program has been in; flags are raised to one more.
    """
    for product in gl.static_range(4):
        keep_scales(product, scales[product], plan, kept[product], WARPS, SIZES)
    places = (None, None)
    if RANKS > 1:
        places = open_place(inboxes[0], stop, rank, RANKS), open_place(inboxes[1], stop, rank, RANKS)
    wait_for_kernels()
    epoch = load_acquire(own) + 1
    multiply(0, kept[0], vectors[0][0], plan, ring, factors, vectors, meetings, places, rank, num_rows, eps, epoch, H,
             H, I, ROWS, WARPS, STAGES, RANKS, PARTS, SIZES)  # fmt: skip
    multiply(1, kept[1], vectors[0][1], plan, ring, factors, vectors, meetings, places, rank, num_rows, eps, epoch, 2 * I,
             H, I, ROWS, WARPS, STAGES, RANKS, PARTS, SIZES)  # fmt: skip
    multiply(2, kept[2], vectors[0][2], plan, ring, factors, vectors, meetings, places, rank, num_rows, eps, epoch, H,
             H, I, ROWS, WARPS, STAGES, RANKS, PARTS, SIZES)  # fmt: skip
    multiply(3, kept[3], outs, plan, ring, factors, vectors, meetings, places, rank, num_rows, eps, epoch, plan[4] * 128,
             H, I, ROWS, WARPS, STAGES, RANKS, PARTS, SIZES)  # fmt: skip
    gl.store(own, epoch)


@gluon.jit(do_not_specialize=["num_rows", "in_tiles", "small_tiles", "rank"])
def bridge_kernel(
    x, x_s, w_out, s_out, w_gate_up, s_gate_up, w_down, s_down, w_in, s_in, w_small, s_small, residual, gain1, gain2,
    normed, normed_s, normed_codes, normed_scales, inner, inner_s, inner_codes, inner_scales, squares, parts_out,
    parts_inner, parts_down, out, out_small, sync, out_inboxes, down_inboxes, stop, rank, num_rows, in_tiles, small_tiles,
    eps,
    H: gl.constexpr, A: gl.constexpr, I: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    FLIGHT: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, RANKS: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """w_*: descriptors of weights [N, K] e4m3, as [K / 128, N, 128] in blocks of [GROUPS, 128, 128]; s_*: their scales
    [N / 128, K / 128]. x, normed, inner: the same of the codes of `Paired`s of widths A, H and I, with all rows in a block;
    *_s: of their scales, in blocks of GROUPS. The last two also come as pointers, to be written. in_tiles: N / 128 of
    w_in, 0 after the last block. small_tiles: 2, the high and low part of a matrix of up to 128 outputs, or 0.
    STAGES: places in the ring; FLIGHT: units of weights that are on their way at a time. PARTS: most parts of a tile of
    the first three products. MOST: units of a program of each, at most, a power of two.
    sync int64: of each program how many kernels it has been in; of each tile of the first three products (gate and up
    together) a counter; and of each a flag.
    With RANKS > 1, *_inboxes and stop are those of two `parallel.Place`s, for the sums of the first and the third product.
    """
    K: gl.constexpr = 128 * GROUPS  # of a unit
    SIZES: gl.constexpr = ((A // K, H // K, I // K, H // K), (0, 0, 0, 3), GROUPS)
    PAIRS: gl.constexpr = 2 * ROWS
    NBYTES: gl.constexpr = (GROUPS * 128 * 128, GROUPS * (128 + 4) * PAIRS)
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, GROUPS, 128, 128], w_out.layout)
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, GROUPS, PAIRS, 128], x.layout)
    scales_smem = gl.allocate_shared_memory(gl.float32, [STAGES, GROUPS, PAIRS], x_s.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    rows_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    factors = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    kept = ()
    for product in gl.static_range(4):
        kept = kept + (gl.allocate_shared_memory(gl.float32, [MOST[product], GROUPS], flat),)
    program, programs = gl.program_id(0), gl.num_programs(0)
    units0: gl.constexpr = H // 128 * (A // K)
    units1: gl.constexpr = 2 * I // 128 * (H // K)
    units2: gl.constexpr = H // 128 * (I // K)
    tiles = in_tiles + small_tiles
    first0, first1 = units0 * program // programs, units1 * program // programs
    first2, first3 = units2 * program // programs, tiles * program // programs * (H // K)  # the last: whole tiles
    end0 = units0 * (program + 1) // programs - first0
    end1 = end0 + units1 * (program + 1) // programs - first1
    end2 = end1 + units2 * (program + 1) // programs - first2
    end3 = end2 + tiles * (program + 1) // programs * (H // K) - first3
    weights = (w_out, w_gate_up, w_down, w_in, w_small)
    # what is read: first unit and end of each product's run, tiles of the last's wide matrix, and of both
    plan = (weights, (first0, first1, first2, first3), (end0, end1, end2, end3), in_tiles, tiles)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(rows_full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()
    launch_dependents()
    ring = (w_smem, x_smem, scales_smem, full, rows_full, empty)
    rows = ((x, x_s), (normed, normed_s), (inner, inner_s))
    scales = ((s_out,), (s_gate_up,), (s_down,), (s_in, s_small))
    parts, gains = (parts_out, parts_inner, parts_down), (gain1, gain2)
    vectors = (parts, residual, gains, (normed_codes, normed_scales), (inner_codes, inner_scales), squares)
    counters, own = sync + programs, sync + program
    flags = counters + (2 * H + I) // 128
    at1, at2 = H // 128, (H + I) // 128
    meetings = ((counters, counters + at1, counters + at2), (flags, flags + at1, flags + at2))
    inboxes = (out_inboxes, down_inboxes)
    gl.warp_specialize(
        [
            (work, (plan, ring, kept, scales, (out, out_small), factors, vectors, meetings, own, inboxes, stop, rank,
                    num_rows, eps, H, I, ROWS, WARPS, STAGES, RANKS, PARTS, SIZES)),
            (feed_weights, (plan, ring, STAGES, FLIGHT, NBYTES, SIZES)),
            (feed_rows, (plan, rows, meetings[1], own, ring, H, I, STAGES, NBYTES, SIZES)),
        ],
        [1, 1], [56, 56],
    )  # fmt: skip
