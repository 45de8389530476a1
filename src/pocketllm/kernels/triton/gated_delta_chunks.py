# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
"""Gated DeltaNet in chunks, for prefill: what needs no state for all chunks at once, then a scan over the states.

Within a chunk of tokens, with G_i the sum of log decays up to token i, what token i writes along its key,
d_i + beta_i sum_{j<i} exp(G_i - G_j) (k_i . k_j) d_j = beta_i (v_i - exp(G_i) S^T k_i), is a triangular system: with the
inverse T of its matrix, D = T (beta V) - T (beta exp(G) K) S. `chunk_kernel` computes both factors, and the scores
exp(G_i - G_j) (q_i . k_j); `scan_kernel` then needs only four matrix products a chunk.

Chunks end on multiples of CHUNK from the start of the sequence, so where a prompt is cut (there) changes no bit. Products
are in the type of the activations, sums and states in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pocketllm.kernels.triton.gated_delta_kernels import head_channels, head_scale, move_rows, softplus
from pocketllm.kernels.triton.linear_kernels import wait_for_inputs
from pocketllm.kernels.triton.numerics import INTERPRETED
from pocketllm.kernels.triton.softmax import find_sequence

CHUNK = 64
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    if _INTERPRETED:  # it knows no product of bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc, input_precision=PRECISION)


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
    BLOCK: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """One program per block of tokens and head of q, k, v: out [T, C] are silu(conv(x)), q and k normalised.

    A sequence's first program alone reads its tail, and so may move it on.
    """
    index = tl.arange(0, NP)
    starts = tl.load(bounds + index, mask=index < num_seqs, other=0)
    lengths = tl.load(bounds + index + 1, mask=index < num_seqs, other=0) - starts
    seq, part = find_sequence((lengths + BLOCK - 1) // BLOCK, index, tl.program_id(0))
    if seq < num_seqs:
        head, start = tl.program_id(1), tl.load(bounds + seq)
        length, slot = tl.load(bounds + seq + 1) - start, tl.load(slot_ids + seq).to(tl.int64)
        channel, width = head_channels(head, HK, DK, DV)
        d = tl.arange(0, DP)
        c = channel + d
        token = part * BLOCK + tl.arange(0, BLOCK)
        mask = (token < length)[:, None] & (d < width)[None, :]
        old = tail + (slot * C + c) * (TAPS - 1)
        y = tl.zeros([BLOCK, DP], tl.float32)
        for t in tl.static_range(TAPS):
            place = token + t - (TAPS - 1)
            at = x + (start + place).to(tl.int64)[:, None] * x_stride + c[None, :]
            new = tl.load(at, mask=mask & (place >= 0)[:, None], other=0.0).to(tl.float32)
            kept_at = old[None, :] + (place + TAPS - 1)[:, None]
            kept = tl.load(kept_at, mask=mask & (place < 0)[:, None], other=0.0).to(tl.float32)
            tap = tl.load(weight + c * TAPS + t, mask=d < width, other=0.0)
            y += (new + kept) * tap[None, :]  # one of the two is zero
        y = y * tl.sigmoid(y)
        y = y * head_scale(tl.sum(y * y, axis=1), head, HK, DK)[:, None]
        rows = (start + token).to(tl.int64)
        tl.store(out + rows[:, None] * C + c[None, :], y.to(out.dtype.element_ty), mask=mask)
        if part == 0:
            move_rows(old, x + start.to(tl.int64) * x_stride + c, x_stride, length, d < width, TAPS)


@triton.jit
def _join_blocks(inverse, lower, SIZE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """From the inverse of the diagonal blocks of SIZE to that of blocks twice as large."""
    block = tl.arange(0, CHUNK) // SIZE
    between = (block % 2 == 1)[:, None] & (block[:, None] == block[None, :] + 1)
    nothing = tl.zeros([CHUNK, CHUNK], tl.float32)
    product = _dot(tl.where(between, lower, 0.0), inverse, nothing, PRECISION)
    return inverse - _dot(inverse, product, nothing, PRECISION)


@triton.jit
def unit_lower_inverse(lower, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 [CHUNK, CHUNK] of a strictly lower triangular matrix.

    Blocks of 16 on the diagonal by substitution; then twice the blocks' size at a time: with D the inverse of the diagonal
    blocks and E the part of `lower` between two neighbours, that of both together is D - D E D.
    """
    B: tl.constexpr = 16
    N: tl.constexpr = CHUNK // B
    i, n = tl.arange(0, B), tl.arange(0, N)
    same = (n[:, None] == n[None, :])[:, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(lower, [N, B, N, B]), 0.0), axis=2)  # [N, B, B]
    inverse = tl.where((i[:, None] == i[None, :])[None, :, :], 1.0, tl.zeros([N, B, B], tl.float32))
    for k in range(B - 1):  # row k is done: take it from the rows below
        row = tl.sum(tl.where((i == k)[None, :, None], inverse, 0.0), axis=1)
        column = tl.sum(tl.where((i == k)[None, None, :], diagonal, 0.0), axis=2)
        inverse = inverse - column[:, :, None] * row[:, None, :]
    whole = tl.reshape(tl.where(same, inverse[:, :, None, :], tl.zeros([N, B, N, B], tl.float32)), [CHUNK, CHUNK])
    whole = _join_blocks(whole, lower, B, CHUNK, PRECISION)
    return _join_blocks(whole, lower, 2 * B, CHUNK, PRECISION)


