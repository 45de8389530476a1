# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""Arithmetic that kernels and formats share: unpacking codes in registers, products, the Hadamard transform.

Bytes become fp16 by placing them in the mantissa of 1024.0, whose last bit is worth 1: `0x6400 | b` is 1024 + b, and one
subtraction gives b. On a GPU that is written in PTX, because a compiler moves packed bytes one at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
if INTERPRETED:
    from pocketllm.kernels.triton import interpreted

    interpreted.patch()
_INTERPRETED = tl.constexpr(INTERPRETED)

_INT8_ASM = tl.constexpr("""{
.reg .b32 t, c;
xor.b32 t, $2, 0x80808080;
mov.b32 c, 0x64806480;
prmt.b32 $0, t, 0x64646464, 0x4140;
prmt.b32 $1, t, 0x64646464, 0x4342;
sub.rn.f16x2 $0, $0, c;
sub.rn.f16x2 $1, $1, c;
}""")


# e4m3 is fp16 with 3 bits of exponent and 7 of fraction less: (b & 0x80) << 8 | (b & 0x7f) << 7, to be taken 2^8 times.
_FP8_ASM = tl.constexpr("""{
.reg .b32 high, low;
shr.b32 high, $2, 1;
and.b32 high, high, 0x3f3f3f3f;
lop3.b32 high, $2, 0x80808080, high, 0xea;
shl.b32 low, $2, 7;
and.b32 low, low, 0x80808080;
prmt.b32 $0, low, high, 0x5140;
prmt.b32 $1, low, high, 0x7362;
}""")


@triton.jit
def int8_to_fp16(codes):
    """int8 -> the same numbers in fp16."""
    if _INTERPRETED:
        return codes.to(tl.float16)
    return tl.inline_asm_elementwise(_INT8_ASM, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def fp8_over_256(codes):
    """e4m3 -> the same numbers over 256 in fp16, exactly."""
    if _INTERPRETED:
        return (codes.to(tl.float32) / 256).to(tl.float16)
    return tl.inline_asm_elementwise(_FP8_ASM, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def unpacked_first(tile):
    """The tile itself, for V of a product over tokens: unpack before shared memory, not behind it.

    Such a product reads V transposed from shared memory, which the hardware does fast with 16-bit numbers only. Code that
    is not pure, though it does nothing, holds Triton from moving the unpacking behind that read. (K, summed over dims, is
    better unpacked behind it, in the very registers the product reads.)
    """
    if _INTERPRETED or tile.dtype.primitive_bitwidth != 16:
        return tile
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2)


@triton.jit
def dot(a, b, acc):
    """a [M, K] b [K, N] + acc, float32. Products of float32 are not rounded to a shorter type."""
    if _INTERPRETED:  # it knows no product of bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def round_even(x):
    """Nearest whole number, halves to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def exponent(x):
    """floor(log2 x) of positive normal float32."""
    return ((x.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)


@triton.jit
def _signs(N: tl.constexpr):
    """The Hadamard matrix [N, N] of Sylvester: (-1)^popcount(i & j)."""
    i = tl.arange(0, N)
    p = i[:, None] & i[None, :]
    p = p ^ (p >> 4)
    p = p ^ (p >> 2)
    p = p ^ (p >> 1)
    return 1.0 - 2.0 * (p & 1).to(tl.float32)


@triton.jit
def hadamard(x, D: tl.constexpr, DP: tl.constexpr):
    """Orthonormal Walsh-Hadamard transform of each block of D & -D elements of x [DP] float32; its own inverse.

    The matrix of size HIGH * LOW is the Kronecker product of two small ones: two sums of at most 16 or 32 terms each.
    """
    BLOCK: tl.constexpr = D & -D
    LOW: tl.constexpr = 16 if BLOCK > 16 else BLOCK
    HIGH: tl.constexpr = BLOCK // LOW
    y = tl.reshape(x, [DP // BLOCK, HIGH, LOW])
    y = tl.sum(y[:, :, :, None] * _signs(LOW)[None, None, :, :], axis=2)
    y = tl.sum(y[:, :, None, :] * _signs(HIGH)[None, :, :, None], axis=1)
    return tl.reshape(y, [DP]) * (BLOCK**-0.5)
