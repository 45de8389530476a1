# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
# ruff: noqa: SIM102, RUF005  (conditions the compiler knows, and ones that it does not; Triton knows no starred tuples)
"""`bridge_kernel`: all that lies between two mixers of a block, for few rows, in one persistent kernel.

At few rows a product takes as long as its weights take to read, and what a device loses is at the ends of kernels: memory
idles while the last programs finish, the next kernel starts, and its first tiles travel; 4 to 7 us of each 10 to 45. Here
one program on each multiprocessor walks through four products. It asks for weights in the order in which it will need them
and never waits to ask: while programs meet, add up and round between two products, the tiles of the next arrive.

    out projection | add, norm | gate and up | silu * up | down | add, norm | the next mixer's projections

Weights are multiplied as stored, by FP8 tensor cores; rows are pairs of e4m3 (`pairs`). The norm's factor is a number a row:
what is rounded is x times the norm's weight, and the product of it is multiplied by the factor at its end.

Units. A product [M, N] is cut into tiles of 128 outputs, and those along K into units of 256 columns: two groups, whose
products are scaled and added in order. Units are numbered tile by tile, and a program has a run of them. So a tile may have
several programs, each of which writes a part, added up in order where they are read. Which programs depends on the weight's
shape and the number of multiprocessors alone: a row's bits do not depend on how many rows there are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pocketllm.kernels.triton.bridge_sums import add_and_norm, gate_times_up
from pocketllm.kernels.triton.gluon_pieces import launch_dependents, meet, wait_for_kernels

_TOGETHER = gl.constexpr(16)  # rows up to which registers hold the products of all groups of a unit


@gluon.jit
def _k_of(unit, UNITS_K: gl.constexpr, TURN: gl.constexpr):
    """Which of a row's UNITS_K units it is. Tiles begin at different ones, as memory is slow where all programs read the
    same columns of rows that lie a multiple of 1,024 bytes apart."""
    return (unit % UNITS_K + unit // UNITS_K * TURN) % UNITS_K


@gluon.jit
def _fetch_tiles(matrix, smem, full, slot, row, k, wanted, GROUPS: gl.constexpr):
    """Rows row .. and the columns of unit k of a matrix, as GROUPS tiles of 128 columns."""
    tma.async_copy_global_to_shared(matrix, [k * GROUPS, row, 0], full.index(slot), smem.index(slot), wanted)


@gluon.jit
def _tile(smem, slot, group: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr):
    """One of the tiles [ROWS, 128] in a slot."""
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    return smem.index(slot)._reinterpret(gl.float8e4nv, [GROUPS, ROWS, 128], flat).index(group)


@gluon.jit
def _fetch_rows(rows, x_smem, scales_smem, full, slot, k, wanted, GROUPS: gl.constexpr):
    """The columns of unit k of all rows, and their scales. rows: descriptors of a `Paired`'s codes and scales."""
    _fetch_tiles(rows[0], x_smem, full, slot, 0, k, wanted, GROUPS)
    tma.async_copy_global_to_shared(rows[1], [k * GROUPS, 0], full.index(slot), scales_smem.index(slot), wanted)


@gluon.jit
def _fetch_unit(PRODUCT: gl.constexpr, plan, unit, slot, smem, full, wanted, SIZES: gl.constexpr):
    UNITS_K: gl.constexpr = SIZES[0][PRODUCT]
    k, tile = _k_of(unit, UNITS_K, SIZES[1][PRODUCT]), unit // UNITS_K
    if PRODUCT < 3:
        _fetch_tiles(plan[0][PRODUCT], smem, full, slot, tile * 128, k, wanted, SIZES[2])
    elif tile < plan[3]:
        _fetch_tiles(plan[0][3], smem, full, slot, tile * 128, k, wanted, SIZES[2])
    else:
        _fetch_tiles(plan[0][4], smem, full, slot, (tile - plan[3]) * 128, k, wanted, SIZES[2])


