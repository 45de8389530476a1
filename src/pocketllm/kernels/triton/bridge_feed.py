# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
# ruff: noqa: SIM102  (conditions the compiler knows, and ones that it does not)
"""The two warps of a bridge that ask for memory (see `bridge_kernels`).

They fill a ring of places in shared memory, in the order in which the other warps multiply: one with units of weights, one
with the rows that go with them. Weights depend on nothing, so the first never stops but for want of room, neither at the
kernel's start nor between two products. Each group of columns of the rows is asked for as soon as some program has made it.

No more than FLIGHT units are on their way at a time. With a whole ring of them, whatever else goes to memory and back stands
behind 4 us of weights: parts, counters and flags, five times between two products. (A step of 27B at one slot on an H200,
`gpu_families.py --rings`: 7.39 ms with 2 of 6 on their way, 7.61 with 3, 8.05 with 1.) Where programs have no pairs of
their own (`bridge_pairs`), FLIGHT does not hold inside of the second product and the last: tried on a rank of two, of whose
programs half have nothing of the last product.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from pocketllm.kernels.triton.gluon_pieces import load_acquire, wait_for_flags, wait_for_kernels


@gluon.jit
def unit_at(PRODUCT: gl.constexpr, plan, i):
    """The i-th unit of this program's run of a product's. A run of gate and up may have two pieces (`bridge_pairs`)."""
    _, firsts, _, _, _, pieces = plan
    shared, jump = pieces
    if PRODUCT == 1:
        return firsts[1] + i + gl.where(i < shared, 0, jump)
    return firsts[PRODUCT] + i


@gluon.jit
def unit_k(unit, UNITS_K: gl.constexpr, TURN: gl.constexpr):
    """Which of a row's UNITS_K units it is. Tiles begin at different ones, as memory is slow where all programs read the
    same columns of rows that lie a multiple of 1,024 bytes apart."""
    return (unit % UNITS_K + unit // UNITS_K * TURN) % UNITS_K


@gluon.jit
def weight_tile(PRODUCT: gl.constexpr, tile, SIZES: gl.constexpr):
    """Which of the weight's tiles of 128 outputs is the product's tile-th. Gate's and up's take turns: a pair is made by
    neighbours, so each program multiplies about one pair in the end. (With all of gate first, it was chance who did it, and
    the rest waited for programs that had three.)"""
    if PRODUCT != 1:
        return tile
    return tile % 2 * (SIZES[0][2] * SIZES[2]) + tile // 2


@gluon.jit
def _fetch_unit(PRODUCT: gl.constexpr, plan, unit, smem, bar, SIZES: gl.constexpr):
    """A tile's 128 rows and the columns of a unit, as tiles of 128 columns."""
    UNITS_K: gl.constexpr = SIZES[0][PRODUCT]
    k, tile = unit_k(unit, UNITS_K, SIZES[1][PRODUCT]) * SIZES[2], unit // UNITS_K
    weights, _, _, in_tiles, _, _ = plan
    if PRODUCT < 3:
        tma.async_copy_global_to_shared(weights[PRODUCT], [k, weight_tile(PRODUCT, tile, SIZES) * 128, 0], bar, smem)
    elif tile < in_tiles:
        tma.async_copy_global_to_shared(weights[3], [k, tile * 128, 0], bar, smem)
    else:
        tma.async_copy_global_to_shared(weights[4], [k, (tile - in_tiles) * 128, 0], bar, smem)


@gluon.jit
def _fetch_weight(g, plan, smem, bar, SIZES: gl.constexpr):
    """Asks for the g-th of all units that this program reads."""
    ends = plan[2]
    if g < ends[0]:
        _fetch_unit(0, plan, unit_at(0, plan, g), smem, bar, SIZES)
    elif g < ends[1]:
        _fetch_unit(1, plan, unit_at(1, plan, g - ends[0]), smem, bar, SIZES)
    elif g < ends[2]:
        _fetch_unit(2, plan, unit_at(2, plan, g - ends[1]), smem, bar, SIZES)
    else:
        _fetch_unit(3, plan, unit_at(3, plan, g - ends[2]), smem, bar, SIZES)