@triton.jit(do_not_specialize=["num_seqs"])
def chunk_kernel(
    qkv, b, b_stride, a, a_stride, a_log, dt_bias, bounds, kv_lens, num_seqs, keys, values, scores, decays,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, CHUNK: tl.constexpr, NP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per chunk and value head: T (beta exp(G) K) to keys [T, HV, DK], T (beta V) to values [T, HV, DV], the
    scores to scores [T, HV, CHUNK] and G to decays [T, HV]."""
    index = tl.arange(0, NP)
    counts = chunk_counts(bounds, kv_lens, num_seqs, index, CHUNK)
    seq, part = find_sequence(counts, index, tl.program_id(0))
    if seq < num_seqs:
        head = tl.program_id(1)
        first, size = chunk_rows(bounds, kv_lens, seq, part, CHUNK)
        r, i, j = tl.arange(0, CHUNK), tl.arange(0, DKP), tl.arange(0, DVP)
        rows, real = (first + r).to(tl.int64), r < size
        key_channel = head // (HV // HK) * DK
        in_k, in_v = real[:, None] & (i < DK)[None, :], real[:, None] & (j < DV)[None, :]
        row = qkv + rows * C
        q = tl.load(row[:, None] + (key_channel + i)[None, :], mask=in_k, other=0.0)
        k = tl.load(row[:, None] + (HK * DK + key_channel + i)[None, :], mask=in_k, other=0.0)
        v = tl.load(row[:, None] + (2 * HK * DK + head * DV + j)[None, :], mask=in_v, other=0.0)
        rate, shift = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
        g = -rate * softplus(tl.load(a + rows * a_stride + head, mask=real, other=0.0).to(tl.float32) + shift)
        total = tl.cumsum(tl.where(real, g, 0.0), axis=0)
        beta = tl.sigmoid(tl.load(b + rows * b_stride + head, mask=real, other=0.0).to(tl.float32))
        ratio = tl.exp(tl.where(r[:, None] >= r[None, :], total[:, None] - total[None, :], float("-inf")))
        nothing = tl.zeros([CHUNK, CHUNK], tl.float32)
        score = _dot(q, tl.trans(k), nothing, PRECISION) * ratio
        at = rows * HV + head
        tl.store(scores + at[:, None] * CHUNK + r[None, :], score.to(scores.dtype.element_ty), mask=real[:, None])
        tl.store(decays + at, total, mask=real)
        lower = _dot(k, tl.trans(k), nothing, PRECISION) * ratio * beta[:, None]
        lower = tl.where(r[:, None] > r[None, :], lower, 0.0)
        inverse = unit_lower_inverse(lower, CHUNK, PRECISION).to(k.dtype)
        weighted = (k.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(k.dtype)
        solved = _dot(inverse, weighted, tl.zeros([CHUNK, DKP], tl.float32), PRECISION)
        tl.store(keys + at[:, None] * DK + i[None, :], solved.to(keys.dtype.element_ty), mask=in_k)
        weighted = (v.to(tl.float32) * beta[:, None]).to(v.dtype)
        solved = _dot(inverse, weighted, tl.zeros([CHUNK, DVP], tl.float32), PRECISION)
        tl.store(values + at[:, None] * DV + j[None, :], solved.to(values.dtype.element_ty), mask=in_v)


@triton.jit
def scan_kernel(
    qkv, keys, values, scores, decays, states, slot_ids, bounds, kv_lens, out,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    DKP: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per sequence, value head and BLOCK_V columns of the state: out [T, HV, DV], not normalised yet."""
    seq, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ids + seq).to(tl.int64)
    r, i, j = tl.arange(0, CHUNK), tl.arange(0, DKP), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_state = (i < DK)[:, None] & (j < DV)[None, :]
    state_at = states + (slot * HV + head) * (DK * DV) + i[:, None] * DV + j[None, :]
    state = tl.load(state_at, mask=in_state, other=0.0)
    key_channel = head // (HV // HK) * DK
    for part in range(tl.sum(chunk_counts(bounds, kv_lens, seq + 1, seq + tl.arange(0, 1), CHUNK), axis=0)):
        first, size = chunk_rows(bounds, kv_lens, seq, part, CHUNK)
        rows, real = (first + r).to(tl.int64), r < size
        in_k, in_v = real[:, None] & (i < DK)[None, :], real[:, None] & (j < DV)[None, :]
        at = rows * HV + head
        key = tl.load(keys + at[:, None] * DK + i[None, :], mask=in_k, other=0.0)
        value = tl.load(values + at[:, None] * DV + j[None, :], mask=in_v, other=0.0)
        q = tl.load(qkv + rows[:, None] * C + (key_channel + i)[None, :], mask=in_k, other=0.0)
        k = tl.load(qkv + rows[:, None] * C + (HK * DK + key_channel + i)[None, :], mask=in_k, other=0.0)
        score = tl.load(scores + at[:, None] * CHUNK + r[None, :], mask=real[:, None], other=0.0)
        total = tl.load(decays + at, mask=real, other=0.0)
        last = tl.load(decays + (first + size - 1).to(tl.int64) * HV + head)
        nothing = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        short = state.to(q.dtype)
        written = value.to(tl.float32) - _dot(key, short, nothing, PRECISION)
        o = _dot(q, short, nothing, PRECISION) * tl.exp(total)[:, None]
        o = _dot(score, written.to(q.dtype), o, PRECISION)
        tl.store(out + at[:, None] * DV + j[None, :], o.to(out.dtype.element_ty), mask=in_v)
        kept = (written * tl.exp(last - total)[:, None]).to(q.dtype)
        state = _dot(tl.trans(k), kept, state * tl.exp(last), PRECISION)
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
