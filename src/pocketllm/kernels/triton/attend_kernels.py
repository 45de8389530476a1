# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""Decode and verify: the tokens of a slot in splits of a fixed size, then one sum over a row's splits.

A fixed number of programs takes pieces of work (slot, split, row block, KV head) in turn, as many as the lengths on the
device say: no length reaches the host, and which program does a piece changes nothing in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pocketllm.kernels.triton.numerics import hadamard
from pocketllm.kernels.triton.softmax import (
    bias_queries,
    bias_scores,
    find_sequence,
    first_tile,
    softmax_step,
    start_state,
    visible_tokens,
)
from pocketllm.kernels.triton.storage import storage_row


@triton.jit
def split_kernel(
    q, raw_q, planes, block_table, max_pages, slot_ids, kv_lens, num_seqs, bias, cos, sin,
    part_out, part_sums, max_splits, scale,
    Q: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NP: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, HALF: tl.constexpr, HALFP: tl.constexpr,
    SCALED: tl.constexpr, LOAD_K: tl.constexpr, LOAD_V: tl.constexpr,
):  # fmt: skip
    """q [n, Q, HQ, D] in the storage's basis (raw_q: before the rotation, for a key bias).

    Writes, for row r = (sequence, query, head) and split s, unnormalised values to part_out [r, s, D], and the largest
    score and the sum of weights to part_sums [r, s, 2].
    """
    GROUP: tl.constexpr = HQ // HK
    BLOCKS: tl.constexpr = (GROUP * Q + BLOCK_M - 1) // BLOCK_M
    index = tl.arange(0, NP)
    lens = tl.load(kv_lens + index, mask=index < num_seqs, other=0)
    counts = (lens + SPLIT - 1) // SPLIT
    d = tl.arange(0, DP)
    for item in range(tl.program_id(0), tl.sum(counts, axis=0) * (BLOCKS * HK), tl.num_programs(0)):
        head = item % HK
        seq, split = find_sequence(counts, index, item // (HK * BLOCKS))
        slot, kv_len = tl.load(slot_ids + seq), tl.load(kv_lens + seq)
        row = item // HK % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
        in_rows = row < GROUP * Q
        position = kv_len - Q + row // GROUP
        out_row = (seq * Q + row // GROUP) * HQ + head * GROUP + row % GROUP
        q_mask = in_rows[:, None] & (d < D)[None, :]
        queries = tl.load(q + out_row[:, None] * D + d[None, :], mask=q_mask, other=0.0)
        if HALF > 0:
            bias_a, bias_b, bias_c = bias_queries(raw_q, out_row * D, in_rows, bias, head, HALF, HALFP, D, DP)
        state = start_state(BLOCK_M, DP, SCALED)
        first = first_tile(split * SPLIT, kv_len - Q + item // HK % BLOCKS * BLOCK_M // GROUP, BLOCK_N, WINDOW, SINKS)
        for start in range(first, tl.minimum(split * SPLIT + SPLIT, kv_len), BLOCK_N):
            tokens = start + tl.arange(0, BLOCK_N)
            valid = tokens < kv_len
            rows = (storage_row(block_table, max_pages, slot, start, PAGE) + tl.arange(0, BLOCK_N)) * HK + head
            k, k_scale = LOAD_K(planes, rows, valid, D, DP)
            v, v_scale = LOAD_V(planes, rows, valid, D, DP)
            extra = None
            if HALF > 0:
                extra = bias_scores(bias_a, bias_b, bias_c, cos, sin, tokens, valid, HALF, HALFP)
            seen = visible_tokens(position, tokens, valid, WINDOW, SINKS)
            state = softmax_step(state, queries.to(k.dtype), k, k_scale, v, v_scale, extra, seen, scale, SCALED)
        largest, power, total, out = state
        part = out_row.to(tl.int64) * max_splits + split
        tl.store(part_out + part[:, None] * D + d[None, :], out * tl.exp2(power)[:, None], mask=q_mask)
        tl.store(part_sums + part * 2, largest, mask=in_rows)
        tl.store(part_sums + part * 2 + 1, tl.max(total, axis=1), mask=in_rows)  # its 16 columns are equal


@triton.jit
def merge_kernel(
    part_out, part_sums, kv_lens, out, signs, max_splits,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """One program per row of out [n * ROWS, D], ROWS = Q * HQ: its splits in order, BLOCK of SPLITS (padded) at a time."""
    row = tl.program_id(0)
    count = (tl.load(kv_lens + row // ROWS) + SPLIT - 1) // SPLIT
    part = row.to(tl.int64) * max_splits
    all_splits = tl.arange(0, SPLITS)
    largest = tl.load(part_sums + (part + all_splits) * 2, mask=all_splits < count, other=float("-inf"))
    reference = tl.max(largest, axis=0)
    reference = tl.where(reference == float("-inf"), 0.0, reference)
    d = tl.arange(0, DP)
    values = tl.zeros([DP], tl.float32)
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
    if ROTATED:
        values = hadamard(values, D, DP) * tl.load(signs + d, mask=d < D, other=0.0)
    tl.store(out + row.to(tl.int64) * D + d, values.to(out.dtype.element_ty), mask=d < D)
