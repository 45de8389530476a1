"""The inner loops of a matrix product: how each weight format is multiplied, and how rows of x are laid out for it.

Weights come packed (`linear_packing`) in blocks of `COLUMNS` = 32 outputs, so that a vector's lanes are outputs: a sum
over K runs down its own lane from the first k to the last, needs no horizontal adds, and is the same whatever the
number of rows. Each block is one contiguous stream of *steps* along K, read once for all rows of a tile:

    format            K a step   a block's step in memory                          a prepared row's step, in words
    fp32, fp16        16         16 x 32 float32 / float16                         16 float32
    bf16              16         8 x 32 pairs of bfloat16                          8 pairs of bfloat16
    fp8_block         128        32 x 32 x 4 codes, scale, 60 bytes unused         64 pairs of bfloat16
    w8                32         8 x 32 x 4 codes, 32 scales                       8 x 4 int8, their scale and sum
    w4, w4_shifted    32         4 x 32 x 4 pairs of codes, 32 scales (, minima)   8 x 4 int8, their scale and sum

x is rounded to bfloat16 for bf16 and fp8 weights (as every bf16 engine does), kept in float32 for fp32 and fp16, and
quantised to int8 with a float32 scale per group of 32 for w8 and w4, as llama.cpp does with a float16 scale; products
and sums inside a group are exact in int32, and sums over groups are in float32.

w8 codes are stored plus 128, because the int8 dot product takes its first operand unsigned; w4_shifted is w4 whose
minimum is everywhere -8 * scale (GGUF's Q4_0) and therefore not stored. Both take the shift times the sum of x off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba.core import types
from numba.core.imputils import lower_constant
from numba.extending import models, overload, register_model, typeof_impl

from pocketllm.kernels.numba.linear_simd import (
    e4m3_to_bf16,
    load_pair,
    nibbles,
    pack_bf16,
    pack_f32,
    pack_i8,
    tile_add_product,
    tile_add_scaled,
    tile_clear,
    tile_dot_bf16,
    tile_dot_u8s8,
    tile_splat_i32,
    tile_zeros_i32,
)
from pocketllm.kernels.numba.simd import Target, load_f16x16, load_f32, load_f32x16, splat, tile_fma

COLUMNS = 32  # outputs in a block: two vectors
# Vectors of a tile (2 a row) from which on weights are prefetched. Medians on one core: 8 rows take 0.83 to 0.85 of the
# time (bf16), 0.6 to 0.8 (w4), 0.96 to 0.99 (w8); 4 rows of w8 gain nothing, and 1 row would lose up to 15%.
_PREFETCHED, _PREFETCHED_W8 = 8, 16


@dataclass(frozen=True)
class Scheme:
    """A packed weight format on a target. A constant inside kernels: it picks the inner loops by its type."""

    name: str
    target: Target

    @property
    def step(self) -> int:
        """Elements of K a step; K is padded to a multiple of it."""
        return _STEPS[self.name][0]

    @property
    def step_bytes(self) -> int:
        """Bytes of a block's step."""
        return _STEPS[self.name][1]

    @property
    def row_bytes(self) -> int:
        """Bytes of a prepared row's step."""
        return _STEPS[self.name][2]


_STEPS = {
    "fp32": (16, 2048, 64),
    "fp16": (16, 1024, 64),
    "bf16": (16, 1024, 32),
    "fp8_block": (128, 4160, 256),
    "w8": (32, 1088, 40),
    "w4": (32, 640, 40),
    "w4_shifted": (32, 576, 40),
}


class _SchemeType(types.Type):
    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        super().__init__(name=f"Scheme({scheme.name},{','.join(scheme.target.features)})")


@typeof_impl.register(Scheme)
def _typeof_scheme(value: Scheme, context: object) -> _SchemeType:
    return _SchemeType(value)


register_model(_SchemeType)(models.OpaqueModel)


@lower_constant(_SchemeType)
def _constant_scheme(context: Any, builder: Any, ty: object, value: object) -> Any:
    return context.get_dummy_value()


# -- rows of x -------------------------------------------------------------------------------------------------------


def prepare(scheme: Any, size: Any, x: Any, stride: Any, rows: Any, count: Any, out: Any) -> None:
    """Writes one step of a tile of `size` (a literal: 1, 2, 4 or 8) rows to `out`: for each word, one a row.

    x is the address of the step in the first row; `stride` bytes further lies the next row, if there is one (`rows`
    counts them). `count` float32 of K are left; zeros stand for those a step needs beyond them.
    """
    raise NotImplementedError("for use inside kernels")


