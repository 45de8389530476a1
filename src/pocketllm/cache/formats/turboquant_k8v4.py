"""TurboQuant K8V4: K in 8 bits, V in 4 bits, both after the randomised Hadamard rotation, one scale each per token-head.

After the rotation a head's values are close to Gaussian whatever the model did (TurboQuant, arXiv 2504.19874), so V's 16
levels can be fixed in advance: code q stands for scale * level(q - 7.5) with level(x) = x + CUBIC x^3. The cubic follows
the Lloyd-Max quantiser of a Gaussian closely and is computed in two multiply-adds, where a table would need a gather per
value. A row's codes are the nearest ones for a least-squares scale, from the better of two starts: one fits a Gaussian of
the row's size, one puts the row's largest value on the outermost level. The scale stored with them is a little larger:
that which makes x . decode(x) = |x|^2. A least-squares fit is always shorter than x, and where attention averages the
errors of many tokens away, that bias is what stays. docs/kv-quality.md compares the alternatives.

Two codes share a byte in planar halves: the low nibble of byte j is element j, the high nibble element j + D/2, so both
halves unpack to contiguous vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pocketllm.cache.formats.base import KVFormat
from pocketllm.cache.formats.int8_per_token_head import encode_int8, numba_int8
from pocketllm.cache.formats.rotation import rotate, rotate_back, signs
from pocketllm.kernels.types import PlaneSpec

if TYPE_CHECKING:
    from pocketllm.kernels.numba.format_pieces import FormatPieces
    from pocketllm.kernels.triton.pieces import TritonPieces

CUBIC = 1 / 133.375  # its inverse is an fp16 number, which GPU kernels use


_TINY = 1e-12


def levels() -> Tensor:
    """The 16 levels [16] float32, ascending, before the scale."""
    x = torch.arange(16, dtype=torch.float32) - 7.5
    return x + CUBIC * x**3


LEVELS_RMS = 4.0  # first start of the scale search: a Gaussian of this RMS
LARGEST = 0.95  # second start: the largest value over the outermost level, times this


def encode_v4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D], already rotated -> packed codes uint8 [..., D/2] and scale [..., 1] float32."""
    table = levels().to(x.device)
    midpoints = (table[1:] + table[:-1]) / 2

    def fit(scale: Tensor) -> tuple[Tensor, Tensor]:
        """Of the codes nearest for `scale`: their best scale, and the part of |x|^2 it explains."""
        level = table[torch.bucketize(x / scale, midpoints)]
        product, square = (x * level).sum(-1, keepdim=True), level.square().sum(-1, keepdim=True)
        return (product / square).clamp_min(_TINY), product.square() / square

    size = x.square().mean(-1, keepdim=True).sqrt().clamp_min(_TINY) / LEVELS_RMS
    outermost = x.abs().amax(-1, keepdim=True).clamp_min(_TINY) * (LARGEST / table[-1])
    (scale, explained), (other, other_explained) = fit(size), fit(outermost)
    scale = torch.where(other_explained > explained, other, scale)
    codes = torch.bucketize(x / scale, midpoints)
    product = (x * table[codes]).sum(-1, keepdim=True).clamp_min(_TINY)
    scale = (x.square().sum(-1, keepdim=True) / product).clamp_min(_TINY)
    low, high = codes.to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4, scale


