"""8-bit floats (e4m3) with a float32 scale per token and head.

The scale is dynamic: with a fixed scale of 1, small keys underflow and large ones saturate, which ruins models with a K
bias. Floats of 3 bits of fraction are no finer for being larger, so the scale need not put the largest value at the end of
the range: of four scales within a factor of two, the one whose codes fit best is taken, and then what makes x . decode(x) =
|x|^2. Against the one scale by the largest value, that lowers the squared error by a tenth and more, and the mean KL
divergence of two models by 30% (docs/kv-quality.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pocketllm.cache.formats.base import KVFormat, absmax_scale
from pocketllm.kernels.types import PlaneSpec

if TYPE_CHECKING:
    from pocketllm.kernels.numba.format_pieces import FormatPieces, Lanes
    from pocketllm.kernels.triton.pieces import TritonPieces

E4M3_MAX = 448.0
FACTORS = (1.0, 2**0.25, 2**0.5, 2**0.75)  # of the scale that puts the largest value at the end of the range
TINY = 1e-12  # keeps all-zero rows finite; far below any K or V of a real model


def encode_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> codes [..., D] e4m3 and scale [..., 1] float32.

    Of codes c of a row, (x . c)^2 / |c|^2 is the part of |x|^2 that they explain with the best scale for them.
    """
    x = x.float()
    first = absmax_scale(x, E4M3_MAX)
    codes, most = torch.zeros_like(x), torch.full_like(first, -1.0)
    for factor in FACTORS:
        tried = (x / (first * factor)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
        product, square = (x * tried).sum(-1, keepdim=True), tried.square().sum(-1, keepdim=True)
        explained = product * product / square.clamp_min(TINY)
        better = (explained > most) | explained.isnan()
        codes, most = torch.where(better, tried, codes), torch.where(better, explained, most)
    product = (x * codes).sum(-1, keepdim=True).clamp_min(TINY)
    scale = (x.square().sum(-1, keepdim=True) / product).clamp_min(TINY)
    return codes.to(torch.float8_e4m3fn), scale


class Fp8(KVFormat):
    name = "fp8"
    tolerance = 0.05

    def planes(self, head_dim: int) -> tuple[PlaneSpec, ...]:
        return (
            PlaneSpec("k", head_dim, torch.float8_e4m3fn),
            PlaneSpec("v", head_dim, torch.float8_e4m3fn),
            PlaneSpec("k_scale", 1, torch.float32),
            PlaneSpec("v_scale", 1, torch.float32),
        )

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        (k_codes, k_scale), (v_codes, v_scale) = encode_e4m3(k), encode_e4m3(v)
        return k_codes, v_codes, k_scale, v_scale

    def decode(self, planes: Sequence[Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        k, v, k_scale, v_scale = planes
        return k.float() * k_scale, v.float() * v_scale

    def numba_pieces(self, head_dim: int) -> FormatPieces:
        from pocketllm.kernels.numba.format_pieces import scaled_pieces
        from pocketllm.kernels.numba.format_simd import absmax, load_e4m3x16, store_e4m3x16
        from pocketllm.kernels.numba.simd import fma, load_f32x16, splat, store_f32
        from pocketllm.kernels.numba.vector_math import divide, larger_or_nan, smaller_or_nan, sum_lanes

        tries, tiny = len(FACTORS), np.float32(TINY)
        factors = tuple(np.float32(factor) for factor in FACTORS)

        def encode(x: int, codes: int, scale_at: int) -> None:
            """Sums run in another order than torch's: where two scales fit alike, the other one may be taken."""
            first = absmax(x, head_dim) / np.float32(E4M3_MAX)
            best, most, scale = 0, np.float32(-1), first
            for attempt in range(tries + 1):
                chosen = attempt if attempt < tries else best  # once more, for its codes
                guess = splat(first * factors[chosen])
                products, squares, whole = splat(0.0), splat(0.0), splat(0.0)
                for i in range(0, head_dim, 16):
                    y = load_f32x16(x + i * 4)
                    code = divide(y, guess)
                    store_e4m3x16(codes + i, smaller_or_nan(larger_or_nan(code, splat(-E4M3_MAX)), splat(E4M3_MAX)))
                    code = load_e4m3x16(codes + i)
                    products, squares, whole = fma(y, code, products), fma(code, code, squares), fma(y, y, whole)
                product, square = sum_lanes(products), sum_lanes(squares)
                explained = product * product / (tiny if square < tiny else square)
                if attempt < tries and not explained <= most:
                    best, most = attempt, explained
                scale = sum_lanes(whole) / (tiny if product < tiny else product)
            store_f32(scale_at, tiny if scale < tiny else scale)

        def load(codes: int, i: int) -> Lanes:
            return load_e4m3x16(codes + i)

        sizes = tuple(p.nbytes for p in self.planes(head_dim))
        return scaled_pieces(self.name, head_dim, sizes, None, (encode, encode), (load, load))

    def triton_pieces(self, head_dim: int) -> TritonPieces:
        from pocketllm.cache.formats.triton.fp8 import PIECES

        return PIECES


FORMATS = (Fp8(),)
