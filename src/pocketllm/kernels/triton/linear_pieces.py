# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# ruff: noqa: SIM300  (DTYPE is an argument)
"""How each weight format is read in registers: a tile of stored codes becomes a tile in the type of the activations.

A tile spans BLOCK_K neighbours along K of some rows. It comes in `parts`, each with columns of its own: W4 keeps two
codes a byte, so its low and its high nibbles are a part each, and meet the columns of x that belong to them. Codes turn
into floats by placing their bits in the fields of a float, as in `numerics`: instructions that convert are four times
slower than those that move bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pocketllm.kernels.triton.numerics import INTERPRETED, fp8_over_256
from pocketllm.kernels.types import LinearWeight

_INTERPRETED = tl.constexpr(INTERPRETED)

# e4m3 is bf16 with 4 bits of exponent and of fraction less: the sign apart, (b & 0x7f) << 4, to be taken 2^120 times.
# That product is exact, subnormal numbers included. (Hopper has no conversion from e4m3 to bf16.) A byte is placed below
# one of eight copies of its sign, so that the shift leaves a sign at the top; the others are cut out.
_FP8_TO_BF16 = tl.constexpr("""{
.reg .b32 scale;
mov.b32 scale, 0x7b807b80;
prmt.b32 $0, $2, 0, 0x9180;
prmt.b32 $1, $2, 0, 0xb3a2;
shl.b32 $0, $0, 4;
shl.b32 $1, $1, 4;
and.b32 $0, $0, 0x87f087f0;
and.b32 $1, $1, 0x87f087f0;
mul.rn.bf16x2 $0, $0, scale;
mul.rn.bf16x2 $1, $1, scale;
}""")

# A nibble as the third byte of 128.0 in float32, where the last bit is worth 1.
_NIBBLES_AND_128 = """{
.reg .b32 t, c;
shr.b32 t, $4, SHIFT;
and.b32 t, t, 0x0f0f0f0f;
mov.b32 c, 0x43000000;
prmt.b32 $0, t, c, 0x7044;
prmt.b32 $1, t, c, 0x7144;
prmt.b32 $2, t, c, 0x7244;
prmt.b32 $3, t, c, 0x7344;
}"""
_LOW_NIBBLES = tl.constexpr(_NIBBLES_AND_128.replace("SHIFT", "0"))
_HIGH_NIBBLES = tl.constexpr(_NIBBLES_AND_128.replace("SHIFT", "4"))
# A byte, 128 added, likewise as the second byte of 32768.0.
_INT8_AND_32896 = tl.constexpr("""{
.reg .b32 t, c;
xor.b32 t, $4, 0x80808080;
mov.b32 c, 0x47000000;
prmt.b32 $0, t, c, 0x7404;
prmt.b32 $1, t, c, 0x7414;
prmt.b32 $2, t, c, 0x7424;
prmt.b32 $3, t, c, 0x7434;
}""")
_FOUR_OF_FOUR = tl.constexpr("=&r,=&r,=&r,=&r,r")


@dataclass(frozen=True, eq=False)
class WeightPieces:
    """A weight format as the kernels read it.

    load(planes, rows, k, K, BLOCK_K, DTYPE, EVEN_K)   columns k .. k + BLOCK_K - 1 of rows [N] int64 -> a tuple of
            `parts` tiles [N, BLOCK_K / parts] in DTYPE; zeros from column K on. EVEN_K says that there are none
    scale(planes, rows, block, K, DTYPE)    what to multiply a row's sum over columns 128 block .. 128 block + 127 by,
            [N] float32 (or, for one row, a number); it is the same for rows 128 i .. 128 i + 127. None if `load` gives the
            weights themselves
    block_k   columns a tile must span; None: any number that is a multiple of 32
    bits      a weight's, about: decides the size of tiles
    """

    load: Callable[..., Any]
    bits: int
    parts: int = 1
    scale: Callable[..., Any] | None = None
    block_k: int | None = None


@triton.jit
def part_columns(BLOCK_K: tl.constexpr, PARTS: tl.constexpr, part: tl.constexpr):
    """Columns of x, from the tile's first, that the columns of a part stand for. [BLOCK_K / PARTS]"""
    column = tl.arange(0, BLOCK_K // PARTS)
    if PARTS == 2:  # 16 low nibbles, then the same bytes' high ones
        column = column // 16 * 32 + part * 16 + column % 16
    return column


@triton.jit
def _tile(plane, rows, first, width, COLUMNS: tl.constexpr, EVEN_K: tl.constexpr):
    """Elements [N, COLUMNS] from column `first` on of a plane of `width` columns."""
    column = first + tl.arange(0, COLUMNS)
    at = plane + rows[:, None] * width + column[None, :]
    if EVEN_K:
        return tl.load(at)
    return tl.load(at, mask=(column < width)[None, :], other=0.0)


@triton.jit
def _per_group(plane, rows, k, K, GROUPS: tl.constexpr, EACH: tl.constexpr, EVEN_K: tl.constexpr):
    """One number per group of 32 columns, repeated for the EACH columns that a part has of it: [N, GROUPS * EACH]."""
    numbers = _tile(plane, rows, k // 32, K // 32, GROUPS, EVEN_K).to(tl.float32)
    N: tl.constexpr = numbers.shape[0]
    return tl.reshape(tl.broadcast_to(numbers[:, :, None], [N, GROUPS, EACH]), [N, GROUPS * EACH])


@triton.jit
def load_dense(planes, rows, k, K, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr, EVEN_K: tl.constexpr):
    return (_tile(planes[0], rows, k, K, BLOCK_K, EVEN_K).to(DTYPE),)


@triton.jit
def load_fp8(planes, rows, k, K, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr, EVEN_K: tl.constexpr):
    """Without the scale; over 256 but in bf16 (`scale_fp8` makes good for it)."""
    codes = _tile(planes[0], rows, k, K, BLOCK_K, EVEN_K)
    if DTYPE != tl.bfloat16:
        if _INTERPRETED:
            codes = codes.to(tl.float8e4nv, bitcast=True)
        tile = fp8_over_256(codes).to(DTYPE)
    elif _INTERPRETED:
        tile = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(DTYPE)
    else:
        tile = tl.inline_asm_elementwise(_FP8_TO_BF16, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    return (tile,)


@triton.jit
def scale_fp8(planes, rows, block, K, DTYPE: tl.constexpr):
    scale = tl.load(planes[1] + rows // 128 * ((K + 127) // 128) + block)
    if DTYPE != tl.bfloat16:
        scale *= 256.0
    return scale


@triton.jit
def load_w8(planes, rows, k, K, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr, EVEN_K: tl.constexpr):
    codes = _tile(planes[0], rows, k, K, BLOCK_K, EVEN_K)
    scale = _per_group(planes[1], rows, k, K, BLOCK_K // 32, 32, EVEN_K)
    if _INTERPRETED:
        return ((codes.to(tl.float32) * scale).to(DTYPE),)
    shifted = tl.inline_asm_elementwise(_INT8_AND_32896, _FOUR_OF_FOUR, [codes], dtype=tl.float32, is_pure=True, pack=4)
    # Exact in float32, as a fused product and sum rounds once: 32896 scale has 20 bits, the weight 19.
    return (tl.fma(shifted, scale, -32896.0 * scale).to(DTYPE),)


@triton.jit
def _nibbles(planes, rows, k, K, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Codes 0 to 15 of both parts plus 128, and the scale of each: [N, BLOCK_K / 2] float32."""
    codes = _tile(planes[0], rows, k // 2, K // 2, BLOCK_K // 2, EVEN_K)
    if _INTERPRETED:
        low, high = (codes & 15).to(tl.float32) + 128.0, (codes >> 4).to(tl.float32) + 128.0
    else:
        low = tl.inline_asm_elementwise(_LOW_NIBBLES, _FOUR_OF_FOUR, [codes], dtype=tl.float32, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(_HIGH_NIBBLES, _FOUR_OF_FOUR, [codes], dtype=tl.float32, is_pure=True, pack=4)
    return low, high, _per_group(planes[1], rows, k, K, BLOCK_K // 32, 16, EVEN_K)


@triton.jit
def load_w4(planes, rows, k, K, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr, EVEN_K: tl.constexpr):
    low, high, scale = _nibbles(planes, rows, k, K, BLOCK_K, EVEN_K)
    start = _per_group(planes[2], rows, k, K, BLOCK_K // 32, 16, EVEN_K) - 128.0 * scale
    return (low * scale + start).to(DTYPE), (high * scale + start).to(DTYPE)


@triton.jit
def load_w4_shifted(planes, rows, k, K, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr, EVEN_K: tl.constexpr):
    low, high, scale = _nibbles(planes, rows, k, K, BLOCK_K, EVEN_K)
    start = -136.0 * scale
    return (low * scale + start).to(DTYPE), (high * scale + start).to(DTYPE)


_PIECES = {
    "fp32": WeightPieces(load_dense, bits=32),
    "fp16": WeightPieces(load_dense, bits=16),
    "bf16": WeightPieces(load_dense, bits=16),
    "fp8_block": WeightPieces(load_fp8, bits=8, scale=scale_fp8, block_k=128),
    "w8": WeightPieces(load_w8, bits=8),
    "w4": WeightPieces(load_w4, bits=4, parts=2),
    "w4_shifted": WeightPieces(load_w4_shifted, bits=4, parts=2),
}


def planes_of(weight: LinearWeight) -> tuple[Tensor, ...]:
    """The weight's tensors as the loaders want them: e4m3 as bytes, for devices that have no such type."""
    return tuple(t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in weight.tensors)


def pieces_of(weight: LinearWeight) -> WeightPieces:
    """ValueError for a format without a kernel."""
    name = weight.format.name
    if name not in _PIECES:
        raise ValueError(f"no Triton pieces for weight format {name!r}: use one of {', '.join(_PIECES)}")
    return _PIECES[name]
