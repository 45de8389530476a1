# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
# ruff: noqa: SIM102, RUF005  (conditions the compiler knows, and ones that it does not; Triton knows no starred tuples)
"""`bridge_kernel`: all that lies between two mixers of a block, for few rows, in one persistent kernel.

At few rows a product takes as long as its weights take to read, and what a device loses is at the ends of kernels: memory
idles while the last programs finish, the next kernel starts, and its first tiles travel; 4 to 7 us of each 10 to 45. Here
one program on each multiprocessor walks through four products:

    out projection | add, norm | gate and up | silu * up | down | add, norm | the next mixer's projections

Two of its warps ask for weights and rows in the order in which they will be needed (`bridge_feed`), the others multiply
(here, `bridge_units`). What lies between two products is done by tiles of 128 columns, each by one of the programs that made
a part of it, mostly the last to finish (`bridge_sums`), which then raises the tile's flag. Of gate and up a program may have
both tiles for the same columns whole (`bridge_pairs`). A program goes on with the columns that are there; only the norm's
factor, at the end of a tile, needs all of them. While it waits, the ring fills.

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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from pocketllm.kernels.triton.bridge_feed import feed_rows, feed_weights, unit_at, unit_k, weight_tile
from pocketllm.kernels.triton.bridge_pairs import multiply_pairs, run_of_pairs
from pocketllm.kernels.triton.bridge_ranks import open_place, sends_parts
from pocketllm.kernels.triton.bridge_sums import finish_tile, programs_of
from pocketllm.kernels.triton.bridge_units import add_unit, clear_tile, keep_factors, send_tile, store_tile
from pocketllm.kernels.triton.gluon_pieces import launch_dependents, load_acquire, wait_for_kernels


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
    _, _, ends, in_tiles, _, _ = plan
    base = ends[PRODUCT - 1] if PRODUCT > 0 else 0
    real = i < ends[PRODUCT] - base
    unit = unit_at(PRODUCT, plan, i)
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
def multiply(
    PRODUCT: gl.constexpr, kept, out, plan, ring, factors, vectors, meetings, places, rank, num_rows, eps, epoch, N,
    H: gl.constexpr, I: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
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
    _, _, ends, in_tiles, tiles, _ = plan
    squares, flags = vectors[5], meetings[1]
    base = ends[PRODUCT - 1] if PRODUCT > 0 else 0
    count = ends[PRODUCT] - base
    nothing = gl.zeros([128, PAIRS], gl.float32, layout)
    sums = nothing
    normed = gl.to_tensor(0)  # whether the rows' factors are there
    for i in range(count):
        unit = unit_at(PRODUCT, plan, i)
        tile = unit // K
        sums = add_unit(sums, nothing, kept, i, ring, base + i, GROUPS, ROWS)
        stop = (unit + 1) % K == 0
        if PRODUCT % 2 == 1:  # when all squares have long been there, but not at the end, which others wait for
            if (normed == 0) & (stop | (2 * (i + 1) >= count)):
                keep_factors(factors, squares, flags[PRODUCT - 1], num_rows, eps, epoch, H, ROWS, WARPS)
                normed = 1
        if stop | (i + 1 == count):
            if PRODUCT == 3:
                if tile < in_tiles:
                    store_tile(sums, factors, out[0], tile, in_tiles * 128, num_rows, ROWS)
                else:
                    store_tile(sums, factors, out[1] + (tile - in_tiles) * 128 * num_rows, 0, 128, num_rows, ROWS)
            else:
                begun, programs = programs_of(tile, K, N // 128 * K)
                part = gl.program_id(0) - begun
                at = out + part * num_rows * N
                if SENDS and PRODUCT == 0:
                    send_tile(sums, places[0], rank * PARTS[0] + part, tile, N, num_rows, epoch, ROWS, RANKS)
                elif SENDS:
                    if tiles > 0:
                        send_tile(sums, places[1], rank * PARTS[2] + part, tile, N, num_rows, epoch, ROWS, RANKS)
                    else:
                        store_tile(sums, None, at, tile, N, num_rows, ROWS)
                else:
                    store_tile(sums, None, at, weight_tile(PRODUCT, tile, SIZES), N, num_rows, ROWS)
                if PRODUCT == 2:  # of the last bridge, whoever reads the parts adds up all there may be
                    if stop & (tiles == 0):
                        for other in range(programs, PARTS[2]):
                            clear_tile(out + other * num_rows * N, tile, N, num_rows, ROWS, WARPS)
                if (PRODUCT < 2) | (tiles > 0):
                    finish_tile(PRODUCT, tile, vectors, factors, meetings, places, rank, num_rows, epoch, H, I, PAIRS, WARPS,
                                RANKS, PARTS, SIZES)  # fmt: skip
            sums = nothing


@gluon.jit
def work(
    plan, ring, kept, scales, outs, factors, vectors, meetings, own, inboxes, stop, rank, num_rows, eps,
    H: gl.constexpr, I: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
    RANKS: gl.constexpr, PARTS: gl.constexpr, SIZES: gl.constexpr, OWN: gl.constexpr,
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
             H, I, ROWS, WARPS, RANKS, PARTS, SIZES)  # fmt: skip
    if OWN is None:
        multiply(1, kept[1], vectors[0][1], plan, ring, factors, vectors, meetings, places, rank, num_rows, eps, epoch,
                 2 * I, H, I, ROWS, WARPS, RANKS, PARTS, SIZES)  # fmt: skip
    else:
        multiply_pairs(kept[1], vectors[0][1], plan, ring, factors, vectors, meetings, num_rows, eps, epoch, H, I, ROWS,
                       WARPS, PARTS[1], SIZES, OWN)  # fmt: skip
    multiply(2, kept[2], vectors[0][2], plan, ring, factors, vectors, meetings, places, rank, num_rows, eps, epoch, H,
             H, I, ROWS, WARPS, RANKS, PARTS, SIZES)  # fmt: skip
    multiply(3, kept[3], outs, plan, ring, factors, vectors, meetings, places, rank, num_rows, eps, epoch, plan[4] * 128,
             H, I, ROWS, WARPS, RANKS, PARTS, SIZES)  # fmt: skip
    gl.store(own, epoch)


@gluon.jit(do_not_specialize=["num_rows", "in_tiles", "small_tiles", "rank"])
def bridge_kernel(
    x, x_s, w_out, s_out, w_gate_up, s_gate_up, w_down, s_down, w_in, s_in, w_small, s_small, residual, gain1, gain2,
    normed, normed_s, normed_codes, normed_scales, inner, inner_s, inner_codes, inner_scales, squares, parts_out,
    parts_inner, parts_down, out, out_small, sync, out_inboxes, down_inboxes, stop, rank, num_rows, in_tiles, small_tiles,
    eps,
    H: gl.constexpr, A: gl.constexpr, I: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, PLACES: gl.constexpr,
    FLIGHT: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, RANKS: gl.constexpr, MOST: gl.constexpr,
    OWN: gl.constexpr,
):  # fmt: skip
    """w_*: descriptors of weights [N, K] e4m3, as [K / 128, N, 128] in blocks of [GROUPS, 128, 128]; s_*: their scales
    [N / 128, K / 128]. x, normed, inner: the same of the codes of `Paired`s of widths A, H and I, with all rows in a block;
    *_s: of their scales, in blocks of GROUPS. The last two also come as pointers, to be written. in_tiles: N / 128 of
    w_in, 0 after the last block. small_tiles: 2, the high and low part of a matrix of up to 128 outputs, or 0.
    PLACES: in the ring, of weights and of rows; FLIGHT: units of weights that are on their way at a time. PARTS: most parts
    of a tile of the first three products; OWN: see `run_of_pairs`. MOST: units of a program of each, at most, a power of
    two.
    sync int64: of each program how many kernels it has been in; of each tile of the first three products (gate and up
    together) a counter; and of each a flag. With OWN, of gate and up two counters for each shared pair instead, one of which
    only grows (`bridge_pairs`).
    With RANKS > 1, *_inboxes and stop are those of two `parallel.Place`s, for the sums of the first and the third product.
    """
    K: gl.constexpr = 128 * GROUPS  # of a unit
    SIZES: gl.constexpr = ((A // K, H // K, I // K, H // K), (0, 0 if OWN is None else 3, 0, 3), GROUPS)
    PAIRS: gl.constexpr = 2 * ROWS
    NBYTES: gl.constexpr = (GROUPS * 128 * 128, GROUPS * (128 + 4) * PAIRS)
    WEIGHT_PLACES: gl.constexpr = PLACES[0]
    ROW_PLACES: gl.constexpr = PLACES[1]
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [PLACES[0], GROUPS, 128, 128], w_out.layout)
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [PLACES[1], GROUPS, PAIRS, 128], x.layout)
    scales_smem = gl.allocate_shared_memory(gl.float32, [PLACES[1], GROUPS, PAIRS], x_s.layout)
    weights_here = gl.allocate_shared_memory(gl.int64, [PLACES[0], 1], mbarrier.MBarrierLayout())
    weights_read = gl.allocate_shared_memory(gl.int64, [PLACES[0], 1], mbarrier.MBarrierLayout())
    rows_here = gl.allocate_shared_memory(gl.int64, [PLACES[1], 1], mbarrier.MBarrierLayout())
    rows_read = gl.allocate_shared_memory(gl.int64, [PLACES[1], 1], mbarrier.MBarrierLayout())
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
    first0, first2 = units0 * program // programs, units2 * program // programs
    end0 = units0 * (program + 1) // programs - first0
    if OWN is None:
        first1, shared, jump = units1 * program // programs, 0, 0
        count1 = units1 * (program + 1) // programs - first1
    else:
        first1, shared, jump, count1 = run_of_pairs(program, OWN, H // K)
    end1 = end0 + count1
    end2 = end1 + units2 * (program + 1) // programs - first2
    first3 = tiles * program // programs * (H // K)  # the last: whole tiles
    end3 = end2 + tiles * (program + 1) // programs * (H // K) - first3
    weights = (w_out, w_gate_up, w_down, w_in, w_small)
    # What is read: first unit and end of each product's run (for the second see `unit_at`); tiles of the last's wide matrix,
    # and of both.
    plan = (weights, (first0, first1, first2, first3), (end0, end1, end2, end3), in_tiles, tiles, (shared, jump))
    for s in gl.static_range(WEIGHT_PLACES):
        mbarrier.init(weights_here.index(s), count=1)
        mbarrier.init(weights_read.index(s), count=1)
    for s in gl.static_range(ROW_PLACES):
        mbarrier.init(rows_here.index(s), count=1)
        mbarrier.init(rows_read.index(s), count=1)
    fence_async_shared()
    launch_dependents()
    ring = (w_smem, x_smem, scales_smem, weights_here, rows_here, weights_read, rows_read)
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
                    num_rows, eps, H, I, ROWS, WARPS, RANKS, PARTS, SIZES, OWN)),
            (feed_weights, (plan, ring, FLIGHT, NBYTES, OWN is None, SIZES)),
            (feed_rows, (plan, rows, meetings[1], own, ring, H, I, NBYTES, SIZES)),
        ],
        [1, 1], [56, 56],
    )  # fmt: skip
