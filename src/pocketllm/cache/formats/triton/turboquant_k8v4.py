# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""Triton pieces of TurboQuant K8V4 for heads of more than 64; those of smaller ones are in `grouped_v4`.

A level is read as x (x^2 + 1 / CUBIC) with x = q - 7.5, which is the format's x + CUBIC x^3 over CUBIC: one operation less
for every value, and CUBIC goes into the row's scale. 1 / CUBIC is an fp16 number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.cache.formats.cubic_levels import CUBIC
from pocketllm.cache.formats.rotation import signs
from pocketllm.cache.formats.triton.int8_per_token_head import load_k, store_int8
from pocketllm.cache.formats.turboquant_k8v4 import LEVELS_RMS, OUTERMOST
from pocketllm.kernels.triton.numerics import INTERPRETED
from pocketllm.kernels.triton.pieces import HopperPieces, TritonPieces

_CUBIC = tl.constexpr(CUBIC)
_INVERSE = tl.constexpr(1 / CUBIC)
_LEVELS_RMS = tl.constexpr(LEVELS_RMS)
_OUTERMOST = tl.constexpr(OUTERMOST)
_INTERPRETED = tl.constexpr(INTERPRETED)

# Four bytes to four levels of low nibbles ($0, $1) and four of high ones ($2, $3). A nibble stands in bits 4-7 of a
# mantissa: 1024 + 16 q, of which one fma makes x = q - 7.5 exactly.
_V4_ASM = tl.constexpr("""{
.reg .b32 lo, hi, sixteenth, shift, inverse, x, t;
shl.b32 lo, $4, 4;
and.b32 lo, lo, 0xf0f0f0f0;
and.b32 hi, $4, 0xf0f0f0f0;
mov.b32 sixteenth, 0x2c002c00;
mov.b32 shift, 0xd478d478;
mov.b32 inverse, 0x582b582b;
prmt.b32 x, lo, 0x64646464, 0x4140;
fma.rn.f16x2 x, x, sixteenth, shift;
fma.rn.f16x2 t, x, x, inverse;
mul.rn.f16x2 $0, x, t;
prmt.b32 x, lo, 0x64646464, 0x4342;
fma.rn.f16x2 x, x, sixteenth, shift;
fma.rn.f16x2 t, x, x, inverse;
mul.rn.f16x2 $1, x, t;
prmt.b32 x, hi, 0x64646464, 0x4140;
fma.rn.f16x2 x, x, sixteenth, shift;
fma.rn.f16x2 t, x, x, inverse;
mul.rn.f16x2 $2, x, t;
prmt.b32 x, hi, 0x64646464, 0x4342;
fma.rn.f16x2 x, x, sixteenth, shift;
fma.rn.f16x2 t, x, x, inverse;
mul.rn.f16x2 $3, x, t;
}""")


@triton.jit
def level_of(q):
    """Code -> level / CUBIC, fp16."""
    x = q.to(tl.float16) - 7.5
    return (x * (x * x + _INVERSE)).to(tl.float16)


@triton.jit
def read_levels(codes):
    """Bytes -> the levels (over CUBIC, fp16) of their low and of their high nibbles."""
    if _INTERPRETED:
        return level_of(codes & 15), level_of(codes >> 4)
    return tl.inline_asm_elementwise(
        _V4_ASM, "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
    )


@triton.jit
def nearest_code(y):
    """Code [DP] (as float32) of the level nearest to y: how many midpoints of neighbouring levels lie below it."""
    code = tl.zeros_like(y)
    for i in tl.static_range(15):
        a = i - 7.5
        b = i - 6.5
        code += tl.where(y > (a + b + _CUBIC * (a * a * a + b * b * b)) / 2, 1.0, 0.0)
    return code


@triton.jit
def _fit(x, scale, mask):
    """Of the codes nearest for `scale`: their best scale, and the part of |x|^2 it explains."""
    c = nearest_code(x / scale) - 7.5
    level = tl.where(mask, c + _CUBIC * c * c * c, 0.0)
    product, square = tl.sum(x * level, axis=0), tl.sum(level * level, axis=0)
    return tl.maximum(product / square, 1e-12), product * product / square


@triton.jit
def store_codes(plane, row, codes, D: tl.constexpr, DP: tl.constexpr):
    """codes [DP] float32 -> two to a byte."""
    d = tl.arange(0, DP)
    code = codes.to(tl.uint8)
    if D == DP:
        low, high = tl.split(tl.trans(tl.reshape(code, [2, D // 2])))
        tl.store(plane + row * (D // 2) + tl.arange(0, D // 2), low | (high << 4))
    else:  # the halves are no powers of two: through the row's own bytes, low nibbles first
        high_code = tl.sum(tl.where((d[:, None] + D // 2 == d[None, :]) & (d < D)[None, :], code[None, :], 0), axis=1)
        packed = code | (high_code.to(tl.uint8) << 4)
        tl.store(plane + row * (D // 2) + d, packed, mask=d < D // 2)


@triton.jit
def _store_v4(plane, scales, row, x, D: tl.constexpr, DP: tl.constexpr):
    """The search of `turboquant_k8v4.encode_v4`: two starts, the better one's codes, their unbiased scale."""
    d = tl.arange(0, DP)
    size = tl.maximum(tl.sqrt(tl.sum(x * x, axis=0) / D), 1e-12) / _LEVELS_RMS
    scale, explained = _fit(x, size, d < D)
    other, other_explained = _fit(x, tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) * _OUTERMOST, d < D)
    scale = tl.where(other_explained > explained, other, scale)
    nearest = nearest_code(x / scale)
    c = nearest - 7.5
    product = tl.sum(tl.where(d < D, x * (c + _CUBIC * c * c * c), 0.0), axis=0)
    scale = tl.sum(x * x, axis=0) / tl.maximum(product, 1e-12)
    scale = tl.where(scale < 1e-12, 1e-12, scale)  # NaN stays
    store_codes(plane, row, nearest, D, DP)
    tl.store(scales + row, scale)


@triton.jit
def store_row(planes, row, k, v, D: tl.constexpr, DP: tl.constexpr):
    store_int8(planes[0], planes[2], row, k, D, DP)
    _store_v4(planes[1], planes[3], row, v, D, DP)


@triton.jit
def load_v(planes, rows, D: tl.constexpr, DP: tl.constexpr):
    HALF: tl.constexpr = D // 2
    scale = tl.load(planes[3] + rows) * (1 / _INVERSE)
    if D == DP:
        d = tl.arange(0, HALF)
        codes = tl.load(planes[1] + rows[:, None] * HALF + d[None, :])
        low, high = read_levels(codes)
        tile = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [codes.shape[0], D])
    else:
        d = tl.arange(0, DP)
        byte = tl.where(d < HALF, d, d - HALF)
        mask = (d < D)[None, :]
        codes = tl.load(planes[1] + rows[:, None] * HALF + byte[None, :], mask=mask, other=0)
        tile = tl.where(mask, level_of(tl.where((d < HALF)[None, :], codes & 15, codes >> 4)), 0.0).to(tl.float16)
    return tile, scale


def hopper() -> HopperPieces:
    from pocketllm.cache.formats.triton.turboquant_k8v4_hopper import PIECES

    return PIECES


def pieces(head_dim: int) -> TritonPieces:
    return TritonPieces(signs(head_dim), torch.float16, True, store_row, load_k, load_v, hopper)
