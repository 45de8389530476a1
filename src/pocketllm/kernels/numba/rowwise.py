"""Operations on single rows on a CPU: norms, rotary embedding, gates. Threads join in only where there is enough to do."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pocketllm.kernels.numba.format_simd import keep_alive, load_i64
from pocketllm.kernels.numba.launch import launch
from pocketllm.kernels.numba.runtime import kernel, parallel_for
from pocketllm.kernels.numba.simd import fma, load_f32, splat
from pocketllm.kernels.numba.threads import pool_handle
from pocketllm.kernels.numba.vector_math import load_f32x16_part, sigmoid, silu, store_f32x16_part, sum_lanes
from pocketllm.kernels.reference import add_up
from pocketllm.kernels.types import Readers
from pocketllm.parallel import Summands

_GRAIN = 16384  # elements worth a thread's while


@njit
def _inverse_rms(x, width, eps):
    squares = splat(0.0)
    for i in range(0, width, 16):
        y = load_f32x16_part(x + 4 * i, width - i)
        squares = fma(y, y, squares)
    return np.float32(1) / np.sqrt(sum_lanes(squares) / np.float32(width) + np.float32(eps))


@kernel
def _norm_rows(begin, end, x, x_row, residual, weight, width, eps, out):
    for row in range(begin, end):
        source = x + row * x_row
        if residual != 0:
            total = residual + 4 * row * width
            for i in range(0, width, 16):
                some = width - i
                y = load_f32x16_part(total + 4 * i, some) + load_f32x16_part(source + 4 * i, some)
                store_f32x16_part(total + 4 * i, y, some)
            source = total
        scale = splat(_inverse_rms(source, width, eps))
        for i in range(0, width, 16):
            some = width - i
            y = load_f32x16_part(source + 4 * i, some) * scale * load_f32x16_part(weight + 4 * i, some)
            store_f32x16_part(out + 4 * (row * width + i), y, some)


@kernel
def _norm_kernel(pool, x, x_row, residual, weight, rows, width, eps, out):
    grain = max(1, _GRAIN // width)
    parallel_for(pool, _norm_rows, rows, grain, (x, x_row, residual, weight, width, eps, out))


@kernel
def _rope_tokens(begin, end, x, x_row, norm, eps, cos, sin, positions, heads, dim, half, out):
    """One item: a token, all of its heads."""
    scratch = np.empty(dim, np.float32)
    y = scratch.ctypes.data
    for t in range(begin, end):
        position = load_i64(positions + 8 * t)
        c, s = cos + 4 * position * half, sin + 4 * position * half
        for h in range(heads):
            source, to = x + t * x_row + 4 * h * dim, out + 4 * (t * heads + h) * dim
            scale = splat(_inverse_rms(source, dim, eps) if norm != 0 else np.float32(1))
            for i in range(0, dim, 16):
                some = dim - i
                v = load_f32x16_part(source + 4 * i, some)
                if norm != 0:
                    v = v * scale * load_f32x16_part(norm + 4 * i, some)
                store_f32x16_part(y + 4 * i, v, some)
            for i in range(0, half, 16):
                some = half - i
                a, b = load_f32x16_part(y + 4 * i, some), load_f32x16_part(y + 4 * (half + i), some)
                ci, si = load_f32x16_part(c + 4 * i, some), load_f32x16_part(s + 4 * i, some)
                store_f32x16_part(to + 4 * i, a * ci - b * si, some)
                store_f32x16_part(to + 4 * (half + i), b * ci + a * si, some)
            for i in range(2 * half, dim, 16):
                store_f32x16_part(to + 4 * i, load_f32x16_part(y + 4 * i, dim - i), dim - i)
    keep_alive(scratch)


@kernel
def _rope_kernel(pool, x, x_row, norm, eps, cos, sin, positions, tokens, heads, dim, half, out):
    grain = max(1, _GRAIN // (heads * dim))
    parallel_for(pool, _rope_tokens, tokens, grain, (x, x_row, norm, eps, cos, sin, positions, heads, dim, half, out))


@kernel
def _gate_rows(begin, end, gate, gate_row, gate_width, x, x_row, width, with_silu, out):
    """gate_width: width, or 1 for one gate a row."""
    for row in range(begin, end):
        for i in range(0, width, 16):
            some = width - i
            at = gate + row * gate_row
            g = load_f32x16_part(at + 4 * i, some) if gate_width == width else splat(load_f32(at))
            g = silu(g) if with_silu else sigmoid(g)
            y = g * load_f32x16_part(x + row * x_row + 4 * i, some)
            store_f32x16_part(out + 4 * (row * width + i), y, some)


@kernel
def _gate_kernel(pool, gate, gate_row, gate_width, x, x_row, rows, width, with_silu, out):
    grain = max(1, _GRAIN // 2 // width)
    parallel_for(pool, _gate_rows, rows, grain, (gate, gate_row, gate_width, x, x_row, width, with_silu, out))


def _rows(x: Tensor) -> Tensor:
    """x [M, K] as float32 with contiguous rows, which may be parts of wider ones."""
    return x if x.dtype == torch.float32 and x.stride(-1) == 1 else x.to(torch.float32).contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, width = x.shape
    y = _rows(x)
    out = torch.empty(rows, width)
    launch(
        _norm_kernel,
        pool_handle(),
        y.data_ptr(),
        y.stride(0) * 4,
        0,
        weight.data_ptr(),
        rows,
        width,
        eps,
        out.data_ptr(),
    )
    return out.to(x.dtype)


def add_rms_norm(x: Summands, residual: Tensor, weight: Tensor, eps: float, readers: Readers = ()) -> Tensor:
    return _add_rms_norm(add_up(x, residual.dtype), residual, weight, eps)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype != torch.float32 or residual.dtype != torch.float32 or not residual.is_contiguous():
        residual.add_(x)
        return rms_norm(residual, weight, eps)
    rows, width = x.shape
    y = _rows(x)
    out = torch.empty(rows, width)
    launch(
        _norm_kernel, pool_handle(), y.data_ptr(), y.stride(0) * 4, residual.data_ptr(), weight.data_ptr(), rows, width, eps,
        out.data_ptr(),
    )  # fmt: skip
    return out


def norm_rope(x: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    tokens, heads, dim = x.shape
    y = x if x.dtype == torch.float32 and x.stride(2) == 1 and x.stride(1) == dim else x.to(torch.float32).contiguous()
    out = torch.empty(tokens, heads, dim)
    positions = positions.to(torch.int64).contiguous()
    launch(
        _rope_kernel,
        pool_handle(),
        y.data_ptr(),
        y.stride(0) * 4,
        norm.data_ptr() if norm is not None else 0,
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        positions.data_ptr(),
        tokens,
        heads,
        dim,
        cos.shape[1],
        out.data_ptr(),
    )
    return out.to(x.dtype)


def silu_mul(gate_up: Tensor, readers: Readers = ()) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = _rows(gate_up)
    out = torch.empty(rows, width)
    gate, row_bytes = y.data_ptr(), y.stride(0) * 4
    launch(
        _gate_kernel, pool_handle(), gate, row_bytes, width, gate + 4 * width, row_bytes, rows, width, True,
        out.data_ptr(),
    )  # fmt: skip
    return out.to(gate_up.dtype)


def sigmoid_mul(x: Tensor, gate: Tensor, readers: Readers = ()) -> Tensor:
    rows, width = x.shape
    y, g = _rows(x), _rows(gate.flatten(1))
    out = torch.empty(rows, width)
    launch(
        _gate_kernel, pool_handle(), g.data_ptr(), g.stride(0) * 4, g.shape[1], y.data_ptr(), y.stride(0) * 4, rows,
        width, False, out.data_ptr(),
    )  # fmt: skip
    return out.to(x.dtype)
