# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment, misc"
# ruff: noqa: RUF005  (Triton knows no starred tuples)
"""Products of stored weights: out = x W^T + bias, optionally silu(gate) * up of a stack gate | up.

Everything is transposed: weights [BLOCK_N, BLOCK_K] are the left operand, which the tensor cores read from registers,
where they have just been decoded; rows of x are the right one, which may be as few as 8 columns wide.

Why a row's sum does not depend on the other rows, bit for bit, at up to 64 of them: a batch is cut into blocks of 8 rows,
and each meets a weight tile in a product of its own: warp-wide instructions of 16 outputs x 8 rows x 16. More rows only
repeat them on other columns of the right operand, which they never mix; and the order of the sum over K comes from BLOCK_K
and the splits, which a weight's shape decides. (Hopper's instructions of 64 outputs sum in another order: all numbers of
rows would have to use them, and they are slower where rows are few.)

With more rows, programs take more outputs: each reads all of x, and x for 64 rows is as large as a tile of 128 outputs in
8 bits. A warp with 32 outputs or more uses what it reads of x from shared memory at least twice.

Rows beyond the last count as zero, and are not read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pocketllm.kernels.triton.linear_pieces import part_columns
from pocketllm.kernels.triton.numerics import dot


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr, WHEN: tl.constexpr):
    """With EARLY > 0 a kernel starts while the one before still runs: what kernels write must not be touched before this.

    Where EARLY >= WHEN, the kernel after this one may start as soon as all programs of this one have come here.
    """
    if EARLY > 0:
        gdc_wait()
    if EARLY >= WHEN:
        gdc_launch_dependents()


@triton.jit
def silu_times(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def add_tile(
    sums, x, x_rows, x_inside, planes, rows, k, K, scale,
    PARTS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr,
    LOAD: tl.constexpr,
):  # fmt: skip
    """Adds columns k .. k + BLOCK_K - 1 of weight rows `rows` to the sums [N, ROWS] of each block of x rows.

    scale: [N] float32, or one number.
    """
    tiles = LOAD(planes, rows, k, K, BLOCK_K, DTYPE, EVEN_K)
    added = ()
    for b in tl.static_range(len(x_rows)):
        total = tl.zeros_like(sums[b]) if SCALED else sums[b]
        for part in tl.static_range(PARTS):
            column = k + part_columns(BLOCK_K, PARTS, part)
            at = x + x_rows[b][None, :] + column[:, None]
            if x_inside is not None:  # rows that are not there cost no reads
                if EVEN_K:
                    x_tile = tl.load(at, mask=x_inside[b][None, :], other=0.0)
                else:
                    x_tile = tl.load(at, mask=(column < K)[:, None] & x_inside[b][None, :], other=0.0)
            elif EVEN_K:
                x_tile = tl.load(at)
            else:
                x_tile = tl.load(at, mask=(column < K)[:, None], other=0.0)
            total = dot(tiles[part], x_tile, total)
        if SCALED:
            total = sums[b] + total * (scale if len(scale.shape) == 0 else scale[:, None])
        added = added + (total,)
    return added


@triton.jit
def multiply(
    x, x_rows, planes, w_rows, first, last, K,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PARTS: tl.constexpr,
    DTYPE: tl.constexpr, LOAD: tl.constexpr, SCALE: tl.constexpr, x_inside=None, scale_rows=None,
):  # fmt: skip
    """Sums over tiles first .. last - 1 along K. For each of `w_rows` (weight rows [BLOCK_N] int64) a tuple, with for each
    of `x_rows` (offsets [ROWS] int64 of rows of x) a tile [BLOCK_N, ROWS] float32.

    x_inside: for each of `x_rows` which to read, [ROWS] bool, the others counting as zero; None: all. scale_rows: for
    each of `w_rows` a row that has the scale of all of them; None: their scales may differ.
    """
    SCALED: tl.constexpr = SCALE is not None
    own_rows = w_rows if scale_rows is None else scale_rows
    nothing, all_sums, scales = (), (), ()
    for _b in tl.static_range(len(x_rows)):
        nothing = nothing + (tl.zeros([BLOCK_N, ROWS], tl.float32),)
    for half in tl.static_range(len(w_rows)):
        all_sums = all_sums + (nothing,)
        scales = scales + ((SCALE(planes, own_rows[half], first, K, DTYPE) if SCALED else 1.0),)
    for tile in range(first, last):
        stepped, next_scales = (), ()
        for half in tl.static_range(len(w_rows)):
            following = 1.0
            if SCALED:  # asked for one tile ahead, as nothing else would hide its latency
                following = SCALE(planes, own_rows[half], tl.minimum(tile + 1, last - 1), K, DTYPE)
            next_scales = next_scales + (following,)
            added = add_tile(
                all_sums[half], x, x_rows, x_inside, planes, w_rows[half], tile * BLOCK_K, K, scales[half],
                PARTS, BLOCK_K, EVEN_K, SCALED, DTYPE, LOAD,
            )  # fmt: skip
            stepped = stepped + (added,)
        all_sums, scales = stepped, next_scales
    return all_sums


@triton.jit
def weight_rows(n, outputs, HALVES: tl.constexpr):
    """Rows [BLOCK_N] int64 of the weight that outputs n come from: of the matrix, or of gate and up. Those past the last
    repeat it."""
    rows = ()
    for half in tl.static_range(HALVES):
        rows = rows + (tl.minimum(n, outputs - 1).to(tl.int64) + half * outputs,)
    return rows


@triton.jit(do_not_specialize=["num_rows"])  # else a batch of one row, and one of 16, would be compiled apart
def product_kernel(
    x, planes, bias, out, num_rows, N, K,
    PARTIAL: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, LOAD: tl.constexpr,
    SCALE: tl.constexpr, ONE_SCALE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x [num_rows, K] in DTYPE -> out [num_rows, N], or [num_rows, N / 2] if GATED.

    ONE_SCALE: the weight rows of a tile have the same scale. It is then read as one number: a scale for each row would be
    passed around among the threads at every step, and cost registers.
    Programs: (BLOCKS blocks of ROWS rows, tiles of BLOCK_N outputs, splits of K). If PARTIAL (never GATED), out is
    [splits, num_rows, N] float32: sums over each split's share of the tiles along K, for `sum_splits_kernel`.
    """
    HALVES: tl.constexpr = 2 if GATED else 1
    split, splits = tl.program_id(2), tl.num_programs(2)
    outputs = N // HALVES
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = weight_rows(n, outputs, HALVES)
    scale_rows = weight_rows(tl.program_id(1) * BLOCK_N, outputs, HALVES) if ONE_SCALE else None
    tiles = tl.cdiv(K, BLOCK_K)
    first, last = tiles * split // splits, tiles * (split + 1) // splits
    wait_for_inputs(EARLY, 2)
    m, x_rows, x_inside = (), (), ()
    for b in tl.static_range(BLOCKS):
        row = (tl.program_id(0) * BLOCKS + b) * ROWS + tl.arange(0, ROWS)
        m = m + (row,)
        x_rows = x_rows + (tl.minimum(row, num_rows - 1).to(tl.int64) * K,)
        x_inside = x_inside + (row < num_rows,)
    sums = multiply(
        x, x_rows, planes, w_rows, first, last, K, BLOCK_N, ROWS, BLOCK_K, EVEN_K, PARTS, DTYPE, LOAD, SCALE,
        x_inside, scale_rows,
    )  # fmt: skip
    if EARLY == 1:
        gdc_launch_dependents()
    for b in tl.static_range(BLOCKS):
        result = sums[0][b]
        at = out + (m[b].to(tl.int64) * outputs)[None, :] + n[:, None]
        if PARTIAL:
            at += split.to(tl.int64) * num_rows * outputs
        else:
            if bias is not None:
                result += tl.load(bias + n, mask=n < outputs, other=0.0)[:, None]
            if GATED:
                up = sums[1][b]
                if bias is not None:
                    up += tl.load(bias + outputs + n, mask=n < outputs, other=0.0)[:, None]
                result = silu_times(result, up)
        tl.store(at, result.to(out.dtype.element_ty), mask=(n < outputs)[:, None] & (m[b] < num_rows)[None, :])


