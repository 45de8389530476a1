# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# ruff: noqa: SIM108
"""One step of softmax attention over a tile of cached tokens, for every format and every kind of pass.

What makes a row's result its own, bit for bit: a tile in which a row sees nothing leaves all its sums as they were, sums
over a tile's tokens run inside a matrix product (whose order does not depend on the number of rows), and every factor is
taken from tokens the row sees.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pocketllm.kernels.triton.numerics import dot, inverse, log2


@triton.jit
def find_sequence(counts, index, item):
    """Which sequence the item-th piece of work belongs to, and its place there; counts [N] pieces of each sequence."""
    ends = tl.cumsum(counts, axis=0)
    before = ends <= item
    return tl.sum(before.to(tl.int32), axis=0), item - tl.sum(tl.where(before, counts, 0), axis=0)


@triton.jit
def start_state(M: tl.constexpr, DP: tl.constexpr):
    """(largest score, sum of weights, weighted values) before the first tile."""
    return tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, DP], tl.float32)


@triton.jit
def visible_tokens(position, tokens, WINDOW: tl.constexpr, SINKS: tl.constexpr):
    """Which tokens the queries at these positions see (`kernels.types.AttentionMask`); shapes broadcast."""
    seen = tokens <= position
    if WINDOW > 0:
        seen = seen & ((position - tokens < WINDOW) | (tokens < SINKS))
    return seen


@triton.jit
def first_tile(start, position, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr):
    """Where to begin in tokens start.. so that no tile before the window of a query at `position` is read."""
    if WINDOW > 0:
        window = tl.maximum(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        return tl.where(start < SINKS, start, tl.maximum(start, window))
    return start


@triton.jit
def softmax_step(state, q, k, k_scale, v, v_scale, extra, seen, scale, SCALED: tl.constexpr):
    """Adds a tile of tokens. q [M, DP], k, v [N, DP], extra: score term [M, N] or None, scale includes log2(e).

    V's codes times their scales would leave fp16's range, and so may weights times scales. So log2 of V's scale is part
    of the score: weights times scales are at most 1, whatever the scales, and the sum takes the scale out again.
    """
    largest, total, out = state
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
    if SCALED:
        scores = tl.fma(scores, (k_scale * scale)[None, :], log2(v_scale)[None, :])
    else:
        scores = scores * scale
    if extra is not None:
        scores = tl.fma(extra, scale, scores)
    scores = tl.where(seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(largest - reference)
    if SCALED:
        total = tl.fma(total, shrink, tl.sum(weights * inverse(v_scale)[None, :], axis=1))
    else:
        total = tl.fma(total, shrink, tl.sum(weights, axis=1))
    out = dot(weights.to(v.dtype), v, out * shrink[:, None])
    return new_largest, total, out


@triton.jit
def bias_queries(q, at, mask, bias, head, HALF: tl.constexpr, HALFP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """q . RoPE(bias, j) = a . cos_j + b . sin_j + c (see `kernels.types.KeyBias`): a, b [M, HALFP], c [M], float32.

    `at` [M]: where each query row begins. Dims from 2 HALF on are not rotated: c.
    """
    i = tl.arange(0, HALFP)
    pair = mask[:, None] & (i < HALF)[None, :]
    q1 = tl.load(q + at[:, None] + i[None, :], mask=pair, other=0.0).to(tl.float32)
    q2 = tl.load(q + at[:, None] + i[None, :] + HALF, mask=pair, other=0.0).to(tl.float32)
    b1 = tl.load(bias + head * D + i, mask=i < HALF, other=0.0)[None, :]
    b2 = tl.load(bias + head * D + i + HALF, mask=i < HALF, other=0.0)[None, :]
    d = tl.arange(0, DP)
    rest = (d >= 2 * HALF) & (d < D)
    q3 = tl.load(q + at[:, None] + d[None, :], mask=mask[:, None] & rest[None, :], other=0.0).to(tl.float32)
    b3 = tl.load(bias + head * D + d, mask=rest, other=0.0)[None, :]
    return q1 * b1 + q2 * b2, q2 * b1 - q1 * b2, tl.sum(q3 * b3, axis=1)


@triton.jit
def bias_scores(a, b, c, cos, sin, tokens, HALF: tl.constexpr, HALFP: tl.constexpr):
    """The score term of a key bias [M, N]. Large and cancelling, so in three tf32 products."""
    i = tl.arange(0, HALFP)
    at = tokens[None, :] * HALF + i[:, None]
    mask = (i < HALF)[:, None]
    out = tl.dot(a, tl.load(cos + at, mask=mask, other=0.0), input_precision="tf32x3")
    return tl.dot(b, tl.load(sin + at, mask=mask, other=0.0), out, input_precision="tf32x3") + c[:, None]
