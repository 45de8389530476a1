# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment, var-annotated"
# ruff: noqa: RUF005, SIM108  (Triton knows no starred tuples)
"""Decode and verify: the tokens of a slot in splits of fixed sizes, then one sum over a row's splits.

A fixed number of programs takes pieces of work (slot, split, row block, KV head) in turns, as many as the lengths on the
device say: no length reaches the host, and which program does a piece changes nothing in it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pocketllm.kernels.triton.attend_splits import (
    long_splits,
    num_splits,
    piece_of,
    share_of,
    short_splits,
    split_start,
)
from pocketllm.kernels.triton.linear_kernels import wait_for_inputs
from pocketllm.kernels.triton.numerics import (
    INTERPRETED,
    dim_of_row,
    dims_by_store,
    dot,
    hadamard,
    inverse,
    kept_in_place,
    log2,
)
from pocketllm.kernels.triton.softmax import (
    bias_queries,
    bias_scores,
    find_sequence,
    first_tile,
    visible_tokens,
)

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def scores_of(q, k, k_scale, v_scale, extra, seen, scale, SCALED: tl.constexpr):
    """Scores [N, M] of a tile of N tokens and M query rows; see `softmax.softmax_step` for the scales.

    Everything is transposed: q [DP, M], k [N, DP], v [DP, N], scores [N, M], out [DP, M]. So K and V, much the larger, are
    the left operands of the products, of which a warp takes 16 rows and more, and M need be no more than 8. (With 16, Triton
    would take Hopper's warpgroup products, which measured slower here.)
    """
    scores = dot(k, q, tl.zeros([k.shape[0], q.shape[1]], tl.float32))
    if SCALED:
        scores = tl.fma(scores, (k_scale * scale)[:, None], log2(v_scale)[:, None])
    else:
        scores = scores * scale
    if extra is not None:
        scores = tl.fma(extra, scale, scores)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _larger_2(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def _larger_3(a, b, c, d, e, f):
    return tl.maximum(a, d), tl.maximum(b, e), tl.maximum(c, f)


@triton.jit
def _larger_4(a, b, c, d, e, f, g, h):
    return tl.maximum(a, e), tl.maximum(b, f), tl.maximum(c, g), tl.maximum(d, h)


@triton.jit
def maxima(scores):
    """Of each block's scores [N, M]: the largest of each row. One reduction, for the warps to meet once for all blocks."""
    BLOCKS: tl.constexpr = len(scores)
    if (_INTERPRETED or BLOCKS == 1) or BLOCKS > 4:
        largest = ()
        for b in tl.static_range(BLOCKS):
            largest = largest + (tl.max(scores[b], axis=0),)
    elif BLOCKS == 2:
        largest = tl.reduce(scores, 0, _larger_2)
    elif BLOCKS == 3:
        largest = tl.reduce(scores, 0, _larger_3)
    else:
        largest = tl.reduce(scores, 0, _larger_4)
    return largest


@triton.jit
def weigh(largest, total, scores, tile_largest, v_scale, SCALED: tl.constexpr):
    """Of a tile's scores [N, M], the largest of each row being tile_largest [M]: the new largest score and sum, the weights
    [N, M], and what to multiply earlier sums by. `total` [N, M] is kept per token of a tile and added up at the end."""
    new_largest = tl.maximum(largest, tile_largest)
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - reference[None, :])
    shrink = tl.exp2(largest - reference)
    if SCALED:
        total = tl.fma(total, shrink[None, :], weights * inverse(v_scale)[:, None])
    else:
        total = tl.fma(total, shrink[None, :], weights)
    return new_largest, total, weights, shrink


@triton.jit
def block_rows(block, seq, head, kv_len, Q: tl.constexpr, HQ: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr):
    """Of the M rows of a block: which exist, the position of each one's query, and its place among the rows of out."""
    row = block * M + tl.arange(0, M)
    return row < GROUP * Q, kv_len - Q + row // GROUP, (seq * Q + row // GROUP) * HQ + head * GROUP + row % GROUP


@triton.jit
def chosen(values, index, i):
    """values[i], of values [N] held by the program."""
    return tl.sum(tl.where(index == i, values, 0), axis=0)


