# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""Activations as pairs of e4m3 numbers: what 16 bits hold, in a form that FP8 tensor cores multiply.

x = scale (high + low / 16): `high` has the first 4 bits of x, and `low`, rounded from what `high` leaves, has 4 more and a
sign. That is all of a bfloat16, but for numbers below 1/30,000 of the largest of their group, which lose their last bits.
Weights stored in e4m3 need not be decoded then, which at a few rows costs more than multiplying: tensor cores take them as
they lie in memory, and a row of x counts as two. Products are exact in float32; what the tensor cores sum between two
groups of 128 they keep to about 14 bits (DeepSeek-V3, arXiv 2412.19437, section 3.5.2).

Scales are powers of two, one for each row and group of 128 columns, so that scaling rounds nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pocketllm.kernels.triton.linear_kernels import wait_for_inputs
from pocketllm.kernels.triton.linear_tuning import linear_table
from pocketllm.kernels.types import Bridge, Paired, Readers

GROUP = 128


@triton.jit
def round_e4m3(v):
    """Float32 numbers below 464 in size, each rounded to the nearest that e4m3 has (ties to even), as float32."""
    bits = v.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Below 2^-6: multiples of 2^-9. NaN goes this way too: rounding its bits could make it a number.
    return tl.where(tl.abs(v) >= 0.015625, normal, (v + 24576.0) - 24576.0)


@triton.jit
def scale_of(largest):
    """The power of two by which to divide numbers up to `largest` so that they are below 256, and its inverse."""
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 7, 1)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return scale, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def pair_of(v):
    """v [.., 128] float32 -> high and low, e4m3 [.., 128], and the scale [..] float32."""
    AXIS: tl.constexpr = len(v.shape) - 1
    scale, inverse = scale_of(tl.max(tl.abs(v), axis=AXIS))
    v = v * tl.expand_dims(inverse, AXIS)
    high = round_e4m3(v)
    low = round_e4m3((v - high) * 16.0)
    return high.to(tl.float8e4nv), low.to(tl.float8e4nv), scale


def takes_pairs(readers: Readers) -> bool:
    """Whether they read `Paired` rows: a bridge does."""
    return isinstance(readers, Bridge)


def room_for_pairs(num_rows: int, k: int, dtype: torch.dtype, device: torch.device) -> Paired:
    """Memory for pairs of num_rows rows (1 to 64) of K columns, K % 128 = 0, yet to be written."""
    rows = max(triton.next_power_of_2(num_rows), 8)
    codes = torch.empty(2 * rows, k, dtype=torch.float8_e4m3fn, device=device)
    return Paired(codes, torch.empty(k // GROUP, 2 * rows, dtype=torch.float32, device=device), num_rows, dtype)


@triton.jit
def pairs_kernel(
    x, x_stride, other, other_stride, head_stride, codes, scales, K,
    ROWS: tl.constexpr, HEAD: tl.constexpr, COMBINE: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x [M, K] -> its pairs; with COMBINE, a function of two numbers, those of COMBINE(x, other), other [M, K / HEAD, HEAD].

    Programs: (rows, blocks of GROUPS groups).
    """
    wait_for_inputs(EARLY, 1)
    row = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < K
    values = tl.load(x + row.to(tl.int64) * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if COMBINE is not None:
        at = other + row.to(tl.int64) * other_stride + column // HEAD * head_stride + column % HEAD
        values = COMBINE(values, tl.load(at, mask=inside, other=0.0).to(tl.float32))
    high, low, scale = pair_of(values)
    tl.store(codes + row * K + column, high, mask=inside)
    tl.store(codes + (row + ROWS) * K + column, low, mask=inside)
    tl.store(scales + group * (2 * ROWS) + row, scale, mask=group * 128 < K)
    tl.store(scales + group * (2 * ROWS) + ROWS + row, scale * 0.0625, mask=group * 128 < K)


def to_pairs(x: Tensor, other: Tensor | None = None, combine: Any = None) -> Paired:
    """x [M, K], 1 to 64 rows, K % 128 = 0; or combine(x, other): a Triton function of float32, other [M, H, D]."""
    num_rows, k = x.shape
    out, early = room_for_pairs(num_rows, k, x.dtype, x.device), linear_table(x.device).early_for(num_rows)
    strides, head = ((0, 0), GROUP) if other is None else ((other.stride(0), other.stride(-2)), other.shape[-1])
    pairs_kernel[(num_rows, -(-k // (4 * GROUP)))](
        x, x.stride(0), other, *strides, out.codes, out.scales, k, ROWS=len(out.codes) // 2, HEAD=head,
        COMBINE=combine, GROUPS=4, EARLY=early, num_warps=2, launch_pdl=early > 0,
    )  # fmt: skip
    return out


def weight_pairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [N <= 128, K] in 16 bits as two of 128 rows in e4m3, the high parts and the low, with scales [2, K / 128]."""
    (n, k), device = matrix.shape, matrix.device
    codes = torch.zeros(2 * GROUP, k, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(2, k // GROUP, dtype=torch.float32, device=device)
    if matrix.is_meta:  # of a plan
        return codes, scales
    blocks = matrix.float().view(n, k // GROUP, GROUP)
    scale = torch.exp2(torch.floor(torch.log2(blocks.abs().amax((0, 2)).clamp_min(1e-30))) - 7)  # values below 256
    values = blocks / scale[None, :, None]
    high = values.to(torch.float8_e4m3fn)
    low = ((values - high.float()) * 16).to(torch.float8_e4m3fn)
    codes[:n], codes[GROUP : GROUP + n] = high.view(n, k), low.view(n, k)
    scales[0], scales[1] = scale, scale / 16
    return codes, scales
