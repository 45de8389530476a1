# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
# ruff: noqa: RUF005  (Triton knows no starred tuples)
"""A mixture of experts without asking the host which were chosen: (row, choice) pairs sorted by expert, in blocks.

A *pair* is a row's choice of an expert: pair p belongs to row p // top_k. A block holds up to ROWS pairs of one expert, and
is a product as in `linear_kernels`: so a pair's result does not depend on the pairs beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pocketllm.kernels.triton.linear_kernels import multiply, silu_times, wait_for_inputs, weight_rows
from pocketllm.kernels.triton.softmax import find_sequence


@triton.jit
def expert_kernel(
    x, planes, offsets, order, counts, out, num_experts, N, K,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, LOAD: tl.constexpr,
    SCALE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [pairs, N], or [pairs, N / 2] if GATED: pair p's expert applied to row p // TOP_K of x.

    order [pairs] int64: the pairs sorted by expert; counts [num_experts] int32: how many chose each. planes: those of
    expert 0; offsets [planes, num_experts] int64: where an expert's plane starts, in elements from expert 0's, which is a
    multiple of 16 for the first plane. Programs: (blocks, as many as there can be; tiles of BLOCK_N outputs).
    """
    HALVES: tl.constexpr = 2 if GATED else 1
    wait_for_inputs(EARLY, 2)
    index = tl.arange(0, EXPERTS)
    chosen = tl.load(counts + index, mask=index < num_experts, other=0)
    expert, block = find_sequence((chosen + ROWS - 1) // ROWS, index, tl.program_id(0))
    if expert < num_experts:
        start = tl.sum(tl.where(index < expert, chosen, 0), axis=0) + block * ROWS
        left = tl.sum(tl.where(index == expert, chosen, 0), axis=0) - block * ROWS
        place = tl.arange(0, ROWS)
        pair = tl.load(order + start + tl.minimum(place, left - 1))
        own = (planes[0] + tl.multiple_of(tl.load(offsets + expert), 16),)
        for i in tl.static_range(1, len(planes)):
            own = own + (planes[i] + tl.load(offsets + i * num_experts + expert),)
        outputs = N // HALVES
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        sums = multiply(
            x, (pair // TOP_K * K,), own, weight_rows(n, outputs, HALVES), 0, tl.cdiv(K, BLOCK_K), K,
            BLOCK_N, ROWS, BLOCK_K, EVEN_K, PARTS, DTYPE, LOAD, SCALE,
        )  # fmt: skip
        result = sums[0][0]
        if GATED:
            result = silu_times(result, sums[1][0])
        at = out + (pair * outputs)[None, :] + n[:, None]
        tl.store(at, result.to(out.dtype.element_ty), mask=(n < outputs)[:, None] & (place < left)[None, :])


@triton.jit
def combine_kernel(y, weights, out, N, TOP_K: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """y [rows * TOP_K, N], weights [rows, TOP_K] -> out [rows, N]: a row's choices in order, each by its weight."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(EARLY, 1)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = row * TOP_K + choice
        values = tl.load(y + pair * N + n, mask=n < N, other=0.0).to(tl.float32)
        total += values * tl.load(weights + pair).to(tl.float32)
    tl.store(out + row * N + n, total.to(out.dtype.element_ty), mask=n < N)
