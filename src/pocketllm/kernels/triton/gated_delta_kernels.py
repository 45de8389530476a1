# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment, var-annotated"
# ruff: noqa: RUF005  (Triton knows no starred tuples)
"""Gated DeltaNet token by token, for decode and verify: the convolution, then the delta rule on the states of the slots
and the gated norm of what it gives.

The convolution is a kernel of its own because the value heads of one key head share its channels: if each of them did
that part, one would have to wait for the others before it moves the tail on.

Decode and verify run the same compiled code, with the number of tokens as an argument, and `commit` spells out its one
fused multiply-add as they do. So a verified token is a decoded one to the last bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pocketllm.kernels.triton.linear_kernels import wait_for_inputs
from pocketllm.kernels.triton.pairs import pair_of


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

    Decode moves the slot's tail on, verify writes the journal instead. Slots, weights and tails may be read while the
    kernel before still runs, and even the one before that (a bridge lets the next kernel start before it has waited itself):
    these make x, and belong to other layers. Nothing earlier in the pass writes this layer's tails.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    seq, j = token // q_len, token % q_len
    slot = tl.load(slot_ids + seq).to(tl.int64)
    first, width = head_channels(head, HK, DK, DV)
    d = tl.arange(0, DP)
    mask, c = d < width, first + d
    old = tail + (slot * C + c) * (TAPS - 1)
    taps, kept = (), ()
    for t in tl.static_range(TAPS):
        taps = taps + (tl.load(weight + c * TAPS + t, mask=mask, other=0.0),)
        place = j + t - (TAPS - 1)  # in this pass; before it, in the tail
        kept = kept + (tl.load(old + (place + TAPS - 1), mask=mask & (place < 0), other=0.0),)
    wait_for_inputs(EARLY, 1)
    window = ()
    for t in tl.static_range(TAPS):  # all loads before the first sum: they overlap
        place = j + t - (TAPS - 1)
        row = (seq * q_len + place).to(tl.int64)
        new = tl.load(x + row * x_stride + c, mask=mask & (place >= 0), other=0.0)
        window = window + (tl.where(place >= 0, new.to(tl.float32), kept[t].to(tl.float32)),)
    y = tl.zeros([DP], tl.float32)
    for t in tl.static_range(TAPS):
        y = tl.fma(window[t], taps[t], y)
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


@triton.jit
def sum_of_parts(x, part_stride, mask, PARTS: tl.constexpr):
    """One number whose summands stand at x, x + part_stride, ...: float32, added in order."""
    total = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x + part * part_stride, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["b_part", "a_part", "q_len", "journal_len", "verify", "padded_rows"])
def delta_step_kernel(
    qkv, z, z_stride, b, b_part, b_stride, a, a_part, a_stride, a_log, dt_bias, norm, eps, states, journal_d, journal_g,
    slot_ids, q_len, journal_len, verify, out, scales, padded_rows,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, WARPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per sequence and value head, whose state [DK, DV] stays in registers for all q_len tokens. It has whole
    rows of the head's output, and so normalises them too: RMS norm times silu(z).

    qkv [n * q_len, C] float32 as `conv_step_kernel` leaves it; b, a [PARTS, n * q_len, HV]. out [n * q_len, HV * DV]; or
    with scales [HV, 2 padded_rows] (DV is 128 then), codes e4m3 [2 padded_rows, HV * DV]: `types.Paired`.
    States, a and b may be read while that kernel still runs: it does not write them, and all before it has ended, as it
    waits before it lets this one start (EARLY is 2 at most).
    """
    seq, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ids + seq).to(tl.int64)
    # Rows of the state as [WARPS, DKP / WARPS]: a warp has one of WARPS neighbours, and its others lie at distances known
    # when this is compiled. Added last, these need no registers for addresses.
    first, more = tl.arange(0, WARPS)[:, None], tl.arange(0, DKP // WARPS)[None, :] * WARPS
    j = tl.arange(0, DVP)
    in_i, in_j = first + more < DK, j < DV
    in_state = in_i[:, :, None] & in_j[None, None, :]
    at = states + (slot * HV + head) * (DK * DV) + (first[:, :, None] * DV + j[None, None, :]) + more[:, :, None] * DV
    state = tl.load(at, mask=in_state, other=0.0)
    key_channel, value_channel = head // (HV // HK) * DK, 2 * HK * DK + head * DV
    rate, shift = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    token = seq * q_len  # 32 bits do for all it is multiplied by: nobody has states for 100,000 tokens of steps
    next_a = sum_of_parts(a + token * a_stride + head, a_part, True, PARTS)
    next_b = sum_of_parts(b + token * b_stride + head, b_part, True, PARTS)
    for step in range(q_len):
        wait_for_inputs(
            EARLY, 1
        )  # here, so that what a compiler takes out of the loop comes before; again it costs nothing
        row = qkv + token * C
        k = tl.load(row + HK * DK + key_channel + first + more, mask=in_i, other=0.0)[:, :, None]
        v = tl.load(row + value_channel + j, mask=in_j, other=0.0)
        q = tl.load(row + key_channel + first + more, mask=in_i, other=0.0)[:, :, None]
        gate = tl.load(z + token * z_stride + head * DV + j, mask=in_j, other=0.0).to(tl.float32)
        decay, beta = tl.exp(-rate * softplus(next_a + shift)), tl.sigmoid(next_b)
        state = state * decay
        written = beta * (v - tl.sum(tl.sum(state * k, axis=1), axis=0))
        gain = tl.load(norm + j, mask=in_j, other=0.0)  # no earlier: registers are short
        state = tl.fma(tl.broadcast_to(k, state.shape), tl.broadcast_to(written[None, None, :], state.shape), state)
        if verify != 0:
            entry = (slot * journal_len + step) * HV + head
            tl.store(journal_d + entry * DV + j, written, mask=in_j)
            tl.store(journal_g + entry, decay)
        o = tl.sum(tl.sum(state * q, axis=1), axis=0)
        o = o * tl.rsqrt(tl.sum(o * o, axis=0) / DV + eps) * gain
        o = o * gate * tl.sigmoid(gate)
        if scales is None:
            tl.store(out + (token * HV + head) * DV + j, o.to(out.dtype.element_ty), mask=in_j)
        else:
            high, low, scale = pair_of(o)
            second = token + padded_rows
            tl.store(out + (token * HV + head) * DV + j, high)
            tl.store(out + (second * HV + head) * DV + j, low)
            tl.store(scales + head * (2 * padded_rows) + token, scale)
            tl.store(scales + head * (2 * padded_rows) + second, scale / 16)
        token += 1
        another = step + 1 < q_len
        next_a = sum_of_parts(a + token * a_stride + head, a_part, another, PARTS)
        next_b = sum_of_parts(b + token * b_stride + head, b_part, another, PARTS)
    if verify == 0:
        tl.store(at, state, mask=in_state)


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
