"""Attention of many query rows over one slot and KV head, a tile of tokens at a time: the arithmetic of every pass.

Scores are taken with K as columns: a vector's lanes are 16 tokens, and q . k is summed down one lane from the first
dimension to the last. The weighted sum of V has dimensions as lanes and runs over the tokens in order. So a query's
result does not depend on which other rows share the loads of K and V, and decode, verify and prefill, which all end up
here, agree bit for bit.

Softmax runs over the tiles of a *split* of `SPLIT` tokens with the largest score so far as reference (arXiv 2205.14135);
splits start at multiples of SPLIT from the start of the sequence and are merged in order. They can be computed apart,
which is how one long slot keeps all cores busy, and are the same splits whoever computes them.

Float32 scratch memory, offsets in elements (`scratch_layout`), for `blocks` blocks of `rows` query rows:

    queries   [blocks, width, rows]  rotated and scaled; width = D + bias width: see `prepare_queries`
    split     [blocks * rows, D + 32]  output of the current split, its 16 partial sums, its largest score
    k         [D, tile]              K of a tile as columns
    rows      [16, D]                K of 16 tokens as stored, on their way there
    v         [tile, D]              V of a tile, if `core.shared`
    scales    [2, tile]              K scales, V scales
    p         [rows, tile]           scores, then weights times V scales
    index     [tile] int64           the tokens' rows in the planes
    small     [2, 16]                per row: factor for what is there, reference
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic

from pocketllm.kernels.numba.format_pieces import (
    head_dim,
    is_shared,
    k_scale,
    load_k,
    load_v,
    prefetch_row,
    row_at,
    tile_lanes,
    tile_rows,
    tile_tokens,
    v_scale,
    v_tile,
)
from pocketllm.kernels.numba.format_simd import load_i32, store_i64
from pocketllm.kernels.numba.simd import (
    _at,
    _fma,
    _load,
    _pack,
    _splat,
    _unpack,
    f32x16,
    fma,
    load_f32,
    load_f32x16,
    splat,
    store_f32,
    store_f32x16,
    tile_fma,
)
from pocketllm.kernels.numba.vector_math import _VF32, exp, hide, larger, max_lanes, sum_lanes, transpose_16x16

SPLIT = 512  # tokens: the unit of work over long contexts
MAX_ROWS = 8  # query rows that share a load
_F32 = ir.FloatType()
_NEVER = -np.inf


# -- tiles of registers ----------------------------------------------------------------------------------------------


@intrinsic
def _score_zeros(typingctx: Any, core: Any) -> Any:
    """A tile of rows x 2 vectors (32 tokens)."""
    ty = UniTuple(f32x16, 2 * core.core.rows)
    return ty(core), lambda ctx, b, sig, a: ir.Constant(ctx.get_value_type(ty), None)


@intrinsic
def _score_scale(typingctx: Any, tile: Any, first: Any, second: Any) -> Any:
    """Multiplies each row's two vectors by these."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        return _pack(b, [b.fmul(v, a[1 + i % 2]) for i, v in enumerate(_unpack(b, a[0], tile))])

    return tile(tile, f32x16, f32x16), codegen


