# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment, misc"
# ruff: noqa: RUF005, SIM108  (Triton knows no starred tuples)
"""Products of stored weights: out = x W^T + bias, optionally silu(gate) * up of a stack gate | up.

Everything is transposed: weights [BLOCK_N, BLOCK_K] are the left operand, which the tensor cores read from registers,
where they have just been decoded; rows of x are the right one, which may be as few as 8 columns wide.

Why a row's sum does not depend on the other rows, bit for bit, at up to 64 of them: a batch is cut into blocks of 8 rows
(the last one repeats the last row), and each block meets a weight tile in a product of its own, of one shape whatever
the number of blocks. Such a product is made of warp-wide instructions that take 8 rows each and never mix them; the order
of the sum over K comes from BLOCK_K and the splits, which a weight's shape decides. More rows only repeat the same
instructions on other columns.
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
def prefetch(plane, rows, first, width, LINES: tl.constexpr):
    """Asks L2 for the first LINES lines of 128 bytes of each row's share: weights need not wait for the kernel before."""
    size = plane.dtype.element_ty.primitive_bitwidth // 8
    offset = first.to(tl.int64) * size + tl.arange(0, LINES) * 128
    inside = tl.minimum(offset, width.to(tl.int64) * size - 1)
    at = plane.to(tl.pointer_type(tl.int8)) + rows[:, None] * (width * size) + inside[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def silu_times(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def add_tile(
    sums, x, x_rows, planes, rows, k, K, scale,
    PARTS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr,
    LOAD: tl.constexpr,
):  # fmt: skip
    """Adds columns k .. k + BLOCK_K - 1 of weight rows `rows` to the sums [N, ROWS] of each block of x rows."""
    tiles = LOAD(planes, rows, k, K, BLOCK_K, DTYPE, EVEN_K)
    added = ()
    for b in tl.static_range(len(x_rows)):
        total = tl.zeros_like(sums[b]) if SCALED else sums[b]
        for part in tl.static_range(PARTS):
            column = k + part_columns(BLOCK_K, PARTS, part)
            at = x + x_rows[b][None, :] + column[:, None]
            if EVEN_K:
                x_tile = tl.load(at)
            else:
                x_tile = tl.load(at, mask=(column < K)[:, None], other=0.0)
            total = dot(tiles[part], x_tile, total)
        if SCALED:
            total = sums[b] + total * scale[:, None]
        added = added + (total,)
    return added


@triton.jit
def multiply(
    x, x_rows, planes, w_rows, first, last, K,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PARTS: tl.constexpr,
    DTYPE: tl.constexpr, LOAD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Sums over tiles first .. last - 1 along K. For each of `w_rows` (weight rows [BLOCK_N] int64) a tuple, with for each
    of `x_rows` (offsets [ROWS] int64 of rows of x) a tile [BLOCK_N, ROWS] float32."""
    SCALED: tl.constexpr = SCALE is not None
    nothing, all_sums, scales = (), (), ()
    for _b in tl.static_range(len(x_rows)):
        nothing = nothing + (tl.zeros([BLOCK_N, ROWS], tl.float32),)
    for half in tl.static_range(len(w_rows)):
        all_sums = all_sums + (nothing,)
        scales = scales + ((SCALE(planes, w_rows[half], first, K, DTYPE) if SCALED else 1.0),)
    for tile in range(first, last):
        stepped, next_scales = (), ()
        for half in tl.static_range(len(w_rows)):
            following = 1.0
            if SCALED:  # asked for one tile ahead, as nothing else would hide its latency
                following = SCALE(planes, w_rows[half], tl.minimum(tile + 1, last - 1), K, DTYPE)
            next_scales = next_scales + (following,)
            added = add_tile(
                all_sums[half], x, x_rows, planes, w_rows[half], tile * BLOCK_K, K, scales[half],
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
    SCALE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x [num_rows, K] in DTYPE -> out [num_rows, N], or [num_rows, N / 2] if GATED.

    Programs: (BLOCKS blocks of ROWS rows, tiles of BLOCK_N outputs, splits of K). If PARTIAL (never GATED), out is
    [splits, num_rows, N] float32: sums over each split's share of the tiles along K, for `merge_kernel`.
    """
    HALVES: tl.constexpr = 2 if GATED else 1
    split, splits = tl.program_id(2), tl.num_programs(2)
    outputs = N // HALVES
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = weight_rows(n, outputs, HALVES)
    tiles = tl.cdiv(K, BLOCK_K)
    first, last = tiles * split // splits, tiles * (split + 1) // splits
    if EARLY > 0:
        for half in tl.static_range(HALVES):
            prefetch(planes[0], w_rows[half], first * (BLOCK_K // PARTS), K // PARTS, 4)
    wait_for_inputs(EARLY, 2)
    m, x_rows = (), ()
    for b in tl.static_range(BLOCKS):
        row = (tl.program_id(0) * BLOCKS + b) * ROWS + tl.arange(0, ROWS)
        m = m + (row,)
        x_rows = x_rows + (tl.minimum(row, num_rows - 1).to(tl.int64) * K,)
    sums = multiply(
        x, x_rows, planes, w_rows, first, last, K, BLOCK_N, ROWS, BLOCK_K, EVEN_K, PARTS, DTYPE, LOAD, SCALE
    )
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


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(
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
        total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        for split in tl.static_range(1, SPLITS):
            total += tl.load(at + split * num_rows.to(tl.int64) * N, mask=mask, other=0.0).to(tl.float32)
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
