# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
# ruff: noqa: SIM114  (conditions the compiler knows, and ones that it does not)
"""Gate and up of a bridge (see `bridge_kernels`) where a program has whole pairs of their tiles.

A pair is a tile of gate and the one of up for the same 128 columns. Shared out by units, as other products, nearly every
pair has two programs: both write parts to memory, and one of them, with all else waiting, reads them again. So where there
are hardly more pairs than programs (or twice as many, ..), each program has its own, and their results never leave its
registers. The few that are left over are *shared*: cut into parts of some units, one to a program, which are its first. The
last programs, which have no such part, add them up: after their own first tile, when all have long been there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pocketllm.kernels.triton.bridge import ADDED_ROWS
from pocketllm.kernels.triton.bridge_sums import columns_without_sums, gate_times_up, silu_times
from pocketllm.kernels.triton.bridge_units import add_unit, keep_factors, store_tile, whole
from pocketllm.kernels.triton.gluon_pieces import arrive, is_last, publish, raise_flag, store_pairs, wait_for_count

_ADDED_ROWS = gl.constexpr(ADDED_ROWS)


@gluon.jit
def run_of_pairs(program, OWN: gl.constexpr, UNITS_K: gl.constexpr):
    """A program's run of units: (its first, how many are of shared pairs, by how much those of its own pairs lie further on,
    how many in all). Shared pairs are the first ones.

    OWN: (pairs of a program, shared pairs, units of a part of those; UNITS_K is a multiple of it).
    """
    UNITS: gl.constexpr = OWN[1] * 2 * UNITS_K  # of shared pairs
    own: gl.constexpr = OWN[0] * 2 * UNITS_K
    first = min(OWN[2] * program, UNITS)
    shared = min(OWN[2], UNITS - first)
    return first, shared, UNITS + program * own - first - shared, shared + own


@gluon.jit
def _store_rows(y, first, codes, scales, group, num_rows, I: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr):
    """y [128, R]: rows `first` and following of a group of 128 columns -> their pairs."""
    layout: gl.constexpr = columns_without_sums(y.shape[1], WARPS)
    row = first + gl.arange(0, y.shape[1], layout=gl.SliceLayout(1, layout))
    y = gl.convert_layout(y.permute((1, 0)), layout)
    store_pairs(codes, scales, y, row, row < num_rows, group, I, PAIRS, layout)


@gluon.jit
def _store_pairs_of(
    gate, up, factors, codes, scales, group, num_rows, I: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Pairs of silu(gate) * up of a group of 128 columns; gate and up [128, ROWS], still to be multiplied by the rows'
    factors."""
    factor = factors.load(gl.SliceLayout(0, gate.type.layout))[None, :]
    y = silu_times(gate * factor, up * factor)
    if ROWS > 32:  # the way through shared memory: there is room for half of them
        first, second = y.reshape([128, 2, ROWS // 2]).permute((0, 2, 1)).split()
        _store_rows(first, 0, codes, scales, group, num_rows, I, 2 * ROWS, WARPS)
        _store_rows(second, ROWS // 2, codes, scales, group, num_rows, I, 2 * ROWS, WARPS)
    else:
        _store_rows(y, 0, codes, scales, group, num_rows, I, 2 * ROWS, WARPS)
    publish()


@gluon.jit
def _add_shared(
    parts, width, vectors, factors, counters, flags, num_rows, epoch,
    I: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """Adds up some rows of a shared pair, if this is one of the last programs: a program for each _ADDED_ROWS rows of each.

    counters: of a pair, parts that have come, in all kernels; then, of a pair, programs that have added up their rows.
    """
    ADDERS: gl.constexpr = ROWS // _ADDED_ROWS
    j = gl.num_programs(0) - 1 - gl.program_id(0)
    if j < OWN[1] * ADDERS:
        group, first = j // ADDERS, j % ADDERS * _ADDED_ROWS
        wait_for_count(counters + group, epoch * (2 * PARTS))
        columns = parts + group * 256
        gate_times_up(group, columns, PARTS, columns + 128, PARTS, width, factors, vectors[0], vectors[1], first,
                      gl.minimum(num_rows, first + _ADDED_ROWS), num_rows, I, PARTS, 2 * ROWS, _ADDED_ROWS,
                      WARPS)  # fmt: skip
        if ADDERS == 1:
            raise_flag(flags + group, epoch)
        elif is_last(counters + OWN[1] + group, ADDERS):
            raise_flag(flags + group, epoch)


@gluon.jit
def multiply_pairs(
    kept, parts, plan, ring, factors, vectors, meetings, num_rows, eps, epoch,
    H: gl.constexpr, I: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr,
    SIZES: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """As `bridge_kernels.multiply` of the second product. parts [PARTS, M, 256 * shared pairs]; OWN: see `run_of_pairs`."""
    K: gl.constexpr = SIZES[0][1]
    GROUPS: gl.constexpr = SIZES[2]
    COUNT: gl.constexpr = OWN[0]
    SHARED: gl.constexpr = OWN[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 2 * ROWS, 32])
    _, firsts, ends, _, _, pieces = plan
    shared, jump = pieces
    inner, squares = vectors[4], vectors[5]
    counters, flags = meetings[0][1], meetings[1]
    nothing = gl.zeros([128, 2 * ROWS], gl.float32, layout)
    width = 256 * OWN[1]
    if SHARED > 0:
        sums = nothing
        for i in range(shared):
            sums = add_unit(sums, nothing, kept, i, ring, ends[0] + i, GROUPS, ROWS)
        if shared > 0:
            tile, part = firsts[1] // K, firsts[1] % K // OWN[2]
            store_tile(sums, None, parts + part * num_rows * width, tile, width, num_rows, ROWS)
            arrive(counters + tile // 2)
    for pair in gl.static_range(COUNT):
        begun = shared + 2 * pair * K
        sums = nothing
        for i in range(begun, begun + K):
            sums = add_unit(sums, nothing, kept, i, ring, ends[0] + i, GROUPS, ROWS)
        gate = whole(sums, ROWS)
        if pair == 0:
            keep_factors(factors, squares, flags[0], num_rows, eps, epoch, H, ROWS, WARPS)
            if SHARED > 0:
                _add_shared(
                    parts, width, inner, factors, counters, flags[1], num_rows, epoch, I, ROWS, WARPS, PARTS, OWN
                )
        sums = nothing
        for i in range(begun + K, begun + 2 * K):
            sums = add_unit(sums, nothing, kept, i, ring, ends[0] + i, GROUPS, ROWS)
        group = (firsts[1] + begun + jump) // (2 * K)
        _store_pairs_of(gate, whole(sums, ROWS), factors, inner[0], inner[1], group, num_rows, I, ROWS, WARPS)
        raise_flag(flags[1] + group, epoch)