def numba_v4(head_dim: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(encode, load) of V's codes for Numba kernels.

    Sums run in another order than torch's, so the scale may differ from `encode_v4`'s in its last bits, and a value that
    stands at a midpoint between two levels may get the other one.
    """
    from pocketllm.kernels.numba.format_simd import (
        count_below,
        load_high_nibbles,
        load_low_nibbles,
        load_nibbles,
        look_up,
        store_nibbles,
    )
    from pocketllm.kernels.numba.simd import fma, load_f32x16, splat, store_f32, store_f32x16
    from pocketllm.kernels.numba.vector_math import divide, larger, max_lanes, sum_lanes

    half = head_dim // 2
    values = levels()
    table = tuple(np.float32(x) for x in values.tolist())
    midpoints = tuple(np.float32(x) for x in ((values[1:] + values[:-1]) / 2).tolist())
    tiny, largest = np.float32(_TINY), np.float32(LARGEST / values[-1].item())

    def encode(x, packed, scale_at):  # type: ignore[no-untyped-def]
        squares, extreme = splat(0.0), splat(0.0)
        for i in range(0, head_dim, 16):
            y = load_f32x16(x + i * 4)
            squares = fma(y, y, squares)
            extreme = larger(extreme, larger(y, splat(0.0) - y))
        whole, outermost = sum_lanes(squares), max_lanes(extreme)
        rms = np.sqrt(whole / np.float32(head_dim))
        scale, most = tiny, np.float32(-1)
        for start in range(2):
            if start == 0:
                guess = (tiny if rms < tiny else rms) / np.float32(LEVELS_RMS)
            else:
                guess = (tiny if outermost < tiny else outermost) * largest
            products, squares = splat(0.0), splat(0.0)
            for i in range(0, head_dim, 16):
                y = load_f32x16(x + i * 4)
                level = look_up(count_below(divide(y, splat(guess)), midpoints), table)
                products, squares = fma(y, level, products), fma(level, level, squares)
            product, square = sum_lanes(products), sum_lanes(squares)
            if start == 0 or product * product / square > most:
                most = product * product / square
                best = product / square
                scale = tiny if best < tiny else best
        products = splat(0.0)
        for i in range(0, head_dim, 16):  # codes take the values' place, so that halves need no alignment to vectors
            y = load_f32x16(x + i * 4)
            codes = count_below(divide(y, splat(scale)), midpoints)
            products = fma(y, look_up(codes, table), products)
            store_f32x16(x + i * 4, codes)
        product = sum_lanes(products)
        scale = whole / (tiny if product < tiny else product)
        store_f32(scale_at, tiny if scale < tiny else scale)
        for i in range(0, half, 8):
            store_nibbles(packed + i, load_f32x16(x + i * 4), load_f32x16(x + (half + i) * 4))

    def load_whole(codes, i):  # type: ignore[no-untyped-def]
        if i < half:
            return load_low_nibbles(codes + i, table)
        return load_high_nibbles(codes + i - half, table)

    def load_parts(codes, i):  # type: ignore[no-untyped-def]
        first, first_shift = (codes + i, 0) if i < half else (codes + i - half, 4)
        second, second_shift = (codes + i + 8, 0) if i + 8 < half else (codes + i + 8 - half, 4)
        return load_nibbles(first, first_shift, second, second_shift, table)

    return encode, load_whole if half % 16 == 0 else load_parts


class TurboQuantK8V4(KVFormat):
    name = "turboquant_k8v4"
    tolerance = 0.13

    def planes(self, head_dim: int) -> tuple[PlaneSpec, ...]:
        if head_dim % 2:
            raise ValueError(f"turboquant_k8v4 packs two values to a byte: head_dim {head_dim} must be even")
        return (
            PlaneSpec("k", head_dim, torch.int8),
            PlaneSpec("v", head_dim // 2, torch.uint8),
            PlaneSpec("k_scale", 1, torch.float32),
            PlaneSpec("v_scale", 1, torch.float32),
        )

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        k_codes, k_scale = encode_int8(rotate(k))
        v_codes, v_scale = encode_v4(rotate(v))
        return k_codes, v_codes, k_scale, v_scale

    def decode(self, planes: Sequence[Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        k, v, k_scale, v_scale = planes
        codes = torch.cat((v & 15, v >> 4), dim=-1)  # [..., D]
        return rotate_back(k.float() * k_scale), rotate_back(levels().to(v.device)[codes.long()] * v_scale)

    def numba_pieces(self, head_dim: int) -> FormatPieces:
        from pocketllm.kernels.numba.format_pieces import scaled_pieces

        (encode_k, load_k), (encode_v, load_v) = numba_int8(head_dim), numba_v4(head_dim)
        sizes = tuple(p.nbytes for p in self.planes(head_dim))
        return scaled_pieces(self.name, head_dim, sizes, signs(head_dim), (encode_k, encode_v), (load_k, load_v))

    def triton_pieces(self, head_dim: int) -> TritonPieces:
        from pocketllm.cache.formats.triton.turboquant_k8v4 import pieces

        return pieces(head_dim)


FORMATS = (TurboQuantK8V4(),)
