# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment, var-annotated"
# ruff: noqa: RUF005  (Triton knows no starred tuples)
"""Gated DeltaNet token by token, for decode and verify: the convolution, then the delta rule on the states of the slots.

The convolution is a kernel of its own because the value heads of one key head share its channels: if each of them did
that part, one would have to wait for the others before it moves the tail on.

Decode and verify run the same compiled code, with the number of tokens as an argument, and `commit` spells out its one
fused multiply-add as they do. So a verified token is a decoded one to the last bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pocketllm.kernels.triton.linear_kernels import wait_for_inputs


@triton.jit
def softplus(x):
    """log(1 + exp(x)) without overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def head_channels(head, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):
    """The first channel and the width of q, k and v heads, counted through: HK of q, HK of k, the rest of v."""
    is_value = head >= 2 * HK
    first = tl.where(is_value, 2 * HK * DK + (head - 2 * HK) * DV, head * DK)
    return first, tl.where(is_value, DV, DK)


@triton.jit
def head_scale(squares, head, HK: tl.constexpr, DK: tl.constexpr):
    """What a head of q (to unit length, over sqrt(DK)), k (to unit length) or v (1) is multiplied by."""
    unit = tl.rsqrt(squares + 1e-6)
    return tl.where(head < HK, unit * DK**-0.5, tl.where(head < 2 * HK, unit, 1.0))


@triton.jit(do_not_specialize=["q_len", "journal_len", "verify"])
def conv_step_kernel(
    x, x_stride, weight, tail, journal_x, journal_k, slot_ids, q_len, journal_len, verify, out,
    HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, DP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per token and head of q, k, v: out [n * q_len, C] float32 are silu(conv(x)), q and k normalised.

    Decode moves the slot's tail on, verify writes the journal instead.
    """
    wait_for_inputs(EARLY, 1)
    token, head = tl.program_id(0), tl.program_id(1)
    seq, j = token // q_len, token % q_len
    slot = tl.load(slot_ids + seq).to(tl.int64)
    first, width = head_channels(head, HK, DK, DV)
    d = tl.arange(0, DP)
    mask, c = d < width, first + d
    old = tail + (slot * C + c) * (TAPS - 1)
    y = tl.zeros([DP], tl.float32)
    window = ()
    for t in tl.static_range(TAPS):
        place = j + t - (TAPS - 1)  # in this pass; before it, in the tail
        row = (seq * q_len + place).to(tl.int64)
        new = tl.load(x + row * x_stride + c, mask=mask & (place >= 0), other=0.0)
        kept = tl.load(old + (place + TAPS - 1), mask=mask & (place < 0), other=0.0)
        value = tl.where(place >= 0, new.to(tl.float32), kept.to(tl.float32))
        y = tl.fma(value, tl.load(weight + c * TAPS + t, mask=mask, other=0.0), y)
        window = window + (value,)
    tl.debug_barrier()  # the tail has been read
    for t in tl.static_range(TAPS - 1):
        tl.store(old + t, window[t + 1].to(tail.dtype.element_ty), mask=mask & (verify == 0))
    at = journal_x + (slot * journal_len + j) * C + c
    tl.store(at, window[TAPS - 1].to(journal_x.dtype.element_ty), mask=mask & (verify != 0))
    y = y * tl.sigmoid(y)
    y = y * head_scale(tl.sum(y * y, axis=0), head, HK, DK)
    tl.store(out + token.to(tl.int64) * C + c, y, mask=mask)
    is_key = (head >= HK) & (head < 2 * HK)
    at = journal_k + ((slot * journal_len + j) * HK + head - HK) * DK + d
    tl.store(at, y, mask=mask & is_key & (verify != 0))


@triton.jit(do_not_specialize=["q_len", "journal_len", "verify"])
def delta_step_kernel(
    qkv, b, b_stride, a, a_stride, a_log, dt_bias, states, journal_d, journal_g, slot_ids, q_len, journal_len, verify, out,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    DKP: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per sequence, value head and BLOCK_V columns of its state [DK, DV], which stay in registers for all q_len
    tokens: columns never meet. Small programs, several to a multiprocessor, keep its memory busy while others compute.

    qkv [n * q_len, C] float32 as `conv_step_kernel` leaves it; out [n * q_len, HV * DV] float32, not normalised yet.
    States may be read while that kernel still runs: it does not write them, and all before it has ended.
    """
    seq, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ids + seq).to(tl.int64)
    i, j = tl.arange(0, DKP), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_i, in_j = i < DK, j < DV
    in_state = in_i[:, None] & in_j[None, :]
    at = states + (slot * HV + head) * (DK * DV) + i[:, None] * DV + j[None, :]
    state = tl.load(at, mask=in_state, other=0.0)
    key_channel, value_channel = head // (HV // HK) * DK, 2 * HK * DK + head * DV
    rate, shift = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    wait_for_inputs(EARLY, 1)
    for step in range(q_len):
        token = (seq * q_len + step).to(tl.int64)
        row = qkv + token * C
        q = tl.load(row + key_channel + i, mask=in_i, other=0.0)
        k = tl.load(row + HK * DK + key_channel + i, mask=in_i, other=0.0)
        v = tl.load(row + value_channel + j, mask=in_j, other=0.0)
        decay = tl.exp(-rate * softplus(tl.load(a + token * a_stride + head).to(tl.float32) + shift))
        beta = tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
        state = state * decay
        written = beta * (v - tl.sum(state * k[:, None], axis=0))
        state = tl.fma(
            tl.broadcast_to(k[:, None], [DKP, BLOCK_V]), tl.broadcast_to(written[None, :], [DKP, BLOCK_V]), state
        )
        entry = (slot * journal_len + step) * HV + head
        tl.store(journal_d + entry * DV + j, written, mask=in_j & (verify != 0))
        tl.store(journal_g + entry, decay, mask=(verify != 0) & (tl.program_id(2) == 0))
        tl.store(out + token * (HV * DV) + head * DV + j, tl.sum(state * q[:, None], axis=0), mask=in_j)
    tl.store(at, state, mask=in_state & (verify == 0))


