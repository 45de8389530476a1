"""A matrix product on all threads: rows of x are prepared once, then each thread takes blocks of 32 outputs.

A block of weights is multiplied with tiles of up to 8 rows: the first tile streams it from memory, further ones find it
in the L2 cache. A last tile of 1 to 7 rows runs as one of 1, 2, 4 or 8 rows; the rows beyond x are computed from whatever
the scratch memory holds and not stored, so they need no preparation and touch nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import njit

from pocketllm.kernels.numba.linear_tiles import COLUMNS, Scheme, multiply, prepare
from pocketllm.kernels.numba.runtime import kernel, parallel_for
from pocketllm.kernels.numba.simd import tile_load, tile_store

TILE_ROWS = 8
_X_BYTES = (
    131072  # of prepared x per tile between two cuts of K: it must stay in the L1 cache beside a stream of weights
)
_PREPARE_GRAIN = 8192  # elements of x worth a thread's while
_CHUNKS = 16  # pieces the outputs are cut into: small enough to even out, large enough to keep the prefetcher streaming


@njit
def _tile_rows(rows):  # type: ignore[no-untyped-def]
    """Rows of the tile that starts `rows` rows before the end."""
    if rows > 4:
        return 8
    return 4 if rows > 2 else rows


@kernel
def _prepare_steps(begin, end, scheme, x, rows, k, steps, step, row_bytes, out):  # type: ignore[no-untyped-def]
    """Steps begin .. end - 1 of all tiles, counted through: a thread writes whole cache lines, all rows of a tile."""
    for i in range(begin, end):
        first, s = i // steps * TILE_ROWS, i % steps
        tile_rows = _tile_rows(rows - first)
        to = out + (first * steps + s * tile_rows) * row_bytes
        for r in range(first, min(first + TILE_ROWS, rows)):
            prepare(scheme, x + (r * k + s * step) * 4, k - s * step, to + (r - first) * 4, 4 * tile_rows)


@kernel
def _blocks(begin, end, scheme, x, rows, w, n, steps, step_bytes, row_bytes, bias, y):  # type: ignore[no-untyped-def]
    cut = max(1, _X_BYTES // (min(rows, TILE_ROWS) * row_bytes))
    for start in range(0, steps, cut):
        count = min(cut, steps - start)
        last = start + count == steps
        for block in range(begin, end):
            column = block * COLUMNS
            at = w + (block * steps + start) * step_bytes
            added = bias + column * 4 if bias != 0 and last else 0
            for first in range(0, rows, TILE_ROWS):
                to = y + (first * n + column) * 4
                left = rows - first
                tile_rows = _tile_rows(left)
                here = x + (first * steps + start * tile_rows) * row_bytes
                known = 0 if start == 0 else left
                if tile_rows == 8:
                    tile = tile_load(16, 2, to, n * 4, known, n - column)
                    tile = multiply(scheme, tile, at, here, 32, count)
                    tile_store(tile, 2, to, n * 4, left, n - column, added)
                elif tile_rows == 4:
                    tile4 = tile_load(8, 2, to, n * 4, known, n - column)
                    tile4 = multiply(scheme, tile4, at, here, 16, count)
                    tile_store(tile4, 2, to, n * 4, left, n - column, added)
                elif tile_rows == 2:
                    tile2 = tile_load(4, 2, to, n * 4, known, n - column)
                    tile2 = multiply(scheme, tile2, at, here, 8, count)
                    tile_store(tile2, 2, to, n * 4, left, n - column, added)
                else:
                    tile1 = tile_load(2, 2, to, n * 4, known, n - column)
                    tile1 = multiply(scheme, tile1, at, here, 4, count)
                    tile_store(tile1, 2, to, n * 4, left, n - column, added)


@cache
def product_kernel(scheme: Scheme) -> Any:
    """kernel(pool, x, rows, k, w, n, bias, y, scratch): y [rows, n] = x [rows, k] W^T + bias, all float32 at addresses.

    `w` is packed by `scheme`; `bias` may be 0; `scratch` holds `scratch_bytes(scheme, rows, k)`.
    """
    step, step_bytes, row_bytes = scheme.step, scheme.step_bytes, scheme.row_bytes

    @kernel
    def product(pool, x, rows, k, w, n, bias, y, scratch):  # type: ignore[no-untyped-def]
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
