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

import torch
import triton
import triton.language as tl

from pocketllm.kernels.types import Paired

GROUP = 128


@triton.jit
def round_e4m3(v):
    """Float32 numbers below 464 in size, each rounded to the nearest that e4m3 has (ties to even), as float32."""
    bits = v.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(v) < 0.015625, (v + 24576.0) - 24576.0, normal)  # below 2^-6: multiples of 2^-9


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


def room_for_pairs(num_rows: int, k: int, dtype: torch.dtype, device: torch.device) -> Paired:
    """Memory for pairs of num_rows rows (1 to 64) of K columns, K % 128 = 0, yet to be written."""
    rows = max(triton.next_power_of_2(num_rows), 8)
    codes = torch.empty(2 * rows, k, dtype=torch.float8_e4m3fn, device=device)
    return Paired(codes, torch.empty(k // GROUP, 2 * rows, dtype=torch.float32, device=device), num_rows, dtype)
