# ruff: noqa: RUF005  (Triton knows no starred tuples)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment, misc"
"""Merging the splits of decode and verify on Hopper: what `attend_kernels.merge_kernel` does, by several warps a row.

A row's splits are dealt to LANES lanes in turn. A lane adds up its own in order; then the lanes are added in order, and what
was rotated is rotated back. How many warps share the lanes, and how many splits are asked for at once, changes no bit, so
that is chosen by the number of rows: few of them leave time for nothing but waiting.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pocketllm.kernels.triton.attend_splits import num_splits
from pocketllm.kernels.triton.gluon_pieces import launch_dependents, powers, wait_for_kernels
from pocketllm.kernels.triton.hopper_rotation import hadamard_of_a_row

LANES = gl.constexpr(8)
_SUMS = gl.constexpr(128)  # splits whose sums are read at once


@gluon.constexpr_function
def _parts_layout(D, WARPS):
    """[LANES, D]: a warp has whole lanes, its threads D / 32 neighbours of each."""
    lanes, spread = powers(1, LANES.value), len(powers(1, WARPS))
    return gl.DistributedLinearLayout(
        [[0, d] for d in powers(1, D // 32)] + [[lane, 0] for lane in lanes[spread:]],
        [[0, d] for d in powers(D // 32, D)], [[lane, 0] for lane in lanes[:spread]], [], [LANES.value, D],
    )  # fmt: skip


@gluon.constexpr_function
def _columns_layout(D, WARPS):
    """[LANES, D]: a thread has all lanes of a dim; a warp has 32 neighbours, or several times those."""
    dims, spread = powers(32, D), len(powers(1, WARPS))
    return gl.DistributedLinearLayout(
        [[lane, 0] for lane in powers(1, LANES.value)] + [[0, d] for d in dims[spread:]],
        [[0, d] for d in powers(1, 32)], [[0, d] for d in (dims + [0] * spread)[:spread]], [], [LANES.value, D],
    )  # fmt: skip


@gluon.constexpr_function
def _whole_layout(D, WARPS):
    """[1, D]: each warp has all of it, a thread what is a multiple of 32 apart."""
    return gl.DistributedLinearLayout(
        [[0, d] for d in powers(32, D)], [[0, d] for d in powers(1, 32)], [[0, 0]] * len(powers(1, WARPS)), [], [1, D]
    )


@gluon.constexpr_function
def _sums_layout(WARPS):
    """[_SUMS]: each warp has all."""
    lanes = [[i] for i in powers(1, 32)]
    return gl.DistributedLinearLayout([[32], [64]], lanes, [[0]] * len(powers(1, WARPS)), [], [_SUMS.value])


@gluon.jit
def _load_sums(part_sums, part, start, count, WARPS: gl.constexpr):
    """Of splits start .. start + _SUMS - 1: the largest score and the sum of weights [_SUMS]."""
    split = start + gl.arange(0, _SUMS, layout=_sums_layout(WARPS))
    at, exists = part_sums + (part + split) * 2, split < count
    return gl.load(at, mask=exists, other=float("-inf")), gl.load(at + 1, mask=exists, other=0.0)


@gluon.jit
def _load_parts(part_out, part_sums, part, start, count, D: gl.constexpr, WARPS: gl.constexpr, ROUNDS: gl.constexpr):
    """Of splits start .. start + ROUNDS * LANES - 1: for each round, the values [LANES, D] and largest scores [LANES]."""
    layout: gl.constexpr = _parts_layout(D, WARPS)
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    parts = ()
    for i in gl.static_range(ROUNDS):
        split = start + i * LANES + lane
        exists = split < count
        largest = gl.load(part_sums + (part + split) * 2, mask=exists, other=float("-inf"))
        at = part_out + ((part + split) * D)[:, None] + d[None, :]
        parts = parts + ((gl.load(at, mask=exists[:, None], other=0.0), largest),)
    return parts


@gluon.jit(do_not_specialize=["max_splits"], do_not_specialize_on_alignment=["kv_lens"])
def hopper_merge_kernel(
    part_out, part_sums, kv_lens, signs, out, max_splits,
    ROWS: gl.constexpr, D: gl.constexpr, SPLITS: gl.constexpr, WARPS: gl.constexpr, ROUNDS: gl.constexpr,
    AHEAD: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One program per row of out [n * ROWS, D], ROWS = Q * HQ: part_out [n * ROWS, max_splits, D], part_sums [n * ROWS,
    max_splits, 2] float32. D is a power of two from 64 on.

    signs [D] float32 or None: the rotation to take back. WARPS: 1 to LANES. AHEAD: times ROUNDS * LANES splits are on their
    way at once. Splits in which the row sees nothing change no bit: a verified row may have more of them than decoded.
    """
    layout: gl.constexpr = _parts_layout(D, WARPS)
    columns: gl.constexpr = _columns_layout(D, WARPS)
    STEP: gl.constexpr = ROUNDS * LANES
    room = gl.allocate_shared_memory(gl.float32, [LANES, D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    row = gl.program_id(0)
    # The kernel before lets this one start once all before it have ended; that one does not write lengths.
    count = num_splits(gl.load(kv_lens + row // ROWS).to(gl.int32), SPLITS)
    whole: gl.constexpr = _whole_layout(D, WARPS)
    if signs is not None:
        sign = gl.load(signs + gl.arange(0, D, layout=gl.SliceLayout(0, whole)))[None, :]
    if EARLY > 0:
        wait_for_kernels()
        launch_dependents()
    part = row.to(gl.int64) * max_splits
    first_largest, first_totals = _load_sums(part_sums, part, 0, count, WARPS)
    ahead = ()
    for i in gl.static_range(AHEAD):
        ahead = ahead + (_load_parts(part_out, part_sums, part, i * STEP, count, D, WARPS, ROUNDS),)
    largest = gl.max(first_largest, axis=0)
    for start in range(_SUMS, count, _SUMS):
        largest = gl.maximum(largest, gl.max(_load_sums(part_sums, part, start, count, WARPS)[0], axis=0))
    reference = gl.where(largest == float("-inf"), 0.0, largest)
    total = gl.sum(gl.exp2(first_largest - reference) * first_totals, axis=0)
    for start in range(_SUMS, count, _SUMS):
        next_largest, next_totals = _load_sums(part_sums, part, start, count, WARPS)
        total += gl.sum(gl.exp2(next_largest - reference) * next_totals, axis=0)
    values = gl.zeros([LANES, D], gl.float32, layout)
    for start in range(0, count, STEP):
        for i in gl.static_range(ROUNDS):
            weight = gl.exp2(ahead[0][i][1] - reference)
            values = gl.fma(ahead[0][i][0].to(gl.float32), gl.broadcast(weight[:, None], values)[0], values)
        later = ()
        for i in gl.static_range(1, AHEAD):
            later = later + (ahead[i],)
        ahead = later + (_load_parts(part_out, part_sums, part, start + AHEAD * STEP, count, D, WARPS, ROUNDS),)
    room.store(values)
    gl.thread_barrier()
    merged = gl.sum(room.load(columns), axis=0)
    merged = merged * (SPLITS[2] / gl.where(total > 0.0, total, 1.0))
    at = out + row.to(gl.int64) * D
    if signs is not None:
        merged = hadamard_of_a_row(gl.expand_dims(merged, 0), whole) * sign
        d = gl.arange(0, D, layout=gl.SliceLayout(0, whole))[None, :]
        gl.store(at + d, merged.to(out.dtype.element_ty))
    else:
        d = gl.arange(0, D, layout=gl.SliceLayout(0, columns))
        gl.store(at + d, merged.to(out.dtype.element_ty))