@intrinsic
def _score_store(typingctx: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Row r goes to address + r * stride."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        at = a[1]
        values = _unpack(b, a[0], tile)
        for r in range(0, len(values), 2):
            b.store(values[r], _at(b, at, 0, _VF32), align=1)
            b.store(values[r + 1], _at(b, at, 64, _VF32), align=1)
            at = b.add(at, a[2])
        return ctx.get_dummy_value()

    return types.void(tile, types.int64, types.int64), codegen


@intrinsic
def _out_load(typingctx: Any, core: Any, address: Any, stride: Any, factors: Any) -> Any:
    """A tile of rows x lanes vectors from address + r * stride, times the float32 at factors + 4 r."""
    rows, lanes = core.core.rows, core.core.lanes
    ty = UniTuple(f32x16, rows * lanes)

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        at, out = a[1], []
        for r in range(rows):
            factor = _splat(b, _load(b, a[3], _F32, 4 * r))
            out += [b.fmul(_load(b, at, _VF32, 64 * l), factor) for l in range(lanes)]
            at = b.add(at, a[2])
        return _pack(b, out)

    return ty(core, types.int64, types.int64, types.int64), codegen


@intrinsic
def _out_add(typingctx: Any, acc: Any, v: Any, p: Any, stride: Any) -> Any:
    """acc[r, l] += p[r] * v[l]; p[r] is the float32 at p + r * stride."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        out, values, at = _unpack(b, a[0], acc), _unpack(b, a[1], v), a[2]
        for r in range(len(out) // len(values)):
            weight = _splat(b, _load(b, at, _F32))
            for l, value in enumerate(values):
                i = r * len(values) + l
                out[i] = _fma(b, value, weight, out[i])
            at = b.add(at, a[3])
        return _pack(b, out)

    return acc(acc, v, types.int64, types.int64), codegen


@intrinsic
def _out_store(typingctx: Any, core: Any, acc: Any, address: Any, stride: Any) -> Any:
    lanes = core.core.lanes

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        at = a[2]
        for i, value in enumerate(_unpack(b, a[1], acc)):
            b.store(value, _at(b, at, 64 * (i % lanes), _VF32), align=1)
            if i % lanes == lanes - 1:
                at = b.add(at, a[3])
        return ctx.get_dummy_value()

    return types.void(core, acc, types.int64, types.int64), codegen


# -- one tile --------------------------------------------------------------------------------------------------------


@njit(forceinline=True)
def scratch_layout(core, blocks, bias_width):
    """Offsets in float32 elements of (split, k, rows, v, scales, p, index, small) behind `queries`, and the whole size."""
    dim, tile, rows = head_dim(core), tile_tokens(core), tile_rows(core)
    split = blocks * (dim + bias_width) * rows
    k = split + blocks * rows * (dim + 32)
    stored = k + dim * tile
    v = stored + 16 * dim
    scales = v + (tile * dim if is_shared(core) else 0)
    p = scales + 2 * tile
    index = p + rows * tile
    small = index + 2 * tile
    return split, k, stored, v, scales, p, index, small, small + 32


@njit
def _first_row(table, position, page_shift, kv_heads):
    """Number of the row of a position's KV head 0. 16 tokens from a multiple of 16 on are always in one page."""
    page = load_i32(table + 4 * (position >> page_shift))
    return ((page << page_shift) + (position & ((1 << page_shift) - 1))) * kv_heads


@njit
def prefetch_tile(core, planes, table, kv_heads, page_shift, head, start, end):
    """Asks for the tile that begins at `start`, as far as there are tokens: nothing else asks ahead for a split's first."""
    for first in range(start, min(start + tile_tokens(core), end), 16):
        base = _first_row(table, first, page_shift, kv_heads) + head
        for t in range(min(16, end - first)):
            prefetch_row(core, planes, base + t * kv_heads)


@njit
def load_tile(core, planes, table, kv_heads, page_shift, head, start, count, end, memory, layout):
    """Decodes K (as columns), scales and, if `core.shared`, V of tokens start .. start + count - 1 into scratch memory.

    table: address of the slot's row of the block table; end: tokens of the slot. Nothing beyond the last token is read
    from the planes; what stands in the columns beyond it means nothing.
    """
    dim, tile = head_dim(core), tile_tokens(core)
    k, stored, v = memory + 4 * layout[1], memory + 4 * layout[2], memory + 4 * layout[3]
    scales, index = memory + 4 * layout[4], memory + 4 * layout[6]
    for first in range(0, count, 16):
        position = start + first
        base = _first_row(table, position, page_shift, kv_heads) + head
        if position + tile < end:  # the next tile, while this one is being worked on
            ahead = _first_row(table, position + tile, page_shift, kv_heads) + head
            for t in range(16):
                prefetch_row(core, planes, ahead + t * kv_heads)
        some = min(16, count - first)
        for t in range(some):
            number = base + t * kv_heads
            store_i64(index + 8 * (first + t), number)
            row = row_at(core, planes, number)
            store_f32(scales + 4 * (first + t), k_scale(core, row))
            store_f32(scales + 4 * (tile + first + t), v_scale(core, row))
            for i in range(0, dim, 16):
                store_f32x16(stored + 4 * (t * dim + i), load_k(core, row, i))
            if is_shared(core):
                for i in range(0, dim, 16):
                    store_f32x16(v + 4 * ((first + t) * dim + i), load_v(core, row, i))
        for i in range(0, dim, 16):
            transpose_16x16(stored + 4 * i, 4 * dim, k + 4 * (i * tile + first), 4 * tile)


@njit
def _scores(core, queries, start, count, bias, memory, layout):
    """p = (q . k) * k scale + the key bias's part, for one block of rows and a tile of tokens."""
    dim, tile, rows = head_dim(core), tile_tokens(core), tile_rows(core)
    k, scales, p = memory + 4 * layout[1], memory + 4 * layout[4], memory + 4 * layout[5]
    rotary = 2 * bias[2]
    for t in range(0, count, 32):
        acc = _score_zeros(core)
        at = k + 4 * t
        for d in range(dim):
            acc = tile_fma(acc, (load_f32x16(at), load_f32x16(at + 64)), queries + 4 * d * rows)
            at += 4 * tile
        acc = _score_scale(acc, load_f32x16(scales + 4 * t), load_f32x16(scales + 4 * t + 64))
        if bias[0] != 0:
            at = bias[1] + 4 * (start + t) * rotary
            for d in range(dim, dim + rotary):
                acc = tile_fma(acc, (load_f32x16(at), load_f32x16(at + 64 * rotary)), queries + 4 * d * rows)
                at += 64
            one = splat(1.0)
            acc = tile_fma(acc, (one, one), queries + 4 * (dim + rotary) * rows)
        _score_store(acc, p + 4 * t, 4 * tile)


@njit
def attend_tile(core, planes, width, block, start, count, first_row, last_query, group, mask, bias, memory, layout):
    """Adds a tile to the split's result of one block of rows.

    Rows are numbered (position of the query) * group + head in the group; `first_row` is that of block 0's first one.
    Rows of padding behind the last query (at `last_query`) compute something that nobody reads. mask: (window, sinks).
    """
    dim, tile, rows, lanes = head_dim(core), tile_tokens(core), tile_rows(core), tile_lanes(core)
    p, scales, index = memory + 4 * layout[5], memory + 4 * layout[4], memory + 4 * layout[6]
    v, factors = memory + 4 * layout[3], memory + 4 * layout[7]
    references = factors + 64
    stride = dim + 32
    split = memory + 4 * (layout[0] + block * rows * stride)
    _scores(core, memory + 4 * block * width * rows, start, count, bias, memory, layout)
    span = (count + 31) // 32 * 32
    row = first_row + block * rows
    masked = mask[0] > 0 or start + tile - 1 > row // group
    for r in range(rows):
        largest = splat(np.float32(_NEVER))
        query = min((row + r) // group, last_query)
        for t in range(0, span, 16):
            at = p + 4 * (r * tile + t)
            s = load_f32x16(at)
            if masked:
                s = hide(s, start + t, query, mask[0], mask[1])
                store_f32x16(at, s)
            largest = larger(largest, s)
        before = load_f32(split + 4 * (r * stride + dim + 16))
        now = max(before, max_lanes(largest))
        reference = now if now > np.float32(_NEVER) else np.float32(0)
        store_f32(split + 4 * (r * stride + dim + 16), now)
        store_f32(references + 4 * r, reference)
        store_f32(factors + 4 * r, before - reference)
    store_f32x16(factors, exp(load_f32x16(factors)))
    for r in range(rows):
        reference = splat(load_f32(references + 4 * r))
        total = load_f32x16(split + 4 * (r * stride + dim)) * splat(load_f32(factors + 4 * r))
        for t in range(0, span, 16):
            at = p + 4 * (r * tile + t)
            weight = exp(load_f32x16(at) - reference)
            total = total + weight
            store_f32x16(at, weight * load_f32x16(scales + 4 * (tile + t)))
        store_f32x16(split + 4 * (r * stride + dim), total)
    for i in range(0, dim, 16 * lanes):
        acc = _out_load(core, split + 4 * i, 4 * stride, factors)
        for t in range(count):
            acc = _out_add(acc, v_tile(core, planes, index, v, t, i), p + 4 * t, 4 * tile)
        _out_store(core, acc, split + 4 * i, 4 * stride)


# -- splits ----------------------------------------------------------------------------------------------------------


@njit
def clear_split(split, rows, dim):
    """No tokens seen yet."""
    for r in range(rows):
        at = split + 4 * r * (dim + 32)
        for i in range(0, dim + 16, 16):
            store_f32x16(at + 4 * i, splat(0.0))
        store_f32(at + 4 * (dim + 16), np.float32(_NEVER))


@njit
def merge_split(total, split, rows, dim):
    """Adds a split's result to that of all splits before it, both [rows, dim + 32]."""
    for r in range(rows):
        a, b = total + 4 * r * (dim + 32), split + 4 * r * (dim + 32)
        largest_a, largest_b = load_f32(a + 4 * (dim + 16)), load_f32(b + 4 * (dim + 16))
        if largest_b > np.float32(_NEVER):
            largest = max(largest_a, largest_b)
            keep, add = exp(splat(largest_a - largest)), exp(splat(largest_b - largest))
            for i in range(0, dim + 16, 16):
                store_f32x16(a + 4 * i, fma(load_f32x16(b + 4 * i), add, load_f32x16(a + 4 * i) * keep))
            store_f32(a + 4 * (dim + 16), largest)


@njit
def weight_sum(total, dim):
    """Sum of the softmax weights of one row."""
    return sum_lanes(load_f32x16(total + 4 * dim))