@triton.jit
def move_rows(tail, x, stride, count, mask, TAPS: tl.constexpr):
    """Moves a tail [..., TAPS - 1] on by the `count` inputs that stand at x, x + stride, ..."""
    kept = ()
    for t in tl.static_range(TAPS - 1):
        place = count + t - (TAPS - 1)  # among the new inputs; before them, in the tail
        new = tl.load(x + tl.maximum(place, 0).to(tl.int64) * stride, mask=mask & (place >= 0), other=0.0)
        old = tl.load(tail + (place + TAPS - 1), mask=mask & (place < 0), other=0.0)
        kept = kept + (tl.where(place >= 0, new.to(tl.float32), old.to(tl.float32)),)
    tl.debug_barrier()  # the tail has been read
    for t in tl.static_range(TAPS - 1):
        tl.store(tail + t, kept[t].to(tail.dtype.element_ty), mask=mask)


@triton.jit
def move_tail(tail, journal_x, slot, count, journal_len, channels, mask, C: tl.constexpr, TAPS: tl.constexpr):
    """The last TAPS - 1 inputs of the tail followed by journal[:count] become the tail."""
    old = tail + (slot * C + channels) * (TAPS - 1)
    move_rows(old, journal_x + slot * journal_len * C + channels, C, count, mask, TAPS)


@triton.jit
def commit_kernel(
    states, tail, journal_x, journal_k, journal_d, journal_g, slot_ids, counts, journal_len,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """One program per sequence and value head; the first of a key head's also moves its channels of q and k on."""
    seq, head = tl.program_id(0), tl.program_id(1)
    slot, count = tl.load(slot_ids + seq).to(tl.int64), tl.load(counts + seq)
    i, j = tl.arange(0, DKP), tl.arange(0, DVP)
    in_i, in_j = i < DK, j < DV
    in_state = in_i[:, None] & in_j[None, :]
    key_head = head // (HV // HK)
    at = states + (slot * HV + head) * (DK * DV) + i[:, None] * DV + j[None, :]
    state = tl.load(at, mask=in_state, other=0.0)
    for step in range(count):
        entry = slot * journal_len + step
        k = tl.load(journal_k + (entry * HK + key_head) * DK + i, mask=in_i, other=0.0)
        written = tl.load(journal_d + (entry * HV + head) * DV + j, mask=in_j, other=0.0)
        state = state * tl.load(journal_g + entry * HV + head)
        state = tl.fma(tl.broadcast_to(k[:, None], [DKP, DVP]), tl.broadcast_to(written[None, :], [DKP, DVP]), state)
    tl.store(at, state, mask=in_state)
    move_tail(tail, journal_x, slot, count, journal_len, 2 * HK * DK + head * DV + j, in_j, C, TAPS)
    owner = in_i & (head % (HV // HK) == 0)
    move_tail(tail, journal_x, slot, count, journal_len, key_head * DK + i, owner, C, TAPS)
    move_tail(tail, journal_x, slot, count, journal_len, (HK + key_head) * DK + i, owner, C, TAPS)
