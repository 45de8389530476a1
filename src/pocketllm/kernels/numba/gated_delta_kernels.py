"""Gated DeltaNet as one kernel for prefill, decode and verify: the recurrence, token by token, fused with all around it.

A chunked form (`kernels.reference`) trades the recurrence for matrix products, which a GPU needs. On a CPU it saves
nothing: with a head dimension of 128 and chunks of 64 both take about 4 multiply-adds per state element and token, and
the recurrence finds a block of 64 columns of the state (32 KiB) in the L1 cache for all tokens of a pass. So every pass
does the same arithmetic, and a result does not depend on how a sequence was cut: prefill, decode and verify agree bit for
bit, and `commit` repeats what decode would have done.

Work is cut by (sequence, key head): a key head has its own channels of the convolution and serves r value heads.
Arguments that go together (addresses and sizes):

    inputs   (qkv, bytes a row, z, bytes a row, b, bytes a row, a, bytes a row)
    weights  (conv, taps, a_log, dt_bias, norm, eps)
    shape    (key heads, value heads, dk, dv)
    state    (conv, recurrent, journal x, k, d, g, journal length)
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from pocketllm.kernels.numba.format_simd import keep_alive, load_i32
from pocketllm.kernels.numba.runtime import kernel, parallel_for
from pocketllm.kernels.numba.simd import fma, load_f32, load_f32x16, splat, store_f32, store_f32x16
from pocketllm.kernels.numba.vector_math import silu, sum_lanes

BLOCK = 64  # tokens whose q, k, v are held in scratch memory at a time


@njit
def _convolve(x, row_bytes, start, count, channel, width, tail, conv, taps, out, scratch):
    """silu of the causal convolution of `width` channels for tokens start .. start + count - 1, into out [count, width].

    tail: address of the slot's last taps - 1 inputs [C, taps - 1]; scratch [taps + taps - 1 + count, width].
    """
    window = scratch + 4 * taps * width
    for j in range(taps):
        for c in range(width):
            store_f32(scratch + 4 * (j * width + c), load_f32(conv + 4 * ((channel + c) * taps + j)))
    for r in range(taps - 1 + count):
        token = start + r - (taps - 1)
        to = window + 4 * r * width
        if token < 0:
            for c in range(width):
                store_f32(to + 4 * c, load_f32(tail + 4 * ((channel + c) * (taps - 1) + token + taps - 1)))
        else:
            source = x + token * row_bytes + 4 * channel
            for c in range(0, width, 16):
                store_f32x16(to + 4 * c, load_f32x16(source + 4 * c))
    for t in range(count):
        for c in range(0, width, 16):
            y = load_f32x16(window + 4 * (t * width + c)) * load_f32x16(scratch + 4 * c)
            for j in range(1, taps):
                y = fma(load_f32x16(window + 4 * ((t + j) * width + c)), load_f32x16(scratch + 4 * (j * width + c)), y)
            store_f32x16(out + 4 * (t * width + c), silu(y))


@njit
def _keep_tail(x, row_bytes, count, channel, width, tail, taps):
    """Moves the last taps - 1 inputs of a sequence of `count` new tokens to `tail`."""
    kept = taps - 1
    for c in range(channel, channel + width):
        for j in range(kept):
            token = count - kept + j
            old = tail + 4 * (c * kept + max(token, 0 - kept) + kept)
            value = load_f32(old) if token < 0 else load_f32(x + token * row_bytes + 4 * c)
            store_f32(tail + 4 * (c * kept + j), value)


@njit
def _normalize(x, count, width, factor):
    """Rows of x to unit length (1e-6 added to the square), times factor."""
    for t in range(count):
        row = x + 4 * t * width
        squares = splat(0.0)
        for i in range(0, width, 16):
            y = load_f32x16(row + 4 * i)
            squares = fma(y, y, squares)
        scale = splat(np.float32(1) / np.sqrt(sum_lanes(squares) + np.float32(1e-6)) * factor)
        for i in range(0, width, 16):
            store_f32x16(row + 4 * i, load_f32x16(row + 4 * i) * scale)


@njit
def _delta_step_64(s, row_bytes, dk, q, k, v, o, decay, beta):
    """One token on 64 columns of the state at s. v [64] is replaced by what is written along k; o [64] is the output.

    Sums over dk run in two halves (even and odd rows), so that eight additions are under way at a time.
    """
    g, strength, zero = splat(decay), splat(beta), splat(0.0)
    a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
    at = s
    for i in range(0, dk, 2):
        k0, k1 = splat(load_f32(k + 4 * i)), splat(load_f32(k + 4 * i + 4))
        a0, a1 = fma(load_f32x16(at) * g, k0, a0), fma(load_f32x16(at + 64) * g, k0, a1)
        a2, a3 = fma(load_f32x16(at + 128) * g, k0, a2), fma(load_f32x16(at + 192) * g, k0, a3)
        at += row_bytes
        b0, b1 = fma(load_f32x16(at) * g, k1, b0), fma(load_f32x16(at + 64) * g, k1, b1)
        b2, b3 = fma(load_f32x16(at + 128) * g, k1, b2), fma(load_f32x16(at + 192) * g, k1, b3)
        at += row_bytes
    d0, d1 = strength * (load_f32x16(v) - (a0 + b0)), strength * (load_f32x16(v + 64) - (a1 + b1))
    d2, d3 = strength * (load_f32x16(v + 128) - (a2 + b2)), strength * (load_f32x16(v + 192) - (a3 + b3))
    store_f32x16(v, d0)
    store_f32x16(v + 64, d1)
    store_f32x16(v + 128, d2)
    store_f32x16(v + 192, d3)
    a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
    at = s
    for i in range(0, dk, 2):
        k0, k1 = splat(load_f32(k + 4 * i)), splat(load_f32(k + 4 * i + 4))
        q0, q1 = splat(load_f32(q + 4 * i)), splat(load_f32(q + 4 * i + 4))
        s0, s1 = fma(k0, d0, load_f32x16(at) * g), fma(k0, d1, load_f32x16(at + 64) * g)
        s2, s3 = fma(k0, d2, load_f32x16(at + 128) * g), fma(k0, d3, load_f32x16(at + 192) * g)
        store_f32x16(at, s0)
        store_f32x16(at + 64, s1)
        store_f32x16(at + 128, s2)
        store_f32x16(at + 192, s3)
        a0, a1, a2, a3 = fma(s0, q0, a0), fma(s1, q0, a1), fma(s2, q0, a2), fma(s3, q0, a3)
        at += row_bytes
        s0, s1 = fma(k1, d0, load_f32x16(at) * g), fma(k1, d1, load_f32x16(at + 64) * g)
        s2, s3 = fma(k1, d2, load_f32x16(at + 128) * g), fma(k1, d3, load_f32x16(at + 192) * g)
        store_f32x16(at, s0)
        store_f32x16(at + 64, s1)
        store_f32x16(at + 128, s2)
        store_f32x16(at + 192, s3)
        b0, b1, b2, b3 = fma(s0, q1, b0), fma(s1, q1, b1), fma(s2, q1, b2), fma(s3, q1, b3)
        at += row_bytes
    store_f32x16(o, a0 + b0)
    store_f32x16(o + 64, a1 + b1)
    store_f32x16(o + 128, a2 + b2)
    store_f32x16(o + 192, a3 + b3)


@njit
def _delta_step_16(s, row_bytes, dk, q, k, v, o, decay, beta):
    """The same on 16 columns, for heads whose size is no multiple of 64."""
    g, a, b = splat(decay), splat(0.0), splat(0.0)
    for i in range(0, dk, 2):
        at = s + i * row_bytes
        a = fma(load_f32x16(at) * g, splat(load_f32(k + 4 * i)), a)
        b = fma(load_f32x16(at + row_bytes) * g, splat(load_f32(k + 4 * i + 4)), b)
    d = splat(beta) * (load_f32x16(v) - (a + b))
    store_f32x16(v, d)
    a, b = splat(0.0), splat(0.0)
    for i in range(0, dk, 2):
        at = s + i * row_bytes
        x = fma(splat(load_f32(k + 4 * i)), d, load_f32x16(at) * g)
        y = fma(splat(load_f32(k + 4 * i + 4)), d, load_f32x16(at + row_bytes) * g)
        store_f32x16(at, x)
        store_f32x16(at + row_bytes, y)
        a, b = fma(x, splat(load_f32(q + 4 * i)), a), fma(y, splat(load_f32(q + 4 * i + 4)), b)
    store_f32x16(o, a + b)


@njit
def _delta_rule(s, dk, dv, q, k, v, o, gates, count, keep, block):
    """`count` tokens on a state [dk, dv]: v [count, dv] becomes what was written, o [count, dv] the output.

    keep: the state moves forward; else it stays as it was. Several tokens work on a dense copy, in `block` [dk, 64], of 64
    columns at a time: in place, rows 512 bytes apart would share a few sets of the L1 cache.
    """
    dense = count > 1 or not keep
    for c in range(0, dv, 64):
        width = min(64, dv - c)
        state, row_bytes = s + 4 * c, 4 * dv
        if dense:
            _copy_rows(state, 4 * dv, block, 256, dk, width)
            state, row_bytes = block, 256
        for t in range(count):
            at, q_at, k_at = 4 * (t * dv + c), q + 4 * t * dk, k + 4 * t * dk
            decay, beta = load_f32(gates + 8 * t), load_f32(gates + 8 * t + 4)
            if width == 64:
                _delta_step_64(state, row_bytes, dk, q_at, k_at, v + at, o + at, decay, beta)
            else:
                for i in range(0, 4 * width, 64):
                    _delta_step_16(state + i, row_bytes, dk, q_at, k_at, v + at + i, o + at + i, decay, beta)
        if dense and keep:
            _copy_rows(block, 256, s + 4 * c, 4 * dv, dk, width)


@njit
def _copy_rows(source, source_row, target, target_row, rows, width):
    for r in range(rows):
        for i in range(0, 4 * width, 64):
            store_f32x16(target + r * target_row + i, load_f32x16(source + r * source_row + i))


@njit
def _gates(a, b, a_log, dt_bias):
    """(decay factor, write strength) of one token and value head."""
    x = a + dt_bias
    softplus = x if x > np.float32(20) else np.float32(math.log1p(math.exp(x)))
    decay = np.float32(math.exp(-np.float32(math.exp(a_log)) * softplus))
    return decay, np.float32(1) / (np.float32(1) + np.float32(math.exp(-b)))


@njit
def _gated_norm(o, z, norm, eps, dv, out):
    squares = splat(0.0)
    for i in range(0, dv, 16):
        x = load_f32x16(o + 4 * i)
        squares = fma(x, x, squares)
    scale = splat(np.float32(1) / np.sqrt(sum_lanes(squares) / np.float32(dv) + eps))
    for i in range(0, dv, 16):
        y = load_f32x16(o + 4 * i) * scale * load_f32x16(norm + 4 * i)
        store_f32x16(out + 4 * i, y * silu(load_f32x16(z + 4 * i)))


@njit
def _copy(source, target, count):
    for i in range(0, count, 16):
        store_f32x16(target + 4 * i, load_f32x16(source + 4 * i))


@kernel
def _sequences(begin, end, inputs, weights, shape, state, slot_ids, bounds, q_len, verify, out):
    """One item: a sequence and a key head. Sequence i has q_len tokens from i * q_len on, or those `bounds` tells."""
    qkv, qkv_row, z, z_row, b, b_row, a, a_row = inputs
    conv, taps, a_log, dt_bias, norm, eps = weights
    key_heads, value_heads, dk, dv = shape
    conv_state, recurrent, journal_x, journal_k, journal_d, journal_g, journal_length = state
    per_key, channels, widest = value_heads // key_heads, 2 * key_heads * dk + value_heads * dv, max(dk, dv)
    scratch = np.empty(dk * 64 + BLOCK * (2 * dk + 2 * dv + 2) + (2 * taps + BLOCK) * widest + 16, np.float32)
    block = scratch.ctypes.data
    q = block + 4 * dk * 64
    k, v = q + 4 * BLOCK * dk, q + 8 * BLOCK * dk
    o, gates = v + 4 * BLOCK * dv, v + 8 * BLOCK * dv
    window = gates + 8 * BLOCK
    for item in range(begin, end):
        i, head = item // key_heads, item % key_heads
        first = i * q_len if bounds == 0 else load_i32(bounds + 4 * i)
        length = q_len if bounds == 0 else load_i32(bounds + 4 * i + 4) - first
        slot = load_i32(slot_ids + 4 * i)
        x, tail = qkv + first * qkv_row, conv_state + 4 * slot * channels * (taps - 1)
        q_channel, k_channel = head * dk, (key_heads + head) * dk
        for start in range(0, length, BLOCK):  # one round if verify
            count = min(BLOCK, length - start)
            _convolve(x, qkv_row, start, count, q_channel, dk, tail, conv, taps, q, window)
            _convolve(x, qkv_row, start, count, k_channel, dk, tail, conv, taps, k, window)
            _normalize(q, count, dk, np.float32(dk**-0.5))
            _normalize(k, count, dk, np.float32(1))
            for h in range(head * per_key, head * per_key + per_key):
                v_channel = 2 * key_heads * dk + h * dv
                _convolve(x, qkv_row, start, count, v_channel, dv, tail, conv, taps, v, window)
                for t in range(count):
                    token = first + start + t
                    decay, beta = _gates(
                        load_f32(a + token * a_row + 4 * h), load_f32(b + token * b_row + 4 * h),
                        load_f32(a_log + 4 * h), load_f32(dt_bias + 4 * h),
                    )  # fmt: skip
                    store_f32(gates + 8 * t, decay)
                    store_f32(gates + 8 * t + 4, beta)
                s = recurrent + 4 * (slot * value_heads + h) * dk * dv
                _delta_rule(s, dk, dv, q, k, v, o, gates, count, not verify, block)
                for t in range(count):
                    token = first + start + t
                    at = z + token * z_row + 4 * h * dv
                    _gated_norm(o + 4 * t * dv, at, norm, eps, dv, out + 4 * (token * value_heads + h) * dv)
                    if verify:
                        entry = slot * journal_length + t
                        _copy(v + 4 * t * dv, journal_d + 4 * (entry * value_heads + h) * dv, dv)
                        store_f32(journal_g + 4 * (entry * value_heads + h), load_f32(gates + 8 * t))
            if verify:
                for t in range(count):
                    entry = slot * journal_length + t
                    _copy(k + 4 * t * dk, journal_k + 4 * (entry * key_heads + head) * dk, dk)
                    _journal_x(x + t * qkv_row, journal_x + 4 * entry * channels, head, per_key, key_heads, dk, dv)
        if not verify:
            _keep_tail(x, qkv_row, length, q_channel, dk, tail, taps)
            _keep_tail(x, qkv_row, length, k_channel, dk, tail, taps)
            v_channel = 2 * key_heads * dk + head * per_key * dv
            _keep_tail(x, qkv_row, length, v_channel, per_key * dv, tail, taps)
    keep_alive(scratch)


@njit
def _journal_x(x, entry, head, per_key, key_heads, dk, dv):
    """The inputs of a key head's channels."""
    _copy(x + 4 * head * dk, entry + 4 * head * dk, dk)
    _copy(x + 4 * (key_heads + head) * dk, entry + 4 * (key_heads + head) * dk, dk)
    v_channel = 2 * key_heads * dk + head * per_key * dv
    _copy(x + 4 * v_channel, entry + 4 * v_channel, per_key * dv)


