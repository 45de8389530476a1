# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""Activations in e4m3, for products of many rows with FP8 weights (see `linear_fp8`).

A row is rounded in groups of 128 columns, each with a scale of its own. An operation that knows who reads its result (the
`readers` of `kernels.protocol`) rounds it where it is made: a norm or a gate then writes 8 bits a number and nothing in 16,
and no pass over memory is spent on rounding alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pocketllm.kernels.triton.numerics import exp2, inverse
from pocketllm.kernels.types import Bridge, LinearWeight, Quantized, Readers
from pocketllm.parallel import SMALL_BATCH

GROUP = 128
# Of a program: rows (8 scales that follow each other fill a sector of memory), groups, warps.
SIZES = (8, 4, 8)
COMBINED_SIZES = (8, 4, 8)
MAX_E4M3 = 448.0
LARGEST = tl.constexpr(MAX_E4M3)


@triton.jit
def to_e4m3(values):
    """values [.., 128] float32 -> e4m3 [.., 128], scales [..] float32. (What rounding leaves above 448 becomes 448.)"""
    AXIS: tl.constexpr = len(values.shape) - 1
    scale = tl.maximum(tl.max(tl.abs(values), axis=AXIS), 1e-30) / LARGEST
    return (values * tl.expand_dims(1.0 / scale, AXIS)).to(tl.float8e4nv), scale  # one division a group


@triton.jit
def times_sigmoid(x, gate):
    """x * sigmoid(gate). Over long chunks, exp and division with all their special cases would cost more than memory."""
    return x * inverse(1.0 + exp2(gate * -1.4426950408889634))


@triton.jit
def silu_times(gate, up):
    return times_sigmoid(gate, gate) * up


@triton.jit(do_not_specialize=["num_rows", "padded_rows"])
def quantize_kernel(
    x, x_stride, other, other_stride, head_stride, codes, scales, num_rows, padded_rows, K,
    HEAD: tl.constexpr, COMBINE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """x [num_rows, K] -> codes e4m3 [padded_rows, K], scales [K / 128, padded_rows] float32. Rows past the last are not
    written. With COMBINE, a function of two numbers, what is rounded is COMBINE(x, other), other [num_rows, K / HEAD, HEAD].

    Programs: (blocks of ROWS rows, blocks of GROUPS groups).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = (group[:, None] * 128 + tl.arange(0, 128)[None, :])[None, :, :]
    inside = (row < num_rows)[:, None] & (group < K // 128)[None, :]
    inside_columns, long_row = inside[:, :, None], row.to(tl.int64)[:, None, None]
    values = tl.load(x + long_row * x_stride + column, mask=inside_columns, other=0.0).to(tl.float32)
    if COMBINE is not None:
        at = group * 128 // HEAD * head_stride + group * 128 % HEAD
        other_column = (at[:, None] + tl.arange(0, 128)[None, :])[None, :, :]
        second = tl.load(other + long_row * other_stride + other_column, mask=inside_columns, other=0.0)
        values = COMBINE(values, second.to(tl.float32))
    rounded, scale = to_e4m3(values)
    tl.store(codes + long_row * K + column, rounded, mask=inside_columns)
    tl.store(scales + group[None, :] * padded_rows + row[:, None], scale, mask=inside)


def room(num_rows: int, k: int, dtype: torch.dtype, device: torch.device, plain: Tensor | None = None) -> Quantized:
    """Memory for num_rows rows of K columns, yet to be written."""
    padded = -(-num_rows // 4) * 4  # the library wants columns of scales that start at multiples of 16 bytes
    codes = torch.empty(padded, k, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(k // GROUP, padded, dtype=torch.float32, device=device)
    return Quantized(codes, scales, num_rows, dtype, plain)


def quantize(x: Tensor, other: Tensor | None = None, combine: Any = None) -> Quantized:
    """x [M, K], K % 128 = 0, or combine(x, other): a Triton function of float32.

    other: [M, K], or [M, H, D] with D % 128 = 0; both may be parts of tensors with wider rows.
    """
    num_rows, k = x.shape
    out = room(num_rows, k, x.dtype, x.device)
    (rows, groups, warps), strides, head = SIZES, (0, 0), GROUP
    if other is not None:
        (rows, groups, warps), strides, head = COMBINED_SIZES, (other.stride(0), other.stride(-2)), other.shape[-1]
    quantize_kernel[(-(-num_rows // rows), -(-k // (groups * GROUP)))](
        x, x.stride(0), other, *strides, out.codes, out.scales, num_rows, len(out.codes), k,
        HEAD=head, COMBINE=combine, ROWS=rows, GROUPS=groups, num_warps=warps,
    )  # fmt: skip
    return out


@cache
def fp8_units(device: torch.device) -> bool:
    """Whether the device multiplies e4m3 by e4m3 (compute capability 8.9 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def takes_codes(weight: LinearWeight, num_rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `linear` multiplies so many rows by this weight in FP8: 16-bit activations, and a width of whole groups."""
    fits = weight.format.name == "fp8_block" and weight.shape[1] % GROUP == 0 and dtype.itemsize == 2
    return fits and num_rows > SMALL_BATCH and fp8_units(device)


def all_take_codes(readers: Readers, x: Tensor) -> bool:
    """Whether nobody who reads rows like x [M, ..] needs them in 16 bits."""
    if isinstance(readers, Bridge) or not readers:
        return False
    return all(takes_codes(weight, len(x), x.dtype, x.device) for weight in readers)