@triton.jit
def halves(x):
    """x [A, D] -> dims 0 .. D/2 - 1 and the rest."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def moved(planes, rows, WIDTHS: tl.constexpr):
    """The planes from row `rows` (int64) on."""
    tile = ()
    for i in tl.static_range(len(WIDTHS)):
        tile = tile + (planes[i] + rows * WIDTHS[i],)
    return tile


# A batch's slots and lengths may be a part of longer tensors, which begins anywhere.
@triton.jit(
    do_not_specialize=["max_pages", "num_seqs", "max_splits"], do_not_specialize_on_alignment=["slot_ids", "kv_lens"]
)
def split_kernel(
    q, raw_q, planes, block_table, max_pages, slot_ids, kv_lens, num_seqs, bias, cos, sin,
    part_out, part_sums, max_splits, scale,
    Q: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, M: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, NP: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, HALF: tl.constexpr, HALFP: tl.constexpr,
    DTYPE: tl.constexpr, SCALED: tl.constexpr, LOAD_K: tl.constexpr, LOAD_V: tl.constexpr, WIDTHS: tl.constexpr,
    UNPACK: tl.constexpr, HALVES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """q [n, Q, HQ, D] in the storage's basis (raw_q: before the rotation, for a key bias).

    A piece of work is a split, a KV head and BLOCKS blocks of M query rows (queries x the heads that share a KV head), all
    of which use each tile once it is read. Blocks of one size in decode and verify, by the same instructions, make their
    results equal to the last bit.
    Writes, for row r = (sequence, query, head) and split s, unnormalised values over SPLITS[2] to part_out [r, s, D] (so
    none is larger than V's codes, and those of a scaled format fit fp16), and the largest score and the sum of weights to
    part_sums [r, s, 2]. SPLITS: `AttendConfig.splits`. WIDTHS: of the planes' rows.
    UNPACK: V is stored in codes that are unpacked here (see `dims_by_store`). HALVES: multiply V by half
    its dims at a time, which needs half the shared memory for what was unpacked, and fewer registers.
    """
    if EARLY > 0:
        gdc_wait()
    GROUP: tl.constexpr = HQ // HK
    PIECES: tl.constexpr = (GROUP * Q + M * BLOCKS - 1) // (M * BLOCKS)
    index = tl.arange(0, NP)
    lens = tl.load(kv_lens + index, mask=index < num_seqs, other=0).to(tl.int32)
    slots = tl.load(slot_ids + index, mask=index < num_seqs, other=0)
    shorts, longs = short_splits(lens, SPLITS), long_splits(lens, SPLITS)
    program, programs = tl.program_id(0), tl.num_programs(0)
    of_split: tl.constexpr = PIECES * HK
    share = share_of(program, programs, tl.sum(longs, axis=0) * of_split, tl.sum(shorts, axis=0) * of_split, SPLITS)
    d, n = tl.arange(0, DP), tl.arange(0, BLOCK_N)
    for turn in range(share[0] + share[1] + share[2]):
        is_long, piece = piece_of(turn, share, program, programs)
        head, first_block = piece % HK, piece // HK % PIECES * BLOCKS
        seq, split = find_sequence(tl.where(is_long, longs, shorts), index, piece // of_split)
        split += tl.where(is_long, SPLITS[1] // SPLITS[0], 0)
        table, kv_len = block_table + chosen(slots, index, seq) * max_pages, chosen(lens, index, seq)
        first = first_tile(split_start(split, SPLITS), kv_len - Q + first_block * M // GROUP, BLOCK_N, WINDOW, SINKS)
        end = tl.minimum(split_start(split + 1, SPLITS), kv_len)
        page = tl.load(table + tl.minimum(first, end - 1) // PAGE)
        queries, biases, largests, totals, outs, second_outs = (), (), (), (), (), ()
        for b in tl.static_range(BLOCKS):
            in_rows, _, out_row = block_rows(first_block + b, seq, head, kv_len, Q, HQ, GROUP, M)
            q_mask = in_rows[:, None] & (d < D)[None, :]
            query = tl.load(q + out_row[:, None] * D + d[None, :], mask=q_mask, other=0.0).to(DTYPE)
            queries = queries + (tl.trans(query),)
            if HALF > 0:
                biases = biases + (bias_queries(raw_q, out_row * D, in_rows, bias, head, HALF, HALFP, D, DP),)
            largests = largests + (tl.full([M], float("-inf"), tl.float32),)
            totals = totals + (tl.zeros([BLOCK_N, M], tl.float32),)
            out = tl.zeros([DP // 2 if HALVES else DP, M], tl.float32)
            outs = outs + (out,)
            second_outs = second_outs + (out if HALVES else 0,)
        for start in range(first, end, BLOCK_N):
            tokens = start + n
            tile = moved(planes, (page.to(tl.int64) * PAGE + start % PAGE) * HK + head, WIDTHS)
            # The next tile's page, a step early: loads that wait for it would be one tile fewer in flight.
            page = tl.load(table + tl.minimum(start + BLOCK_N, end - 1) // PAGE)
            # Tokens past the slot's last one repeat it: what is read there is masked later, and must be a number.
            rows = tl.minimum(n, kv_len - 1 - start) * HK
            v, v_scale = LOAD_V(tile, rows, D, DP)
            if UNPACK:
                v = dims_by_store(v)
            if HALVES:
                v, second_v = halves(v)
            v = tl.trans(kept_in_place(v))
            k, k_scale = LOAD_K(tile, rows, D, DP)
            all_scores, new_largests, new_totals, all_weights, shrinks = (), (), (), (), ()
            for b in tl.static_range(BLOCKS):
                _, position, _ = block_rows(first_block + b, seq, head, kv_len, Q, HQ, GROUP, M)
                extra = None
                if HALF > 0:
                    at = tl.minimum(tokens, kv_len - 1)
                    extra = tl.trans(bias_scores(biases[b][0], biases[b][1], biases[b][2], cos, sin, at, HALF, HALFP))
                seen = visible_tokens(position[None, :], tokens[:, None], WINDOW, SINKS)
                all_scores = all_scores + (scores_of(queries[b], k, k_scale, v_scale, extra, seen, scale, SCALED),)
            tile_largests = maxima(all_scores)
            for b in tl.static_range(BLOCKS):
                largest, total, weights, shrink = weigh(
                    largests[b], totals[b], all_scores[b], tile_largests[b], v_scale, SCALED
                )
                new_largests, new_totals = new_largests + (largest,), new_totals + (total,)
                all_weights, shrinks = all_weights + (weights.to(v.dtype),), shrinks + (shrink,)
            largests, totals = new_largests, new_totals
            new_outs = ()
            for b in tl.static_range(BLOCKS):
                new_outs = new_outs + (dot(v, all_weights[b], outs[b] * shrinks[b][None, :]),)
            outs = new_outs
            if HALVES:
                second_v = tl.trans(kept_in_place(second_v))
                new_outs = ()
                for b in tl.static_range(BLOCKS):
                    new_outs = new_outs + (dot(second_v, all_weights[b], second_outs[b] * shrinks[b][None, :]),)
                second_outs = new_outs
        for b in tl.static_range(BLOCKS):
            in_rows, _, out_row = block_rows(first_block + b, seq, head, kv_len, Q, HQ, GROUP, M)
            part = out_row.to(tl.int64) * max_splits + split
            for half in tl.static_range(2 if HALVES else 1):
                dim = half * (DP // 2) + tl.arange(0, DP // 2 if HALVES else DP)
                if UNPACK:
                    dim = dim_of_row(dim, DP)
                at, mask = part[None, :] * D + dim[:, None], (dim < D)[:, None] & in_rows[None, :]
                values = (second_outs[b] if half else outs[b]) * (1 / SPLITS[2])
                tl.store(part_out + at, values.to(part_out.dtype.element_ty), mask=mask)
            tl.store(part_sums + part * 2, largests[b], mask=in_rows)
            tl.store(part_sums + part * 2 + 1, tl.sum(totals[b], axis=0), mask=in_rows)
    if EARLY > 0:  # at the end: the next kernel's programs, were they here before, would slow this one down
        gdc_launch_dependents()


@triton.jit
def load_parts(part_out, part_sums, part, start, count, d, D: tl.constexpr, BLOCK: tl.constexpr):
    """Of BLOCK splits from `start` on, of which those from `count` on do not exist: values [BLOCK, CHUNK] at dims d, the
    largest score and the sum of weights [BLOCK]."""
    split = start + tl.arange(0, BLOCK)
    exists = split < count
    mask = exists[:, None] & (d < D)[None, :]
    values = tl.load(part_out + (part + split)[:, None] * D + d[None, :], mask=mask, other=0.0)
    largest = tl.load(part_sums + (part + split) * 2, mask=exists, other=float("-inf"))
    return values, largest, tl.load(part_sums + (part + split) * 2 + 1, mask=exists, other=0.0)


@triton.jit(do_not_specialize_on_alignment=["kv_lens"])
def merge_kernel(
    part_out, part_sums, kv_lens, signs, out, max_splits,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row of out [n * ROWS, D], ROWS = Q * HQ, and CHUNK dims: its splits in order, BLOCK at a time.

    signs [D] or None: the rotation to take back, which needs whole rows (CHUNK = DP). A program that no split concerns
    writes zeros. Splits in which the row sees nothing change no bit: a verified row may have more of them than decoded.

    A short kernel that runs once is mostly waiting, for memory and for its own code: so everything it needs is loaded at
    once, the next block before this one is worked on, and few splits at a time keep the code small.
    """
    wait_for_inputs(EARLY, 1)
    row = tl.program_id(0)
    count = num_splits(tl.load(kv_lens + row // ROWS).to(tl.int32), SPLITS)
    part = row.to(tl.int64) * max_splits
    d = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if signs is not None:
        sign = tl.load(signs + d, mask=d < D, other=0.0)
    values = tl.zeros([CHUNK], tl.float32)
    largest, total = float("-inf"), 0.0
    tile, tile_largest, tile_total = load_parts(part_out, part_sums, part, 0, count, d, D, BLOCK)
    for start in range(0, count, BLOCK):
        ahead = load_parts(part_out, part_sums, part, start + BLOCK, count, d, D, BLOCK)
        new_largest = tl.maximum(largest, tl.max(tile_largest, axis=0))
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight, shrink = tl.exp2(tile_largest - reference), tl.exp2(largest - reference)
        total = tl.fma(total, shrink, tl.sum(weight * tile_total, axis=0))
        values = tl.fma(values, shrink, tl.sum(tile.to(tl.float32) * weight[:, None], axis=0))
        largest = new_largest
        tile, tile_largest, tile_total = ahead
    values = values * (SPLITS[2] / tl.where(total > 0.0, total, 1.0))
    if signs is not None:
        values = hadamard(values, D, DP) * sign
    tl.store(out + row.to(tl.int64) * D + d, values.to(out.dtype.element_ty), mask=d < D)
