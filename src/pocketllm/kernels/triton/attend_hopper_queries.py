# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""Queries for `attend_hopper_kernels`: rotated, and as pairs of 8-bit numbers, high and low parts."""

from __future__ import annotations

import triton
import triton.language as tl

from pocketllm.kernels.triton.linear_kernels import wait_for_inputs
from pocketllm.kernels.triton.numerics import hadamard, round_even
from pocketllm.kernels.triton.pairs import pair_of

pair_e4m3 = pair_of  # q = factor (high + low / 16)


@triton.jit
def pair_int8(q):
    """q [.., D] float32 -> int8 high and low, and a factor [..]: q = factor (128 high + low), to 15 bits of the largest."""
    AXIS: tl.constexpr = len(q.shape) - 1
    largest = tl.max(tl.abs(q), axis=AXIS)
    largest = tl.where(largest < 1e-30, 1e-30, largest)  # what is no number must stay none
    v = round_even(q * tl.expand_dims(16256.0 / largest, AXIS))  # 127 * 128
    high = round_even(v * 0.0078125)
    return high.to(tl.int8), (v - high * 128.0).to(tl.int8), largest * (1.0 / 16256.0)


@triton.jit
def query_pairs_kernel(
    q, signs, codes, factors,
    Q: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, PIECES: tl.constexpr, N: tl.constexpr,
    PAIR: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """q [n, Q, HQ, D] -> codes [n, HK, PIECES, 2, N, D] and factors [n, HK, PIECES, N]: the rows of a KV head (queries x the
    heads that share it) in pieces of N. One program per row of q; what stands for rows beyond is never read by others.

    signs [D] or None: rotate by hadamard(signs * q).
    """
    wait_for_inputs(EARLY, 1)
    GROUP: tl.constexpr = HQ // HK
    token, head = tl.program_id(0), tl.program_id(1)
    row = token % Q * GROUP + head % GROUP
    block = (token // Q * HK + head // GROUP) * PIECES + row // N
    d = tl.arange(0, D)
    query = tl.load(q + (token.to(tl.int64) * HQ + head) * D + d).to(tl.float32)
    if signs is not None:
        query = hadamard(query * tl.load(signs + d), D, D)
    high, low, factor = PAIR(query)
    at = codes + (block.to(tl.int64) * 2 * N + row % N) * D + d
    tl.store(at, high)
    tl.store(at + N * D, low)
    tl.store(factors + block * N + row % N, factor)