@gluon.jit
def _fetch_weight(PRODUCT: gl.constexpr, g, slot, plan, smem, full, SIZES: gl.constexpr):
    """Asks for the g-th of all units that this program reads. It belongs to product PRODUCT or a later one."""
    firsts, ends = plan[1], plan[2]
    wanted = g < ends[3]
    if PRODUCT == 0 and g < ends[0]:
        _fetch_unit(0, plan, firsts[0] + g, slot, smem, full, wanted, SIZES)
    elif PRODUCT <= 1 and g < ends[1]:
        _fetch_unit(1, plan, firsts[1] + g - ends[0], slot, smem, full, wanted, SIZES)
    elif PRODUCT <= 2 and g < ends[2]:
        _fetch_unit(2, plan, firsts[2] + g - ends[1], slot, smem, full, wanted, SIZES)
    else:
        _fetch_unit(3, plan, firsts[3] + g - ends[2], slot, smem, full, wanted, SIZES)


@gluon.jit
def _start(w_smem, x_smem, slot, group: gl.constexpr, PAIRS: gl.constexpr, nothing, GROUPS: gl.constexpr):
    """A group's product, on its way."""
    w, x = _tile(w_smem, slot, group, 128, GROUPS), _tile(x_smem, slot, group, PAIRS, GROUPS).permute((1, 0))
    return warpgroup_mma(w, x, nothing, use_acc=False, is_async=True)


@gluon.jit
def _add(sums, product, scale, scales_smem, slot, group: gl.constexpr, layout: gl.constexpr):
    factors = scales_smem.index(slot).slice(group, 1).load(layout) * scale
    return gl.fma(product, gl.broadcast(factors, sums)[0], sums)


@gluon.jit
def _row_factors(
    squares, num_rows, eps, H: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, layout: gl.constexpr
):
    """1 / sqrt(mean of squares + eps) of each row, [ROWS]."""
    groups: gl.constexpr = H // 128
    padded: gl.constexpr = 32 if groups <= 32 else (64 if groups <= 64 else 128)
    over: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [WARPS, 1], [1, 0])
    j = gl.arange(0, padded, layout=gl.SliceLayout(1, over))
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, over))
    inside = (j < groups)[:, None] & (m < num_rows)[None, :]
    each = gl.load(squares + m[None, :] * groups + j[:, None], mask=inside, other=0.0)
    return gl.convert_layout(gl.rsqrt(gl.sum(each, axis=0) / H + eps), layout)


@gluon.jit
def _store_tile(sums, factors, out, tile, N, begun, stop, num_rows, ROWS: gl.constexpr, PARTS: gl.constexpr):
    """sums [128, 2 ROWS] of high and low parts -> columns of a tile of `out`, [M, N] or [PARTS, M, N] float32.

    begun: program that has the tile's first unit, and writes part 0. stop: this one has the last, and sees to it that
    there are PARTS.
    """
    both = gl.sum(sums.reshape([128, 2, ROWS]), axis=1)
    layout: gl.constexpr = both.type.layout
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    n = gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
    at = out + (m * N)[None, :] + (tile * 128 + n)[:, None]
    real = (m < num_rows)[None, :]
    if factors is not None:
        both = both * gl.convert_layout(factors, gl.SliceLayout(0, layout))[None, :]
    if PARTS == 0:
        gl.store(at, both.to(out.dtype.element_ty), mask=real)
    else:
        part = gl.program_id(0) - begun
        gl.store(at + part * num_rows * N, both, mask=real)
        if stop:
            for other in range(part + 1, PARTS):
                gl.store(at + other * num_rows * N, gl.zeros([128, ROWS], gl.float32, layout), mask=real)


