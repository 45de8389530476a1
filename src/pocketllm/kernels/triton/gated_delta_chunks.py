# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment, misc"
# ruff: noqa: RUF005  (Triton knows no starred tuples)
"""Gated DeltaNet in chunks, for prefill: what needs no state for all chunks at once, then a scan over the states.

Within a chunk of tokens, with G_i the sum of log decays up to token i, what token i writes along its key,
d_i + beta_i sum_{j<i} exp(G_i - G_j) (k_i . k_j) d_j = beta_i (v_i - exp(G_i) S^T k_i), is a triangular system: with the
inverse T of its matrix, D = T beta (V - exp(G) K S). `chunk_kernel` computes T beta, and the scores
exp(G_i - G_j) (q_i . k_j), both [CHUNK, CHUNK]: half the bytes of T beta V and T beta exp(G) K, which would spare the scan
one product. `scan_kernel` does the rest.

Chunks end on multiples of CHUNK from the start of the sequence, so where a prompt is cut (there) changes no bit. Products
are in the type of the activations, sums and states in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pocketllm.kernels.triton.gated_delta_kernels import head_channels, head_scale, move_rows, softplus
from pocketllm.kernels.triton.linear_kernels import wait_for_inputs
from pocketllm.kernels.triton.numerics import INTERPRETED, exp2, inverse
from pocketllm.kernels.triton.softmax import find_sequence

CHUNK = 64
_INTERPRETED = tl.constexpr(INTERPRETED)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    if _INTERPRETED:  # it knows no product of bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _by_token(at, mask):
    """The numbers [CHUNK] at these addresses in float32, each loaded by one thread.

    Summed over a second axis of one: else Triton would rather have every thread of a product load all that it needs, and
    compute what becomes of them, than pass the results on.
    """
    return tl.sum(tl.load(at[:, None], mask=mask[:, None], other=0.0).to(tl.float32), axis=1)


@triton.jit
def _columns(d, width, ALL: tl.constexpr):
    """Which columns of a tile [.., D] are real ones; without a comparison where all are (a mask then costs one a row)."""
    if ALL:
        return tl.full([1, 1], True, tl.int1)
    else:  # noqa: RET505  (Triton: one type of result for each branch)
        return (d < width)[None, :]


@triton.jit
def chunk_counts(bounds, kv_lens, num_seqs, index, CHUNK: tl.constexpr):
    """How many chunks each sequence index [NP] has in this pass."""
    real = index < num_seqs
    length = tl.load(bounds + index + 1, mask=real, other=0) - tl.load(bounds + index, mask=real, other=0)
    end = tl.load(kv_lens + index, mask=real, other=0)
    return (end + CHUNK - 1) // CHUNK - (end - length) // CHUNK


@triton.jit
def chunk_rows(bounds, kv_lens, seq, part, CHUNK: tl.constexpr):
    """(first row, number of tokens) of the part-th chunk of a sequence in this pass."""
    first = tl.load(bounds + seq)
    end = tl.load(kv_lens + seq)
    start = end - (tl.load(bounds + seq + 1) - first)  # position of the first row's token
    begin = tl.maximum((start // CHUNK + part) * CHUNK, start)
    return first + begin - start, tl.minimum((start // CHUNK + part + 1) * CHUNK, end) - begin


@triton.jit(do_not_specialize=["num_seqs"])
def conv_kernel(
    x, x_stride, weight, tail, slot_ids, bounds, num_seqs, out,
    HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, DP: tl.constexpr,
    RUNS: tl.constexpr, RUN: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """One program per head of q, k, v and block of RUNS * RUN tokens: out [T, C] are silu(conv(x)), q and k normalised.

    A tile holds one token of every run, so the tokens that the taps share stay in a thread's registers. A sequence's first
    program alone reads its tail, and so may move it on.
    """
    index = tl.arange(0, NP)
    starts = tl.load(bounds + index, mask=index < num_seqs, other=0)
    lengths = tl.load(bounds + index + 1, mask=index < num_seqs, other=0) - starts
    seq, part = find_sequence((lengths + RUNS * RUN - 1) // (RUNS * RUN), index, tl.program_id(1))
    if seq < num_seqs:
        head, start = tl.program_id(0), tl.load(bounds + seq)
        length, slot = tl.load(bounds + seq + 1) - start, tl.load(slot_ids + seq).to(tl.int64)
        channel, width = head_channels(head, HK, DK, DV)
        d = tl.arange(0, DP)
        c, inside = channel + d, _columns(d, width, DK == DP and DV == DP)
        old = tail + (slot * C + c) * (TAPS - 1)
        token = part * RUNS * RUN + tl.arange(0, RUNS) * RUN  # the first of each run
        row = (start + token).to(tl.int64)[:, None]
        at = x + row * x_stride + c[None, :]
        window, taps = (), ()
        for t in tl.static_range(RUN + TAPS - 1):  # all loads before the first store: they overlap
            place = (token + (t - (TAPS - 1)))[:, None]
            seen = (place >= 0) & (place < length) & inside
            window = window + (tl.load(at + (t - (TAPS - 1)) * x_stride, mask=seen, other=0.0),)
        for t in tl.static_range(TAPS):
            taps = taps + (tl.load(weight + c * TAPS + t, mask=d < width, other=0.0),)
        if part == 0:  # before the first run's tokens stands the tail
            for t in tl.static_range(TAPS - 1):
                kept = tl.load(old + t, mask=d < width, other=0.0).to(x.dtype.element_ty)
                value = tl.where((token == 0)[:, None], kept[None, :], window[t])
                window = window[:t] + (value,) + window[t + 1 :]
        for t in tl.static_range(RUN):
            y = window[t].to(tl.float32) * taps[0][None, :]
            for tap in tl.static_range(1, TAPS):
                y += window[t + tap].to(tl.float32) * taps[tap][None, :]
            y = y * inverse(1.0 + exp2(-LOG2_E * y))
            if head < 2 * HK:
                y = y * head_scale(tl.sum(y * y, axis=1), head, HK, DK)[:, None]
            keep = (token + t < length)[:, None] & inside
            tl.store(out + row * C + c[None, :] + t * C, y.to(out.dtype.element_ty), mask=keep)
        if part == 0:
            move_rows(old, x + start.to(tl.int64) * x_stride + c, x_stride, length, d < width, TAPS)


@triton.jit
def _join_blocks(inverse, lower, SIZE: tl.constexpr, EXACT: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """From the inverse of the diagonal blocks of SIZE to that of blocks twice as large."""
    block = tl.arange(0, CHUNK) // SIZE
    between = (block % 2 == 1)[:, None] & (block[:, None] == block[None, :] + 1)
    linked, short = tl.where(between, lower, 0.0), inverse
    if not EXACT:
        linked, short = linked.to(tl.float16), short.to(tl.float16)
    product = _dot(linked, short, tl.zeros([CHUNK, CHUNK], tl.float32), PRECISION)
    return _dot(short, product.to(short.dtype), inverse, PRECISION)


@triton.jit
def unit_lower_inverse(
    lower, BASE: tl.constexpr, EXACT: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """(I - lower)^-1 [CHUNK, CHUNK] of a matrix that is zero above the diagonal, and taken to be zero on it.

    Blocks of BASE on the diagonal by substitution; then twice the blocks' size at a time: with D the inverse of the diagonal
    blocks and E the part of `lower` between two neighbours, that of both together is D + D E D. If not EXACT, products
    are of fp16, whose fraction is as long as tf32's: keys have unit length, so no element is much above 1.
    """
    N: tl.constexpr = CHUNK // BASE
    i, n = tl.arange(0, BASE), tl.arange(0, N)
    same = (n[:, None] == n[None, :])[:, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(lower, [N, BASE, N, BASE]), 0.0), axis=2)  # [N, BASE, BASE]
    diagonal = tl.where((i[:, None] > i[None, :])[None, :, :], diagonal, 0.0)
    inverse = tl.where((i[:, None] == i[None, :])[None, :, :], 1.0, tl.zeros([N, BASE, BASE], tl.float32))
    for k in range(BASE - 1):  # row k is done: add it to the rows below
        row = tl.sum(tl.where((i == k)[None, :, None], inverse, 0.0), axis=1)
        column = tl.sum(tl.where((i == k)[None, None, :], diagonal, 0.0), axis=2)
        inverse += column[:, :, None] * row[:, None, :]
    inverse = tl.where(same, inverse[:, :, None, :], tl.zeros([N, BASE, N, BASE], tl.float32))
    whole = tl.reshape(inverse, [CHUNK, CHUNK])
    for step in tl.static_range(6):
        if BASE << step < CHUNK:
            whole = _join_blocks(whole, lower, BASE << step, EXACT, CHUNK, PRECISION)
    return whole


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def chunk_kernel(
    qkv, b, b_stride, a, a_stride, a_log, dt_bias, bounds, kv_lens, num_seqs, num_tokens, solves, scores, decays,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, DKP: tl.constexpr,
    CHUNK: tl.constexpr, BASE: tl.constexpr, NP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per value head and chunk: T diag(beta) to solves [HV, T, CHUNK], the scores to
    scores [HV, T, CHUNK] and G / ln 2 to decays [HV, T]."""
    index = tl.arange(0, NP)
    counts = chunk_counts(bounds, kv_lens, num_seqs, index, CHUNK)
    seq, part = find_sequence(counts, index, tl.program_id(1))
    if seq < num_seqs:
        first, size = chunk_rows(bounds, kv_lens, seq, part, CHUNK)
        r, i = tl.arange(0, CHUNK), tl.arange(0, DKP)
        rows, real = (first + r).to(tl.int64), r < size
        in_k = real[:, None] & _columns(i, DK, DK == DKP)
        head = tl.program_id(0)
        at = qkv + rows[:, None] * C + (head // (HV // HK) * DK + i)[None, :]
        q = tl.load(at, mask=in_k, other=0.0)
        k = tl.load(at + HK * DK, mask=in_k, other=0.0)
        nothing = tl.zeros([CHUNK, CHUNK], tl.float32)
        rate, shift = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
        g = -rate * LOG2_E * softplus(_by_token(a + rows * a_stride + head, real) + shift)
        total = tl.cumsum(tl.where(real, g, 0.0), axis=0)
        beta = tl.sigmoid(_by_token(b + rows * b_stride + head, real))
        place = head.to(tl.int64) * num_tokens + rows
        tl.store(decays + place, total, mask=real)
        tile = place[:, None] * CHUNK + r[None, :]
        ratio = exp2(tl.where(r[:, None] >= r[None, :], total[:, None] - total[None, :], float("-inf")))
        score = _dot(q, tl.trans(k), nothing, PRECISION) * ratio
        tl.store(scores + tile, score.to(scores.dtype.element_ty), mask=real[:, None])
        lower = _dot(k, tl.trans(k), nothing, PRECISION) * ratio * -beta[:, None]
        solve = unit_lower_inverse(lower, BASE, q.dtype == tl.float32, CHUNK, PRECISION) * beta[None, :]
        tl.store(solves + tile, solve.to(solves.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def scan_kernel(
    qkv, solves, scores, decays, states, slot_ids, bounds, kv_lens, num_tokens, out,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    DKP: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per sequence, value head and BLOCK_V columns of the state: out [T, HV, DV], not normalised yet.

    All is transposed, with a column of the state as a row: then each product's left factor is the last one's result, which
    stays in registers, and only what is loaded goes through shared memory.
    """
    seq, head = tl.program_id(2), tl.program_id(1)
    slot = tl.load(slot_ids + seq).to(tl.int64)
    r, i, j = tl.arange(0, CHUNK), tl.arange(0, DKP), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    state_at = states + (slot * HV + head) * (DK * DV) + i[None, :] * DV + j[:, None]
    in_state = (i < DK)[None, :] & (j < DV)[:, None]
    state = tl.load(state_at, mask=in_state, other=0.0)  # [BLOCK_V, DKP]
    begin, end = tl.load(bounds + seq), tl.load(kv_lens + seq)
    start = end - (tl.load(bounds + seq + 1) - begin)  # position of the first row's token
    keys, values = qkv + head // (HV // HK) * DK, qkv + 2 * HK * DK + head * DV
    in_keys, in_values = r[:, None] * C + i[None, :], r[:, None] * C + j[None, :]
    in_out, in_tile = r[:, None] * (HV * DV) + j[None, :], r[:, None] * CHUNK + r[None, :]
    k_inside, v_inside = _columns(i, DK, DK == DKP), _columns(j, DV, DV % BLOCK_V == 0)
    decays += head.to(tl.int64) * num_tokens + begin - start  # of position 0
    last = tl.load(decays + tl.minimum((start // CHUNK + 1) * CHUNK, end) - 1, mask=start < end, other=0.0)
    for position in range(start // CHUNK * CHUNK, end, CHUNK):
        here, there = tl.maximum(position, start), tl.minimum(position + CHUNK, end)
        real = r < there - here
        row = (begin - start + here).to(tl.int64)
        place = (head.to(tl.int64) * num_tokens + row) * CHUNK
        k = tl.load(keys + (row * C + HK * DK) + in_keys, mask=real[:, None] & k_inside, other=0.0)
        q = tl.load(keys + row * C + in_keys, mask=real[:, None] & k_inside, other=0.0)
        value = tl.load(values + row * C + in_values, mask=real[:, None] & v_inside, other=0.0)
        solve = tl.load(solves + place + in_tile, mask=real[:, None], other=0.0)
        score = tl.load(scores + place + in_tile, mask=real[:, None], other=0.0)
        total = _by_token(decays + here + r, real)
        # A step ahead, as its latency would be waited for.
        next_last = tl.load(decays + tl.minimum(there + CHUNK, end) - 1)
        grown, fade = exp2(total), exp2(last - total)
        nothing = tl.zeros([BLOCK_V, CHUNK], tl.float32)
        # First a product without the state: until it is done, the state's own product of the last step may go on.
        written = _dot(tl.trans(value), tl.trans(solve), nothing, PRECISION)
        short = state.to(q.dtype)
        known = _dot(short, tl.trans(k), nothing, PRECISION)
        known = (known * -grown[None, :]).to(q.dtype)
        o = _dot(short, tl.trans(q), nothing, PRECISION) * grown[None, :]
        written = _dot(known, tl.trans(solve), written, PRECISION)
        o = _dot(written.to(q.dtype), tl.trans(score), o, PRECISION)
        kept = (written * fade[None, :]).to(q.dtype)
        state = _dot(kept, k, state * exp2(last), PRECISION)
        tl.store(
            out + (row * HV + head) * DV + in_out, tl.trans(o).to(out.dtype.element_ty), mask=real[:, None] & v_inside
        )
        last = next_last
    tl.store(state_at, state, mask=in_state)


@triton.jit(do_not_specialize=["num_rows"])
def gated_norm_kernel(
    raw, z, z_stride, norm, out, num_rows, eps,
    HV: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per ROWS rows of raw [T * HV, DV] -> out: RMS norm times silu(z). They may be the same."""
    wait_for_inputs(EARLY, 1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, DVP)
    mask = (row < num_rows)[:, None] & (j < DV)[None, :]
    at = row.to(tl.int64)[:, None] * DV + j[None, :]
    o = tl.load(raw + at, mask=mask, other=0.0).to(tl.float32)
    o = o * tl.rsqrt(tl.sum(o * o, axis=1) / DV + eps)[:, None] * tl.load(norm + j, mask=j < DV, other=0.0)[None, :]
    z_at = z + (row // HV).to(tl.int64)[:, None] * z_stride + (row % HV * DV)[:, None] + j[None, :]
    gate = tl.load(z_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, (o * gate * tl.sigmoid(gate)).to(out.dtype.element_ty), mask=mask)
