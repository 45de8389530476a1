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
def kept_in_place(tile):
    """The tile itself, for V of a product over tokens: it is then made before the change of layout for that product.

    So codes are unpacked before shared memory, not behind it: such a product reads V transposed from
    shared memory, which the hardware does fast with 16-bit numbers only. (K, summed over dims, is better unpacked behind
    it, in the very registers the product reads.) V stored in 16 bits takes this way too, else Triton would read it tile by
    tile instead of ahead. The code does nothing, but is not pure, and so it is not moved.
    """
    if _INTERPRETED or tile.dtype.primitive_bitwidth != 16:
        return tile
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2)


@triton.jit
def dims_by_store(x):
    """x [A, D] with dims in another order, for a product of which they are the rows: see `dim_of_row`.

    A thread that has read 16 codes stores two pieces of 8 numbers. So ordered, the pieces that threads store at a time
    are neighbours, and no two fall into one bank of shared memory.
    """
    A: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, [A, D // 16, 2, 8]), (0, 2, 1, 3)), [A, D])


@triton.jit
def dim_of_row(row, D: tl.constexpr):
    """Which dim stands at `row` of `dims_by_store`."""
    return row % (D // 2) // 8 * 16 + row // (D // 2) * 8 + row % 8


@triton.jit
def log2(x):
    """log2 of positive normal float32 (others need further instructions)."""
    if _INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def inverse(x):
    """1 / x of positive normal float32, likewise."""
    if _INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def exp2(x):
    """2^x, likewise: 0 where the result would not be normal."""
    if _INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


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
def _butterflies(x, H: tl.constexpr):
    """Of every 2 H neighbours of x [N]: the sums of the first H and the last H, then the differences."""
    N: tl.constexpr = x.shape[0]
    first, last = tl.split(tl.permute(tl.reshape(x, [N // (2 * H), 2, H]), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(first + last, first - last), (0, 2, 1)), [N])


@triton.jit
def hadamard(x, D: tl.constexpr, DP: tl.constexpr):
    """Orthonormal Walsh-Hadamard transform of each block of D & -D elements of x [DP] float32; its own inverse.

    Neighbours first: a thread mostly holds a few of them, and then the first steps stay in its registers.
    """
    BLOCK: tl.constexpr = D & -D
    for i in tl.static_range(16):
        if (1 << i) < BLOCK:
            x = _butterflies(x, 1 << i)
    return x * (BLOCK**-0.5)