@gluon.jit
def multiply(
    PRODUCT: gl.constexpr, rows, scales, out, squares, num_rows, eps, N, plan, w_smem, x_smem, scales_smem, full,
    H: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    SIZES: gl.constexpr,
):  # fmt: skip
    """This program's units of a product. rows: descriptors of a `Paired`. PARTS 0: a tile has one program, and `out`
    is [M, N] (of the last product: N without the small matrix, whose tiles go to its own out, [2, M, 128] float32).

    SIZES: of each product units of a tile, and by how many one tile begins after the one before; groups of a unit.
    plan: see `bridge_kernel`.
    """
    PAIRS: gl.constexpr = 2 * ROWS
    K: gl.constexpr = SIZES[0][PRODUCT]
    TURN: gl.constexpr = SIZES[1][PRODUCT]
    GROUPS: gl.constexpr = SIZES[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PAIRS, 32])
    base = plan[2][PRODUCT - 1] if PRODUCT > 0 else 0
    first, count, programs = plan[1][PRODUCT], plan[2][PRODUCT] - base, gl.num_programs(0)
    slot, parity = base % STAGES, base // STAGES & 1
    for s in gl.static_range(STAGES):
        k = _k_of(first + s, K, TURN)
        _fetch_rows(rows, x_smem, scales_smem, full, (base + s) % STAGES, k, s < count, GROUPS)
    nothing = gl.zeros([128, PAIRS], gl.float32, layout)
    sums = nothing
    factors = squares
    if squares is not None:
        factors = _row_factors(squares, num_rows, eps, H, ROWS, WARPS, gl.SliceLayout(0, layout))
    for i in range(count):
        unit, g = first + i, base + i
        k, tile = _k_of(unit, K, TURN), unit // K
        at = scales[0] + (tile * K + k) * GROUPS
        if PRODUCT == 3:
            if tile >= plan[3]:
                at = scales[1] + ((tile - plan[3]) * K + k) * GROUPS
        group_scales = ()
        for group in gl.static_range(GROUPS):
            group_scales = group_scales + (gl.load(at + group),)
        mbarrier.wait(full.index(slot), parity)
        if ROWS > _TOGETHER:  # registers hold one product
            for group in gl.static_range(GROUPS - 1):
                product = warpgroup_mma_wait(0, deps=[_start(w_smem, x_smem, slot, group, PAIRS, nothing, GROUPS)])
                sums = _add(sums, product, group_scales[group], scales_smem, slot, group, layout)
            last = _start(w_smem, x_smem, slot, GROUPS - 1, PAIRS, nothing, GROUPS)
        else:
            started = ()
            for group in gl.static_range(GROUPS):
                started = started + (_start(w_smem, x_smem, slot, group, PAIRS, nothing, GROUPS),)
            for group in gl.static_range(GROUPS - 1):
                product = warpgroup_mma_wait(GROUPS - 1 - group, deps=[started[group]])
                sums = _add(sums, product, group_scales[group], scales_smem, slot, group, layout)
            last = started[GROUPS - 1]
        mbarrier.expect(full.index(slot), GROUPS * (128 * (128 + PAIRS) + 4 * PAIRS), g + STAGES < plan[2][3])
        last_factors = scales_smem.index(slot).slice(GROUPS - 1, 1).load(layout) * group_scales[GROUPS - 1]
        product = warpgroup_mma_wait(0, deps=[last])
        gl.thread_barrier()  # all have read the slot
        _fetch_weight(PRODUCT, g + STAGES, slot, plan, w_smem, full, SIZES)
        coming = _k_of(unit + STAGES, K, TURN)  # a later product asks for its own rows
        _fetch_rows(rows, x_smem, scales_smem, full, slot, coming, i + STAGES < count, GROUPS)
        sums = gl.fma(product, gl.broadcast(last_factors, sums)[0], sums)
        slot += 1
        if slot == STAGES:
            slot = 0
            parity ^= 1
        stop = (unit + 1) % K == 0
        if stop | (i + 1 == count):
            begun = ((tile * K + 1) * programs - 1) // (N // 128 * K)
            if PRODUCT < 3:
                _store_tile(sums, factors, out[0], tile, N, begun, stop, num_rows, ROWS, PARTS)
            elif tile < plan[3]:
                _store_tile(sums, factors, out[0], tile, plan[3] * 128, begun, stop, num_rows, ROWS, PARTS)
            else:
                small = out[1] + (tile - plan[3]) * 128 * num_rows
                _store_tile(sums, factors, small, 0, 128, begun, stop, num_rows, ROWS, PARTS)
            sums = nothing