@overload(prepare, prefer_literal=True)
def _prepare(scheme, size, x, stride, rows, count, out):
    name, n = scheme.scheme.name, size.literal_value
    shift = {"w8": 128, "w4_shifted": 8}.get(name, 0)

    def f32(scheme, size, x, stride, rows, count, out):
        pack_f32(n, x, stride, rows, count, out)

    def bf16(scheme, size, x, stride, rows, count, out):
        pack_bf16(n, x, stride, rows, count, out)

    def bf16_128(scheme, size, x, stride, rows, count, out):
        for i in range(8):
            pack_bf16(n, x + i * 64, stride, rows, count - i * 16, out + i * 32 * n)

    def int8(scheme, size, x, stride, rows, count, out):
        pack_i8(n, x, stride, rows, shift, out)

    return {"fp32": f32, "fp16": f32, "bf16": bf16, "fp8_block": bf16_128}.get(name, int8)


# -- products --------------------------------------------------------------------------------------------------------


def multiply(scheme: Any, acc: Any, w: Any, x: Any, stride: Any, steps: Any) -> Any:
    """acc + the product of the block at address w with the tile of prepared rows at x, over `steps` steps along K.

    `stride`: bytes between a row's words, 4 * rows of the tile.
    """
    raise NotImplementedError("for use inside kernels")


@overload(multiply)
def _multiply(scheme, acc, w, x, stride, steps):
    target = scheme.scheme.target

    def fp32(scheme, acc, w, x, stride, steps):
        for _ in range(steps):
            for i in range(16):
                acc = tile_fma(acc, (load_f32x16(w + i * 128), load_f32x16(w + i * 128 + 64)), x + i * stride)
            w += 2048
            x += 16 * stride
        return acc

    def fp16(scheme, acc, w, x, stride, steps):
        for _ in range(steps):
            for i in range(16):
                acc = tile_fma(acc, (load_f16x16(w + i * 64), load_f16x16(w + i * 64 + 32)), x + i * stride)
            w += 1024
            x += 16 * stride
        return acc

    def bf16(scheme, acc, w, x, stride, steps):
        for _ in range(steps):
            for i in range(8):
                acc = tile_dot_bf16(target, acc, load_pair(acc, _PREFETCHED, w + i * 128), x + i * stride)
            w += 1024
            x += 8 * stride
        return acc

    def fp8_block(scheme, acc, w, x, stride, steps):
        for _ in range(steps):
            part = tile_clear(acc)
            for i in range(32):
                left, right = load_pair(acc, _PREFETCHED, w + i * 128)
                a, b = e4m3_to_bf16(target, left)
                c, d = e4m3_to_bf16(target, right)
                part = tile_dot_bf16(target, part, (a, c), x + 2 * i * stride)
                part = tile_dot_bf16(target, part, (b, d), x + (2 * i + 1) * stride)
            acc = tile_add_product(acc, part, splat(load_f32(w + 4096)))
            w += 4160
            x += 64 * stride
        return acc

    def w8(scheme, acc, w, x, stride, steps):
        for _ in range(steps):
            scales = load_f16x16(w + 1024), load_f16x16(w + 1056)
            dots = tile_splat_i32(acc, scales, x + 9 * stride)
            for i in range(8):
                codes = load_pair(acc, _PREFETCHED_W8, w + i * 128)
                dots = tile_dot_u8s8(target, dots, codes, x + i * stride)
            acc = tile_add_scaled(acc, dots, scales, x + 8 * stride)
            w += 1088
            x += 10 * stride
        return acc

    def w4(scheme, acc, w, x, stride, steps):
        for _ in range(steps):
            dots = tile_zeros_i32(acc)
            for i in range(4):
                left, right = load_pair(acc, _PREFETCHED, w + i * 128)
                low0, high0 = nibbles(left)
                low1, high1 = nibbles(right)
                dots = tile_dot_u8s8(target, dots, (low0, low1), x + i * stride)
                dots = tile_dot_u8s8(target, dots, (high0, high1), x + (i + 4) * stride)
            acc = tile_add_scaled(acc, dots, (load_f16x16(w + 512), load_f16x16(w + 544)), x + 8 * stride)
            acc = tile_fma(acc, (load_f16x16(w + 576), load_f16x16(w + 608)), x + 9 * stride)
            w += 640
            x += 10 * stride
        return acc

    def w4_shifted(scheme, acc, w, x, stride, steps):
        for _ in range(steps):
            scales = load_f16x16(w + 512), load_f16x16(w + 544)
            dots = tile_splat_i32(acc, scales, x + 9 * stride)
            for i in range(4):
                left, right = load_pair(acc, _PREFETCHED, w + i * 128)
                low0, high0 = nibbles(left)
                low1, high1 = nibbles(right)
                dots = tile_dot_u8s8(target, dots, (low0, low1), x + i * stride)
                dots = tile_dot_u8s8(target, dots, (high0, high1), x + (i + 4) * stride)
            acc = tile_add_scaled(acc, dots, scales, x + 8 * stride)
            w += 576
            x += 10 * stride
        return acc

    loops = {f.__name__: f for f in (fp32, fp16, bf16, fp8_block, w8, w4, w4_shifted)}
    return loops[scheme.scheme.name]
