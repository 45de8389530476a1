# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""Prefill: a tile of query rows (queries x the heads that share a KV head) walks all tokens it may see.

Tiles start at the first token of the sequence, so a query's sums do not depend on the chunk it came in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pocketllm.kernels.triton.softmax import (
    bias_queries,
    bias_scores,
    find_sequence,
    first_tile,
    softmax_step,
    start_state,
    visible_tokens,
)
from pocketllm.kernels.triton.storage import tile_rows


@triton.jit
def prefill_kernel(
    q, raw_q, planes, block_table, max_pages, slot_ids, cu_seqlens_q, kv_lens, num_seqs, bias, cos, sin, out, scale,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NP: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, HALF: tl.constexpr, HALFP: tl.constexpr,
    SCALED: tl.constexpr, LOAD_K: tl.constexpr, LOAD_V: tl.constexpr,
):  # fmt: skip
    """q [T, HQ, D] in the storage's basis and the products' type -> out [T, HQ, D] in the same basis.

    Programs: (blocks of rows, KV heads).
    """
    GROUP: tl.constexpr = HQ // HK
    index = tl.arange(0, NP)
    starts = tl.load(cu_seqlens_q + index, mask=index < num_seqs, other=0)
    ends = tl.load(cu_seqlens_q + index + 1, mask=index < num_seqs, other=0)
    counts = ((ends - starts) * GROUP + BLOCK_M - 1) // BLOCK_M
    item = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    if item < tl.sum(counts, axis=0):
        head = tl.program_id(1)
        d = tl.arange(0, DP)
        seq, block = find_sequence(counts, index, item)
        slot, kv_len = tl.load(slot_ids + seq), tl.load(kv_lens + seq)
        first_query = tl.load(cu_seqlens_q + seq)
        num_queries = tl.load(cu_seqlens_q + seq + 1) - first_query
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        in_rows = row < num_queries * GROUP
        position = kv_len - num_queries + row // GROUP
        at = ((first_query + row // GROUP) * HQ + head * GROUP + row % GROUP).to(tl.int64) * D
        q_mask = in_rows[:, None] & (d < D)[None, :]
        queries = tl.load(q + at[:, None] + d[None, :], mask=q_mask, other=0.0)
        if HALF > 0:
            bias_a, bias_b, bias_c = bias_queries(raw_q, at, in_rows, bias, head, HALF, HALFP, D, DP)
        state = start_state(BLOCK_M, DP)
        begin = first_tile(0, kv_len - num_queries + block * BLOCK_M // GROUP, BLOCK_N, WINDOW, SINKS)
        end = tl.minimum(kv_len, kv_len - num_queries + (block * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
        for start in range(begin, end, BLOCK_N):
            tokens = start + tl.arange(0, BLOCK_N)
            rows = tile_rows(block_table, max_pages, slot, start, kv_len, BLOCK_N, PAGE) * HK + head
            k, k_scale = LOAD_K(planes, rows, D, DP)
            v, v_scale = LOAD_V(planes, rows, D, DP)
            extra = None
            if HALF > 0:
                in_table = tl.minimum(tokens, kv_len - 1)
                extra = bias_scores(bias_a, bias_b, bias_c, cos, sin, in_table, HALF, HALFP)
            seen = visible_tokens(position[:, None], tokens[None, :], WINDOW, SINKS)
            state = softmax_step(state, queries, k, k_scale, v, v_scale, extra, seen, scale, SCALED)
        _, total, values = state
        values = values * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
        tl.store(out + at[:, None] + d[None, :], values.to(out.dtype.element_ty), mask=q_mask)