@gluon.jit(do_not_specialize=["num_rows", "in_tiles", "small_tiles", "rank"])
def bridge_kernel(
    x, x_s, w_out, s_out, w_gate_up, s_gate_up, w_down, s_down, w_in, s_in, w_small, s_small, residual, gain1, gain2,
    normed, normed_s, normed_codes, normed_scales, inner, inner_s, inner_codes, inner_scales, squares, parts_out,
    parts_inner, parts_down, out, out_small, counter, out_ranks, out_flags, down_ranks, down_flags, rank, num_rows,
    in_tiles, small_tiles, eps,
    H: gl.constexpr, A: gl.constexpr, I: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, PARTS_OUT: gl.constexpr, PARTS_INNER: gl.constexpr,
    PARTS_DOWN: gl.constexpr, RANKS: gl.constexpr,
):  # fmt: skip
    """w_*: descriptors of weights [N, K] e4m3, as [K / 128, N, 128] in blocks of [GROUPS, 128, 128]; s_*: their scales
    [N / 128, K / 128]. x, normed, inner: the same of the codes of `Paired`s of widths A, H and I, with all rows in a block;
    *_s: of their scales, in blocks of GROUPS. The last two also come as pointers, to be written. in_tiles: N / 128 of
    w_in, 0 after the last block. small_tiles: 2, the high and low part of a matrix of up to 128 outputs, or 0.
    With RANKS > 1, parts_out and parts_down are this rank's memory of two `parallel.Place`s.
    """
    K: gl.constexpr = 128 * GROUPS  # of a unit
    SIZES: gl.constexpr = ((A // K, H // K, I // K, H // K), (0, 0, 0, 3), GROUPS)
    PAIRS: gl.constexpr = 2 * ROWS
    NBYTES: gl.constexpr = GROUPS * (128 * (128 + PAIRS) + 4 * PAIRS)
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, GROUPS, 128, 128], w_out.layout)
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, GROUPS, PAIRS, 128], x.layout)
    scales_smem = gl.allocate_shared_memory(gl.float32, [STAGES, GROUPS, PAIRS], x_s.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
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
    plan = (weights, (first0, first1, first2, first3), (end0, end1, end2, end3), in_tiles)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    launch_dependents()
    for s in gl.static_range(STAGES):  # weights do not depend on what runs before
        mbarrier.expect(full.index(s), NBYTES, s < end3)
        _fetch_weight(0, s, s, plan, w_smem, full, SIZES)
    wait_for_kernels()
    multiply(0, (x, x_s), (s_out,), (parts_out,), None, num_rows, eps, H, plan, w_smem, x_smem, scales_smem, full,
             H, ROWS, WARPS, STAGES, PARTS_OUT, SIZES)  # fmt: skip
    meet(counter, programs)
    add_and_norm(parts_out, (out_ranks, out_flags), rank, residual, gain1, normed_codes, normed_scales, squares, num_rows,
                 H, PARTS_OUT, PAIRS, WARPS, RANKS)  # fmt: skip
    meet(counter, programs)
    multiply(1, (normed, normed_s), (s_gate_up,), (parts_inner,), squares, num_rows, eps, 2 * I, plan, w_smem, x_smem,
             scales_smem, full, H, ROWS, WARPS, STAGES, PARTS_INNER, SIZES)  # fmt: skip
    meet(counter, programs)
    gate_times_up(parts_inner, inner_codes, inner_scales, num_rows, I, PARTS_INNER, PAIRS, WARPS)
    meet(counter, programs)
    multiply(2, (inner, inner_s), (s_down,), (parts_down,), None, num_rows, eps, H, plan, w_smem, x_smem, scales_smem,
             full, H, ROWS, WARPS, STAGES, PARTS_DOWN, SIZES)  # fmt: skip
    if tiles > 0:
        meet(counter, programs)
        add_and_norm(parts_down, (down_ranks, down_flags), rank, residual, gain2, normed_codes, normed_scales, squares,
                     num_rows, H, PARTS_DOWN, PAIRS, WARPS, RANKS)  # fmt: skip
        meet(counter, programs)
        multiply(3, (normed, normed_s), (s_in, s_small), (out, out_small), squares, num_rows, eps, tiles * 128, plan,
                 w_smem, x_smem, scales_smem, full, H, ROWS, WARPS, STAGES, 0, SIZES)  # fmt: skip
