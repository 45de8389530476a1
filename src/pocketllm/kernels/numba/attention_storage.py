"""Writing K and V to their rows, and reading them back whole: the kernels of `append` and `dequantize`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from torch import Tensor

from pocketllm.kernels.numba.format_pieces import (
    MAX_TILE,
    encode_row,
    head_dim,
    is_rotated,
    k_scale,
    load_k,
    load_v,
    row_at,
    v_scale,
)
from pocketllm.kernels.numba.format_simd import keep_alive, load_i32, load_i64
from pocketllm.kernels.numba.runtime import kernel, parallel_for
from pocketllm.kernels.numba.simd import load_f32, load_f32x16, splat, store_f32, store_f32x16
from pocketllm.kernels.numba.vector_math import hadamard

_GRAIN = 8192  # elements of K and of V worth a thread's while


@njit
def rotate(core, x, signs):
    """x [D] -> R x in place, as `cache.formats.rotation.rotate`."""
    dim = head_dim(core)
    for i in range(0, dim, 16):
        store_f32x16(x + 4 * i, load_f32x16(x + 4 * i) * load_f32x16(signs + 4 * i))
    block = dim & -dim
    hadamard(x, dim, block, np.float32(block**-0.5))


@njit
def rotate_back(core, x, signs):
    """x [D] -> R^T x in place."""
    dim = head_dim(core)
    block = dim & -dim
    hadamard(x, dim, block, np.float32(block**-0.5))
    for i in range(0, dim, 16):
        store_f32x16(x + 4 * i, load_f32x16(x + 4 * i) * load_f32x16(signs + 4 * i))


def angle_columns(cos: Tensor, sin: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """cos, sin [P, R / 2] -> [positions / 16, R, 16] with zeros beyond P: cosines, then sines, 16 positions as lanes.

    The order in which attention to keys without their bias reads them; as large as the tables themselves. In NumPy, so
    that a recorded pass (`launch.capture`) does not make it again.
    """
    rows = np.concatenate((cos.numpy(), sin.numpy()), axis=1)
    groups = -(-len(rows) // MAX_TILE) * (MAX_TILE // 16)
    padded = np.zeros((groups * 16, rows.shape[1]), np.float32)
    padded[: len(rows)] = rows
    return np.ascontiguousarray(padded.reshape(groups, 16, -1).transpose(0, 2, 1))


@njit
def _row_number(cache, slot, position, head):
    """Row of (slot, position, KV head) in planes seen as [(num_pages + 1) * page_size * kv_heads, width]."""
    _, table, max_pages, page_shift, kv_heads = cache
    page = load_i32(table + 4 * (slot * max_pages + (position >> page_shift)))
    return ((page << page_shift) + (position & ((1 << page_shift) - 1))) * kv_heads + head


@kernel
def _append_items(begin, end, core, cache, k, v, token_slots, positions, signs):
    """One item: a token. k, v: (address, bytes from one token to the next)."""
    dim, kv_heads = head_dim(core), cache[4]
    scratch = np.empty(2 * dim + 32, np.float32)  # encoders may read a vector beyond the end
    k_row = scratch.ctypes.data
    v_row = k_row + 4 * (dim + 16)
    for t in range(begin, end):
        slot, position = load_i32(token_slots + 4 * t), load_i64(positions + 8 * t)
        for head in range(kv_heads):
            for i in range(0, dim, 16):
                store_f32x16(k_row + 4 * i, load_f32x16(k[0] + t * k[1] + 4 * (head * dim + i)))
                store_f32x16(v_row + 4 * i, load_f32x16(v[0] + t * v[1] + 4 * (head * dim + i)))
            if is_rotated(core):
                rotate(core, k_row, signs)
                rotate(core, v_row, signs)
            encode_row(core, k_row, v_row, row_at(core, cache[0], _row_number(cache, slot, position, head)))
    keep_alive(scratch)


@kernel
def append_kernel(pool, core, cache, k, v, token_slots, positions, count, signs):
    grain = max(1, _GRAIN // (cache[4] * head_dim(core)))
    parallel_for(pool, _append_items, count, grain, (core, cache, k, v, token_slots, positions, signs))


@kernel
def _dequantize_items(begin, end, core, cache, bias, slot, k, v, signs):
    """One item: a token. k, v: addresses of the outputs [kv_len, Hk, D]."""
    dim, kv_heads = head_dim(core), cache[4]
    _, angles, half = bias
    for t in range(begin, end):
        for head in range(kv_heads):
            row = row_at(core, cache[0], _row_number(cache, slot, t, head))
            to = 4 * (t * kv_heads + head) * dim
            by_k, by_v = splat(k_scale(core, row)), splat(v_scale(core, row))
            for i in range(0, dim, 16):
                store_f32x16(k + to + 4 * i, load_k(core, row, i) * by_k)
                store_f32x16(v + to + 4 * i, load_v(core, row, i) * by_v)
            if is_rotated(core):
                rotate_back(core, k + to, signs)
                rotate_back(core, v + to, signs)
            if bias[0] != 0:
                b = bias[0] + 4 * head * dim
                for i in range(half):
                    at = angles + 4 * ((t // 16 * 2 * half + i) * 16 + t % 16)
                    c, s = load_f32(at), load_f32(at + 64 * half)
                    b0, b1 = load_f32(b + 4 * i), load_f32(b + 4 * (i + half))
                    first, second = k + to + 4 * i, k + to + 4 * (i + half)
                    store_f32(first, load_f32(first) + (b0 * c - b1 * s))
                    store_f32(second, load_f32(second) + (b1 * c + b0 * s))
                for i in range(2 * half, dim):
                    store_f32(k + to + 4 * i, load_f32(k + to + 4 * i) + load_f32(b + 4 * i))


@kernel
def dequantize_kernel(pool, core, cache, bias, slot, kv_len, k, v, signs):
    grain = max(1, _GRAIN // (cache[4] * head_dim(core)))
    parallel_for(pool, _dequantize_items, kv_len, grain, (core, cache, bias, slot, k, v, signs))
