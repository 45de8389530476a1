# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment, var-annotated"
# ruff: noqa: RUF005, SIM108  (Triton knows no starred tuples)
"""Decode and verify: the tokens of a slot in splits of a fixed size, then one sum over a row's splits.

A fixed number of programs takes pieces of work (slot, split, row block, KV head) in turn, as many as the lengths on the
device say: no length reaches the host, and which program does a piece changes nothing in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pocketllm.kernels.triton.numerics import dot, exponent, unpacked_first
from pocketllm.kernels.triton.softmax import (
    bias_queries,
    bias_scores,
    find_sequence,
    first_tile,
    visible_tokens,
)
from pocketllm.kernels.triton.storage import tile_rows


@triton.jit
def _larger(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def split_step(state, q, k, k_scale, v, v_scale, extra, seen, scale, SCALED: tl.constexpr):
    """Adds a tile of N tokens; everything is transposed: q [DP, M], k [N, DP], v [DP, N], scores [N, M], out [DP, M].

    So K and V, much the larger, are the left operands of the products, of which a warp takes 16 rows and more, and M need
    be no more than 8. (With 16, Triton would take Hopper's warpgroup products, which read packed K a byte pair at a time.)
    The weights' sum is kept per token of a tile [N, M] and added up at the end. Blocks of one shape in decode and verify
    make their results equal to the last bit. See `softmax.softmax_step` for the scales.
    """
    largest, power, total, out = state
    scores = dot(k, q, tl.zeros([k.shape[0], q.shape[1]], tl.float32))
    if SCALED:
        scores = scores * (k_scale * scale)[:, None]
    else:
        scores = scores * scale
    if extra is not None:
        scores += extra * scale
    scores = tl.where(seen, scores, float("-inf"))
    if SCALED:
        powers = tl.where(scores == float("-inf"), -126.0, exponent(v_scale)[:, None])
        tile_largest, tile_power = tl.reduce((scores, powers), 0, _larger)
        new_power = tl.maximum(power, tile_power)
    else:
        tile_largest, new_power = tl.max(scores, axis=0), power
    new_largest = tl.maximum(largest, tile_largest)
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - reference[None, :])
    shrink = tl.exp2(largest - reference)
    total = total * shrink[None, :] + weights
    if SCALED:
        weights = weights * v_scale[:, None] * tl.exp2(-new_power)[None, :]
        shrink = shrink * tl.exp2(power - new_power)
    out = dot(v, weights.to(v.dtype), out * shrink[None, :])
    return new_largest, new_power, total, out


@triton.jit
def block_rows(seq, block, head, kv_len, Q: tl.constexpr, HQ: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr):
    """Of the M rows of a block: which exist, the position of each one's query, and its place among the rows of out."""
    row = block * M + tl.arange(0, M)
    return row < GROUP * Q, kv_len - Q + row // GROUP, (seq * Q + row // GROUP) * HQ + head * GROUP + row % GROUP


@triton.jit
def split_kernel(
    q, raw_q, planes, block_table, max_pages, slot_ids, kv_lens, num_seqs, bias, cos, sin,
    part_out, part_sums, max_splits, scale,
    Q: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, NP: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, HALF: tl.constexpr, HALFP: tl.constexpr,
    DTYPE: tl.constexpr, SCALED: tl.constexpr, LOAD_K: tl.constexpr, LOAD_V: tl.constexpr,
):  # fmt: skip
    """q [n, Q, HQ, D] in the storage's basis (raw_q: before the rotation, for a key bias).

    A piece of work is a split, a KV head and BLOCKS blocks of M query rows, all of which use each tile once it is read.
    Writes, for row r = (sequence, query, head) and split s, unnormalised values to part_out [r, s, D], and the largest
    score and the sum of weights to part_sums [r, s, 2].
    """
    M: tl.constexpr = 8
    GROUP: tl.constexpr = HQ // HK
    PIECES: tl.constexpr = (GROUP * Q + M * BLOCKS - 1) // (M * BLOCKS)
    index = tl.arange(0, NP)
    lens = tl.load(kv_lens + index, mask=index < num_seqs, other=0)
    counts = (lens + SPLIT - 1) // SPLIT
    d = tl.arange(0, DP)
    for item in range(tl.program_id(0), tl.sum(counts, axis=0) * (PIECES * HK), tl.num_programs(0)):
        head = item % HK
        first_block = item // HK % PIECES * BLOCKS
        seq, split = find_sequence(counts, index, item // (HK * PIECES))
        slot, kv_len = tl.load(slot_ids + seq), tl.load(kv_lens + seq)
        queries, biases, states = (), (), ()
        for b in tl.static_range(BLOCKS):
            in_rows, position, out_row = block_rows(seq, first_block + b, head, kv_len, Q, HQ, GROUP, M)
            q_mask = (d < D)[:, None] & in_rows[None, :]
            query = tl.load(q + out_row[None, :] * D + d[:, None], mask=q_mask, other=0.0).to(DTYPE)
            queries = queries + (query,)
            if HALF > 0:
                terms = bias_queries(raw_q, out_row * D, in_rows, bias, head, HALF, HALFP, D, DP)
                biases = biases + (terms,)
            largest = tl.full([M], float("-inf"), tl.float32)
            power = tl.full([M], -126.0 if SCALED else 0.0, tl.float32)
            nothing = largest, power, tl.zeros([BLOCK_N, M], tl.float32), tl.zeros([DP, M], tl.float32)
            states = states + (nothing,)
        first = first_tile(split * SPLIT, kv_len - Q + first_block * M // GROUP, BLOCK_N, WINDOW, SINKS)
        for start in range(first, tl.minimum(split * SPLIT + SPLIT, kv_len), BLOCK_N):
            tokens = start + tl.arange(0, BLOCK_N)
            rows = tile_rows(block_table, max_pages, slot, start, kv_len, BLOCK_N, PAGE) * HK + head
            k, k_scale = LOAD_K(planes, rows, D, DP)
            v, v_scale = LOAD_V(planes, rows, D, DP)
            v = tl.trans(unpacked_first(v))
            stepped = ()
            for b in tl.static_range(BLOCKS):
                extra = None
                if HALF > 0:
                    in_table = tl.minimum(tokens, kv_len - 1)
                    extra = tl.trans(
                        bias_scores(biases[b][0], biases[b][1], biases[b][2], cos, sin, in_table, HALF, HALFP)
                    )
                _, position, _ = block_rows(seq, first_block + b, head, kv_len, Q, HQ, GROUP, M)
                seen = visible_tokens(position[None, :], tokens[:, None], WINDOW, SINKS)
                state = split_step(states[b], queries[b], k, k_scale, v, v_scale, extra, seen, scale, SCALED)
                stepped = stepped + (state,)
            states = stepped
        for b in tl.static_range(BLOCKS):
            in_rows, _, out_row = block_rows(seq, first_block + b, head, kv_len, Q, HQ, GROUP, M)
            largest, power, total, out = states[b]
            part = out_row.to(tl.int64) * max_splits + split
            values, mask = out * tl.exp2(power)[None, :], (d < D)[:, None] & in_rows[None, :]
            tl.store(part_out + part[None, :] * D + d[:, None], values, mask=mask)
            tl.store(part_sums + part * 2, largest, mask=in_rows)
            tl.store(part_sums + part * 2 + 1, tl.sum(total, axis=0), mask=in_rows)


@triton.jit
def merge_kernel(
    part_out, part_sums, kv_lens, out, max_splits,
    ROWS: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row of out [n * ROWS, D], ROWS = Q * HQ, and CHUNK dims: its splits in order, BLOCK at a time.

    SPLITS: how many there can be, padded. A program that no split concerns writes zeros.
    """
    row = tl.program_id(0)
    count = (tl.load(kv_lens + row // ROWS) + SPLIT - 1) // SPLIT
    part = row.to(tl.int64) * max_splits
    all_splits = tl.arange(0, SPLITS)
    largest = tl.load(part_sums + (part + all_splits) * 2, mask=all_splits < count, other=float("-inf"))
    reference = tl.max(largest, axis=0)
    reference = tl.where(reference == float("-inf"), 0.0, reference)
    d = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    values = tl.zeros([CHUNK], tl.float32)
    total = 0.0
    for start in range(0, count, BLOCK):
        split = start + tl.arange(0, BLOCK)
        mask = split < count
        score = tl.load(part_sums + (part + split) * 2, mask=mask, other=float("-inf"))
        weight = tl.exp2(score - reference)
        total += tl.sum(weight * tl.load(part_sums + (part + split) * 2 + 1, mask=mask, other=0.0), axis=0)
        tile_mask = mask[:, None] & (d < D)[None, :]
        tile = tl.load(part_out + (part + split)[:, None] * D + d[None, :], mask=tile_mask, other=0.0)
        values += tl.sum(tile * weight[:, None], axis=0)
    values = values / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row.to(tl.int64) * D + d, values.to(out.dtype.element_ty), mask=d < D)