@kernel
def sequences_kernel(pool, inputs, weights, shape, state, slot_ids, bounds, n, q_len, verify, out):
    arguments = (inputs, weights, shape, state, slot_ids, bounds, q_len, verify, out)
    parallel_for(pool, _sequences, n * shape[0], 1, arguments)


@kernel
def _commits(begin, end, shape, state, taps, slot_ids, counts):
    """One item: a slot and a key head."""
    key_heads, value_heads, dk, dv = shape
    conv_state, recurrent, journal_x, journal_k, journal_d, journal_g, journal_length = state
    per_key, channels = value_heads // key_heads, 2 * key_heads * dk + value_heads * dv
    for item in range(begin, end):
        i, head = item // key_heads, item % key_heads
        slot, count = load_i32(slot_ids + 4 * i), load_i32(counts + 4 * i)
        for h in range(head * per_key, head * per_key + per_key):
            s = recurrent + 4 * (slot * value_heads + h) * dk * dv
            for t in range(count):
                entry = slot * journal_length + t
                g = splat(load_f32(journal_g + 4 * (entry * value_heads + h)))
                d = journal_d + 4 * (entry * value_heads + h) * dv
                for row in range(dk):
                    key = splat(load_f32(journal_k + 4 * ((entry * key_heads + head) * dk + row)))
                    at = s + 4 * row * dv
                    for c in range(0, dv, 16):
                        store_f32x16(at + 4 * c, fma(key, load_f32x16(d + 4 * c), load_f32x16(at + 4 * c) * g))
        x, tail = journal_x + 4 * slot * journal_length * channels, conv_state + 4 * slot * channels * (taps - 1)
        v_channel = 2 * key_heads * dk + head * per_key * dv
        _keep_tail(x, 4 * channels, count, head * dk, dk, tail, taps)
        _keep_tail(x, 4 * channels, count, (key_heads + head) * dk, dk, tail, taps)
        _keep_tail(x, 4 * channels, count, v_channel, per_key * dv, tail, taps)


@kernel
def commit_kernel(pool, shape, state, taps, slot_ids, counts, n):
    parallel_for(pool, _commits, n * shape[0], 1, (shape, state, taps, slot_ids, counts))
