# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# ruff: noqa: SIM108
"""Where a token stands in the planes, and the kernels that work on single rows: append, dequantize, rotate.

EARLY: see `linear_tuning`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pocketllm.kernels.triton.linear_kernels import wait_for_inputs
from pocketllm.kernels.triton.numerics import hadamard


@triton.jit
def storage_row(block_table, max_pages, slot, position, PAGE: tl.constexpr):
    """Row (int64) of a token in the planes seen as [(num_pages + 1) * page_size, Hk, width]."""
    page = tl.load(block_table + slot * max_pages + position // PAGE)
    return page.to(tl.int64) * PAGE + position % PAGE


@triton.jit
def tile_rows(block_table, max_pages, slot, start, kv_len, N: tl.constexpr, PAGE: tl.constexpr):
    """Rows [N] of tokens start .. start + N - 1 of a slot, which share a page: N divides PAGE, start is a multiple of N.

    Past the slot's last token they repeat its row: what is read there is masked later, and must be a number.
    """
    return storage_row(block_table, max_pages, slot, start, PAGE) + tl.minimum(tl.arange(0, N), kv_len - 1 - start)


@triton.jit
def load_plane(plane, rows, D: tl.constexpr, DP: tl.constexpr):
    """Elements [N, DP] of rows [N] of a plane of width D; zeros from D on."""
    d = tl.arange(0, DP)
    at = plane + rows[:, None] * D + d[None, :]
    if D < DP:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def append_kernel(
    k, v, k_stride, v_stride, planes, block_table, max_pages, token_slots, positions, signs,
    HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, ROTATED: tl.constexpr,
    STORE_ROW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per token and KV head."""
    wait_for_inputs(EARLY, 1)
    token, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, DP)
    key = tl.load(k + token.to(tl.int64) * k_stride + head * D + d, mask=d < D, other=0.0).to(tl.float32)
    value = tl.load(v + token.to(tl.int64) * v_stride + head * D + d, mask=d < D, other=0.0).to(tl.float32)
    if ROTATED:
        sign = tl.load(signs + d, mask=d < D, other=0.0)
        key = hadamard(key * sign, D, DP)
        value = hadamard(value * sign, D, DP)
    slot, position = tl.load(token_slots + token), tl.load(positions + token).to(tl.int32)
    row = storage_row(block_table, max_pages, slot, position, PAGE)
    STORE_ROW(planes, row * HK + head, key, value, D, DP)


@triton.jit
def rotate_kernel(x, out, signs, D: tl.constexpr, DP: tl.constexpr, BACK: tl.constexpr, EARLY: tl.constexpr):
    """x [R, D] -> out [R, D], each row rotated (or rotated back). One program per row; x may be `out`."""
    wait_for_inputs(EARLY, 1)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)
    y = tl.load(x + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    sign = tl.load(signs + d, mask=d < D, other=0.0)
    if BACK:
        y = hadamard(y, D, DP) * sign
    else:
        y = hadamard(y * sign, D, DP)
    tl.store(out + row * D + d, y.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def dequantize_kernel(
    k_out, v_out, planes, block_table, max_pages, slot, signs, bias, cos, sin,
    HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, ROTATED: tl.constexpr,
    HALF: tl.constexpr, SCALED: tl.constexpr, LOAD_K: tl.constexpr, LOAD_V: tl.constexpr,
):  # fmt: skip
    """One program per token and KV head. HALF is half the rotated dims of a key bias, or 0 for none."""
    position, head = tl.program_id(0), tl.program_id(1)
    rows = storage_row(block_table, max_pages, slot, position, PAGE) * HK + head + tl.arange(0, 1)
    d = tl.arange(0, DP)
    key, k_scale = LOAD_K(planes, rows, D, DP)
    value, v_scale = LOAD_V(planes, rows, D, DP)
    key, value = key.to(tl.float32), value.to(tl.float32)
    if SCALED:
        key, value = key * k_scale[:, None], value * v_scale[:, None]
    key, value = tl.reshape(key, [DP]), tl.reshape(value, [DP])
    if ROTATED:
        sign = tl.load(signs + d, mask=d < D, other=0.0)
        key, value = hadamard(key, D, DP) * sign, hadamard(value, D, DP) * sign
    if HALF > 0:
        turns = d < 2 * HALF
        pair = tl.where(d < HALF, d + HALF, d - HALF)
        own = tl.load(bias + head * D + d, mask=d < D, other=0.0)
        other = tl.load(bias + head * D + pair, mask=turns, other=0.0)
        c = tl.load(cos + position * HALF + d % HALF, mask=turns, other=1.0)
        s = tl.load(sin + position * HALF + d % HALF, mask=turns, other=0.0)
        key += own * c + tl.where(d < HALF, -other, other) * s
    at = (position.to(tl.int64) * HK + head) * D + d
    tl.store(k_out + at, key, mask=d < D)
    tl.store(v_out + at, value, mask=d < D)
