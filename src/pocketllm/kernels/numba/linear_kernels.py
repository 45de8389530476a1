"""A matrix product on all threads: rows of x are prepared once, then each thread takes blocks of 32 outputs.

A block of weights is multiplied with tiles of up to 8 rows: the first tile streams it from memory, further ones find
it in the L2 cache. A last tile of 1 to 7 rows runs as one of 1, 2, 4 or 8 rows; rows beyond x are copies of the tile's
first and are not stored.

Tried and dropped (2 cores of a Zen 5 EPYC, shared with other work, 2026-11-29): cutting K so that a tile's x stays in
the L1 cache was about twice as slow for 8 rows at 4096 x 4096 (perhaps because each cut ends the stream of weights that
the prefetcher follows; not tested). Preparing x by rows instead of steps let two threads write the same cache lines:
the product of 8 rows with 896 x 4864 took 330 us, 220 us without it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from pocketllm.kernels.numba.format_simd import keep_alive
from pocketllm.kernels.numba.linear_simd import tile_store
from pocketllm.kernels.numba.linear_tiles import COLUMNS, Scheme, multiply, prepare
from pocketllm.kernels.numba.runtime import kernel, parallel_for
from pocketllm.kernels.numba.simd import load_f32x16, store_f32x16, tile_zeros
from pocketllm.kernels.numba.vector_math import silu

TILE_ROWS = 8
_GROUP_ROWS = 256  # rows that go through all blocks of a thread before the next: their x must stay in the L3 cache
_PREPARE_GRAIN = 8192  # elements of x worth a thread's while
_CHUNKS = 16  # pieces the outputs are cut into: small enough to even out, large enough to keep the prefetcher streaming


@njit
def _tile_rows(rows):
    """Rows of the tile that starts `rows` rows before the end."""
    if rows > 4:
        return 8
    return 4 if rows > 2 else rows


@kernel
def _prepare_steps(begin, end, scheme, x, rows, k, steps, step, row_bytes, out):
    """Steps begin .. end - 1 of all tiles, counted through: a thread writes whole cache lines, all rows of a tile."""
    for i in range(begin, end):
        first, s = i // steps * TILE_ROWS, i % steps
        left = rows - first
        tile_rows = _tile_rows(left)
        here = x + (first * k + s * step) * 4
        to = out + (first * steps + s * tile_rows) * row_bytes
        if tile_rows == 8:
            prepare(scheme, 8, here, k * 4, left, k - s * step, to)
        elif tile_rows == 4:
            prepare(scheme, 4, here, k * 4, left, k - s * step, to)
        elif tile_rows == 2:
            prepare(scheme, 2, here, k * 4, left, k - s * step, to)
        else:
            prepare(scheme, 1, here, k * 4, left, k - s * step, to)


@kernel
def _blocks(begin, end, scheme, x, rows, w, n, steps, step_bytes, row_bytes, bias, y):
    for group in range(0, rows, _GROUP_ROWS):
        group_end = min(group + _GROUP_ROWS, rows)
        for block in range(begin, end):
            column = block * COLUMNS
            at = w + block * steps * step_bytes
            added = bias + column * 4 if bias != 0 else 0
            for first in range(group, group_end, TILE_ROWS):
                here = x + first * steps * row_bytes
                to = y + (first * n + column) * 4
                left = rows - first
                tile_rows = _tile_rows(left)
                if tile_rows == 8:
                    tile8 = multiply(scheme, tile_zeros(16), at, here, 32, steps)
                    tile_store(tile8, 2, to, n * 4, left, n - column, added)
                elif tile_rows == 4:
                    tile4 = multiply(scheme, tile_zeros(8), at, here, 16, steps)
                    tile_store(tile4, 2, to, n * 4, left, n - column, added)
                elif tile_rows == 2:
                    tile2 = multiply(scheme, tile_zeros(4), at, here, 8, steps)
                    tile_store(tile2, 2, to, n * 4, left, n - column, added)
                else:
                    tile1 = multiply(scheme, tile_zeros(2), at, here, 4, steps)
                    tile_store(tile1, 2, to, n * 4, left, n - column, added)


@njit
def _one_tile(scheme, at, here, steps, left, to, columns, bias):
    """Up to 8 rows of one block of weights, written to `to`, rows of COLUMNS float32."""
    tile_rows = _tile_rows(left)
    if tile_rows == 8:
        tile_store(multiply(scheme, tile_zeros(16), at, here, 32, steps), 2, to, COLUMNS * 4, left, columns, bias)
    elif tile_rows == 4:
        tile_store(multiply(scheme, tile_zeros(8), at, here, 16, steps), 2, to, COLUMNS * 4, left, columns, bias)
    elif tile_rows == 2:
        tile_store(multiply(scheme, tile_zeros(4), at, here, 8, steps), 2, to, COLUMNS * 4, left, columns, bias)
    else:
        tile_store(multiply(scheme, tile_zeros(2), at, here, 4, steps), 2, to, COLUMNS * 4, left, columns, bias)


@kernel
def _gated_blocks(begin, end, scheme, x, rows, w, inner, steps, step_bytes, row_bytes, bias, y):
    """silu(gate) * up for blocks begin .. end - 1 of the first half of the outputs; the second half has the `up`s."""
    tiles = np.empty(2 * TILE_ROWS * COLUMNS, np.float32)
    gate = tiles.ctypes.data
    up = gate + TILE_ROWS * COLUMNS * 4
    half = inner // COLUMNS
    for group in range(0, rows, _GROUP_ROWS):
        group_end = min(group + _GROUP_ROWS, rows)
        for block in range(begin, end):
            column = block * COLUMNS
            at = w + block * steps * step_bytes
            gate_bias = bias + column * 4 if bias != 0 else 0
            up_bias = gate_bias + inner * 4 if bias != 0 else 0
            for first in range(group, group_end, TILE_ROWS):
                here, left = x + first * steps * row_bytes, rows - first
                _one_tile(scheme, at, here, steps, left, gate, COLUMNS, gate_bias)
                _one_tile(scheme, at + half * steps * step_bytes, here, steps, left, up, COLUMNS, up_bias)
                for r in range(min(TILE_ROWS, left)):
                    to = y + ((first + r) * inner + column) * 4
                    for i in range(0, COLUMNS * 4, 64):
                        value = silu(load_f32x16(gate + r * COLUMNS * 4 + i)) * load_f32x16(up + r * COLUMNS * 4 + i)
                        store_f32x16(to + i, value)
    keep_alive(tiles)


@cache
def gated_product_kernel(scheme: Scheme) -> Any:
    """kernel(pool, x, rows, k, w, inner, bias, y, scratch): as `product_kernel` of a stack gate | up of 2 * inner outputs,
    with y [rows, inner] = silu(gate) * up. inner is a multiple of COLUMNS."""
    step, step_bytes, row_bytes = scheme.step, scheme.step_bytes, scheme.row_bytes

    @kernel
    def gated_product(pool, x, rows, k, w, inner, bias, y, scratch):
        steps = (k + step - 1) // step
        tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
        grain = max(1, _PREPARE_GRAIN // (min(rows, TILE_ROWS) * step))
        parallel_for(pool, _prepare_steps, tiles * steps, grain, (scheme, x, rows, k, steps, step, row_bytes, scratch))
        blocks = inner // COLUMNS
        arguments = (scheme, scratch, rows, w, inner, steps, step_bytes, row_bytes, bias, y)
        parallel_for(pool, _gated_blocks, blocks, (blocks + _CHUNKS - 1) // _CHUNKS, arguments)

    return gated_product


@cache
def product_kernel(scheme: Scheme) -> Any:
    """kernel(pool, x, rows, k, w, n, bias, y, scratch): y [rows, n] = x [rows, k] W^T + bias, all float32 at addresses.

    `w` is packed by `scheme`; `bias` may be 0; `scratch` holds `scratch_bytes(scheme, rows, k)`.
    """
    step, step_bytes, row_bytes = scheme.step, scheme.step_bytes, scheme.row_bytes

    @kernel
    def product(pool, x, rows, k, w, n, bias, y, scratch):
        steps = (k + step - 1) // step
        tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
        grain = max(1, _PREPARE_GRAIN // (min(rows, TILE_ROWS) * step))
        parallel_for(pool, _prepare_steps, tiles * steps, grain, (scheme, x, rows, k, steps, step, row_bytes, scratch))
        blocks = (n + COLUMNS - 1) // COLUMNS
        grain = (blocks + _CHUNKS - 1) // _CHUNKS
        arguments = (scheme, scratch, rows, w, n, steps, step_bytes, row_bytes, bias, y)
        parallel_for(pool, _blocks, blocks, grain, arguments)

    return product


def scratch_bytes(scheme: Scheme, rows: int, k: int) -> int:
    """Bytes of the prepared rows of x: whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * -(-k // scheme.step) * scheme.row_bytes
