"""Attention over slots as jobs for the thread pool: what a piece of work is, for decode, verify and prefill.

Addresses and sizes are plain integers. Arguments that go together:

    cache   (planes, block table, pages of a slot, log2 of the page size, KV heads); planes: a tuple of addresses
    bias    (bias [Hk, D], angles, R / 2): the part of K left out of storage (`KeyBias`); bias 0: none. angles: cosines and
            sines of all positions, [positions / 16, R, 16] (`attention_storage.angle_columns`)
    batch   (q, out, slot ids, cu_seqlens_q or 0, kv_lens, n, queries a slot, query heads)
    mask    (window, sinks)
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pocketllm.kernels.numba.attention_storage import rotate, rotate_back
from pocketllm.kernels.numba.attention_tiles import (
    SPLIT,
    attend_tile,
    clear_split,
    load_tile,
    merge_split,
    prefetch_tile,
    scratch_layout,
    weight_sum,
)
from pocketllm.kernels.numba.format_pieces import head_dim, is_rotated, tile_rows, tile_tokens
from pocketllm.kernels.numba.format_simd import keep_alive, load_i32
from pocketllm.kernels.numba.runtime import kernel, parallel_for
from pocketllm.kernels.numba.simd import load_f32, load_f32x16, splat, store_f32, store_f32x16

PREFILL_ROWS = 64  # query rows for which a tile of K and V is decoded once, about


@njit
def _bias_width(bias):
    """Entries behind q that carry the key bias: R / 2 for cosines, R / 2 for sines, one for the dims that do not rotate."""
    return 2 * bias[2] + 1 if bias[0] != 0 else 0


@njit
def prepare_queries(core, q, stride_head, group, stride_query, count, scale, signs, bias, head, blocks, memory, x):
    """Packs `count` rows of one KV head into `blocks` blocks of [width, rows]; rows of padding become zeros.

    q: address of the first row's vector; row r is head r % group of query r // group. x: scratch [D].

    With a key bias b, q . RoPE(b, j) = sum over pairs (i, i + R/2) of cos_ij (q_i b_i + q_i' b_i') + sin_ij (q_i' b_i -
    q_i b_i'), plus q . b over the dims that do not rotate: the brackets become entries of the query.
    """
    dim, rows = head_dim(core), tile_rows(core)
    half, width = bias[2], head_dim(core) + _bias_width(bias)
    for r in range(blocks * rows):
        out = memory + 4 * ((r // rows) * width * rows + r % rows)
        if r < count:
            source = q + (r // group) * stride_query + (r % group) * stride_head
            for i in range(0, dim, 16):
                store_f32x16(x + 4 * i, load_f32x16(source + 4 * i) * splat(scale))
            if bias[0] != 0:
                b = bias[0] + 4 * head * dim
                for i in range(half):
                    q0, q1 = load_f32(x + 4 * i), load_f32(x + 4 * (i + half))
                    b0, b1 = load_f32(b + 4 * i), load_f32(b + 4 * (i + half))
                    store_f32(out + 4 * (dim + i) * rows, q0 * b0 + q1 * b1)
                    store_f32(out + 4 * (dim + half + i) * rows, q1 * b0 - q0 * b1)
                rest = np.float32(0)
                for i in range(2 * half, dim):
                    rest += load_f32(x + 4 * i) * load_f32(b + 4 * i)
                store_f32(out + 4 * (dim + 2 * half) * rows, rest)
            if is_rotated(core):
                rotate(core, x, signs)
            for i in range(dim):
                store_f32(out + 4 * i * rows, load_f32(x + 4 * i))
        else:
            for i in range(width):
                store_f32(out + 4 * i * rows, np.float32(0))


@njit
def _run_split(
    core, cache, table, bias, head, blocks, start, first_row, num_rows, last_query, group, mask, memory, layout
):
    """Result of tokens start .. start + SPLIT - 1 of a slot for `num_rows` rows from `first_row` on."""
    dim, tile, rows = head_dim(core), tile_tokens(core), tile_rows(core)
    window, sinks = mask
    width = dim + _bias_width(bias)
    clear_split(memory + 4 * layout[0], blocks * rows, dim)
    newest = (first_row + num_rows - 1) // group  # position of the last query of these rows
    end = min(start + SPLIT, newest + 1)
    oldest_seen = first_row // group - window + 1
    for at in range(start, end, tile):
        if window > 0 and at >= sinks and at + tile <= oldest_seen:
            continue
        count = min(tile, last_query + 1 - at)
        load_tile(core, cache[0], table, cache[4], cache[3], head, at, count, last_query + 1, memory, layout)
        for block in range(blocks):
            attend_tile(
                core, cache[0], width, block, at, count, first_row, last_query, group, mask, bias, memory, layout
            )


@njit
def _finish(core, total, count, group, out, stride_head, stride_query, signs):
    """Divides by the weights' sum, rotates back and writes `count` rows."""
    dim = head_dim(core)
    for r in range(count):
        at = total + 4 * r * (dim + 32)
        inverse = splat(np.float32(1) / weight_sum(at, dim))
        to = out + (r // group) * stride_query + (r % group) * stride_head
        for i in range(0, dim, 16):
            store_f32x16(to + 4 * i, load_f32x16(at + 4 * i) * inverse)
        if is_rotated(core):
            rotate_back(core, to, signs)


@kernel
def _attend_items(begin, end, core, cache, bias, batch, mask, scale, signs, max_splits, blocks, partial):
    """One item: a slot, a split, a KV head. A slot of one split is finished here, others in `_merge_items`."""
    dim, rows = head_dim(core), tile_rows(core)
    kv_heads = cache[4]
    q, out, slot_ids, _, kv_lens, _, q_len, num_heads = batch
    group = num_heads // kv_heads
    layout = scratch_layout(core, blocks, _bias_width(bias))
    scratch = np.empty(layout[-1] + dim + 16, np.float32)
    memory = scratch.ctypes.data
    num_rows, size = q_len * group, blocks * rows * (dim + 32)
    for item in range(begin, end):
        head, split, i = item % kv_heads, item // kv_heads % max_splits, item // kv_heads // max_splits
        kv_len = load_i32(kv_lens + 4 * i)
        if split * SPLIT >= kv_len:
            continue
        first = (i * q_len * num_heads + head * group) * dim * 4
        table = cache[1] + 4 * load_i32(slot_ids + 4 * i) * cache[2]
        prefetch_tile(core, cache[0], table, cache[4], cache[3], head, split * SPLIT, kv_len)
        prepare_queries(
            core, q + first, 4 * dim, group, 4 * num_heads * dim, num_rows, scale, signs, bias, head, blocks, memory,
            memory + 4 * layout[-1],
        )  # fmt: skip
        first_row = (kv_len - q_len) * group
        _run_split(
            core, cache, table, bias, head, blocks, split * SPLIT, first_row, num_rows, kv_len - 1, group, mask, memory,
            layout,
        )  # fmt: skip
        result = memory + 4 * layout[0]
        if kv_len <= SPLIT:
            _finish(core, result, num_rows, group, out + first, 4 * dim, 4 * num_heads * dim, signs)
        else:
            to = partial + 4 * item * size
            for j in range(0, size, 16):
                store_f32x16(to + 4 * j, load_f32x16(result + 4 * j))
    keep_alive(scratch)


@kernel
def _merge_items(begin, end, core, cache, batch, signs, max_splits, blocks, partial):
    """One item: a slot and a KV head. Merges its splits in order."""
    dim, rows = head_dim(core), tile_rows(core)
    kv_heads = cache[4]
    _, out, _, _, kv_lens, _, q_len, num_heads = batch
    group = num_heads // kv_heads
    size = blocks * rows * (dim + 32)
    for item in range(begin, end):
        head, i = item % kv_heads, item // kv_heads
        kv_len = load_i32(kv_lens + 4 * i)
        if kv_len <= SPLIT:
            continue
        total = np.empty(size, np.float32)
        clear_split(total.ctypes.data, blocks * rows, dim)
        for split in range((kv_len + SPLIT - 1) // SPLIT):
            part = partial + 4 * ((i * max_splits + split) * kv_heads + head) * size
            merge_split(total.ctypes.data, part, blocks * rows, dim)
        to = out + (i * q_len * num_heads + head * group) * dim * 4
        _finish(core, total.ctypes.data, q_len * group, group, to, 4 * dim, 4 * num_heads * dim, signs)
        keep_alive(total)


@kernel
def attend_kernel(pool, core, cache, bias, batch, mask, scale, signs):
    dim, rows, kv_heads = head_dim(core), tile_rows(core), cache[4]
    kv_lens, n, q_len, num_heads = batch[4], batch[5], batch[6], batch[7]
    longest = 0
    for i in range(n):
        longest = max(longest, load_i32(kv_lens + 4 * i))
    max_splits = (longest + SPLIT - 1) // SPLIT
    blocks = (q_len * num_heads // kv_heads + rows - 1) // rows
    items = n * max_splits * kv_heads
    partial = np.empty(items * blocks * rows * (dim + 32) if max_splits > 1 else 1, np.float32)
    address = partial.ctypes.data
    parallel_for(
        pool, _attend_items, items, 1, (core, cache, bias, batch, mask, scale, signs, max_splits, blocks, address)
    )
    if max_splits > 1:
        parallel_for(pool, _merge_items, n * kv_heads, 1, (core, cache, batch, signs, max_splits, blocks, address))
    keep_alive(partial)


@kernel
def _prefill_items(begin, end, core, cache, bias, batch, mask, scale, signs, queries, max_parts):
    """One item: a slot, `queries` of its queries and a KV head; all splits, in order. The longest come first."""
    dim, rows = head_dim(core), tile_rows(core)
    kv_heads = cache[4]
    q, out, slot_ids, bounds, kv_lens, n, _, num_heads = batch
    group = num_heads // kv_heads
    blocks = (queries * group + rows - 1) // rows
    layout = scratch_layout(core, blocks, _bias_width(bias))
    size = blocks * rows * (dim + 32)
    scratch = np.empty(layout[-1] + dim + 16 + size, np.float32)
    memory = scratch.ctypes.data
    total = memory + 4 * (layout[-1] + dim + 16)
    for item in range(begin, end):
        head, i, part = item % kv_heads, item // kv_heads % n, max_parts - 1 - item // kv_heads // n
        first_token, end_token = load_i32(bounds + 4 * i), load_i32(bounds + 4 * i + 4)
        num_rows = min(end_token - first_token - part * queries, queries) * group
        if num_rows <= 0:
            continue
        kv_len = load_i32(kv_lens + 4 * i)
        table = cache[1] + 4 * load_i32(slot_ids + 4 * i) * cache[2]
        first = ((first_token + part * queries) * num_heads + head * group) * dim * 4
        prepare_queries(
            core, q + first, 4 * dim, group, 4 * num_heads * dim, num_rows, scale, signs, bias, head, blocks, memory,
            memory + 4 * layout[-1],
        )  # fmt: skip
        first_row = (kv_len - (end_token - first_token) + part * queries) * group
        clear_split(total, blocks * rows, dim)
        for start in range(0, (first_row + num_rows - 1) // group + 1, SPLIT):
            _run_split(
                core, cache, table, bias, head, blocks, start, first_row, num_rows, kv_len - 1, group, mask, memory,
                layout,
            )  # fmt: skip
            merge_split(total, memory + 4 * layout[0], blocks * rows, dim)
        _finish(core, total, num_rows, group, out + first, 4 * dim, 4 * num_heads * dim, signs)
    keep_alive(scratch)


@kernel
def prefill_kernel(pool, core, cache, bias, batch, mask, scale, signs):
    bounds, n, group = batch[3], batch[5], batch[7] // cache[4]
    queries = max(1, PREFILL_ROWS // group)
    longest = 0
    for i in range(n):
        longest = max(longest, load_i32(bounds + 4 * i + 4) - load_i32(bounds + 4 * i))
    max_parts = (longest + queries - 1) // queries
    items = n * max_parts * cache[4]
    arguments = (core, cache, bias, batch, mask, scale, signs, queries, max_parts)
    parallel_for(pool, _prefill_items, items, 1, arguments)