@gluon.jit
def feed_weights(
    plan, ring, FLIGHT: gl.constexpr, NBYTES: gl.constexpr, FREE: gl.constexpr, SIZES: gl.constexpr
):  # fmt: skip
    """All units of weights of this program, in order, as soon as there is room. plan: see `bridge_kernel`. FREE: any number
    may be on its way inside of the second product and the last.

    ring: shared memory of weights, rows and their scales, each with places of its own, and barriers of these: weights are
    there, rows are there, weights are read, rows are read. NBYTES: of a unit's weights, and of its rows with scales.
    """
    w_smem, _, _, weights_here, _, weights_read, _ = ring
    PLACES: gl.constexpr = w_smem.shape[0]
    ends = plan[2]
    for g in range(ends[3]):
        place = g % PLACES
        mbarrier.wait(weights_read.index(place), (g // PLACES & 1) ^ 1)  # at once, the first time round
        before = gl.maximum(g - FLIGHT, 0)
        few = g >= FLIGHT
        if FREE:
            few = few & ((g < ends[0] + PLACES) | ((g > ends[1] - PLACES) & (g < ends[2] + PLACES)))
        mbarrier.wait(weights_here.index(before % PLACES), before // PLACES & 1, pred=few)
        mbarrier.expect(weights_here.index(place), NBYTES[0])
        _fetch_weight(g, plan, w_smem.index(place), weights_here.index(place), SIZES)


@gluon.jit
def _feed_product(
    PRODUCT: gl.constexpr, plan, rows, made, FLAGS: gl.constexpr, epoch, ring, NBYTES: gl.constexpr,
    SIZES: gl.constexpr,
):  # fmt: skip
    """The rows of a product's units. made [FLAGS]: of each group of 128 columns of rows, or None."""
    ends = plan[2]
    _, x_smem, scales_smem, _, rows_here, _, rows_read = ring
    PLACES: gl.constexpr = x_smem.shape[0]
    base = ends[PRODUCT - 1] if PRODUCT > 0 else 0
    all_made = made is None
    for g in range(base, ends[PRODUCT]):
        k = unit_k(unit_at(PRODUCT, plan, g - base), SIZES[0][PRODUCT], SIZES[1][PRODUCT]) * SIZES[2]
        if made is not None:
            if not all_made:
                all_made = wait_for_flags(made, FLAGS, k, k + SIZES[2], epoch, 1)
        place = g % PLACES
        mbarrier.wait(rows_read.index(place), (g // PLACES & 1) ^ 1)
        bar = rows_here.index(place)
        mbarrier.expect(bar, NBYTES[1])
        tma.async_copy_global_to_shared(rows[0], [k, 0, 0], bar, x_smem.index(place))
        tma.async_copy_global_to_shared(rows[1], [k, 0], bar, scales_smem.index(place))


@gluon.jit
def feed_rows(
    plan, rows, made, own, ring, H: gl.constexpr, I: gl.constexpr, NBYTES: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """The rows that go with them. rows: descriptors of a `Paired`'s codes and scales, of the first product, of the second
    and the last, and of the third; made: flags of the last three."""
    wait_for_kernels()
    _feed_product(0, plan, rows[0], None, 0, 0, ring, NBYTES, SIZES)
    epoch = load_acquire(own) + 1  # only now, as it takes as long as the first rows
    _feed_product(1, plan, rows[1], made[0], H // 128, epoch, ring, NBYTES, SIZES)
    _feed_product(2, plan, rows[2], made[1], I // 128, epoch, ring, NBYTES, SIZES)
    _feed_product(3, plan, rows[1], made[2], H // 128, epoch, ring, NBYTES, SIZES)