@triton.jit
def sum_of_splits(at, stride, mask, SPLITS: tl.constexpr):
    """The elements at pointers `at` [..] of the first split and those of the others, each `stride` further, in order."""
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * stride, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def sum_splits_kernel(
    part, bias, out, num_rows, N, SPLITS: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """part [SPLITS, num_rows, N] -> their sum in order, with bias, and if GATED silu(first half) * second half, in out.

    One program per BLOCK outputs of a row.
    """
    HALVES: tl.constexpr = 2 if GATED else 1
    row, outputs = tl.program_id(1).to(tl.int64), N // HALVES
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = n < outputs
    wait_for_inputs(EARLY, 1)
    totals = ()
    for half in tl.static_range(HALVES):
        at = part + row * N + half * outputs + n
        total = sum_of_splits(at, num_rows.to(tl.int64) * N, mask, SPLITS)
        if bias is not None:
            total += tl.load(bias + half * outputs + n, mask=mask, other=0.0)
        totals = totals + (total,)
    result = totals[0]
    if GATED:
        result = silu_times(totals[0], totals[1])
    tl.store(out + row * outputs + n, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def embedding_kernel(
    token_ids, planes, out, K, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, LOAD: tl.constexpr, SCALE: tl.constexpr
):
    """Rows token_ids [T] of a stored matrix -> out [T, K]. Programs: (tokens, tiles of BLOCK_K columns)."""
    token, tile = tl.program_id(0), tl.program_id(1)
    rows = tl.load(token_ids + token).to(tl.int64) + tl.arange(0, 1)
    parts = LOAD(planes, rows, tile * BLOCK_K, K, BLOCK_K, tl.float32, False)
    for part in tl.static_range(PARTS):
        values = parts[part]
        if SCALE is not None:
            values = values * SCALE(planes, rows, tile, K, tl.float32)[:, None]
        column = tile * BLOCK_K + part_columns(BLOCK_K, PARTS, part)
        at = out + token.to(tl.int64) * K + column[None, :]
        tl.store(at, values.to(out.dtype.element_ty), mask=(column < K)[None, :])
