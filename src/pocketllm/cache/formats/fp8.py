"""8-bit floats (e4m3) with a float32 scale per token and head.

The scale is dynamic: with a fixed scale of 1, small keys underflow and large ones saturate, which ruins models with a K
bias. No rotation: it would mix a large channel into all others, and e4m3's relative precision gains nothing from that
(measured: perplexity +26% on a model with a K bias).
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
    from pocketllm.kernels.numba.format_pieces import FormatPieces
    from pocketllm.kernels.triton.pieces import TritonPieces

E4M3_MAX = 448.0


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
        k_scale, v_scale = absmax_scale(k, E4M3_MAX), absmax_scale(v, E4M3_MAX)
        return (
            (k.float() / k_scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn),
            (v.float() / v_scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn),
            k_scale,
            v_scale,
        )

    def decode(self, planes: Sequence[Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        k, v, k_scale, v_scale = planes
        return k.float() * k_scale, v.float() * v_scale

    def numba_pieces(self, head_dim: int) -> FormatPieces:
        from pocketllm.kernels.numba.format_pieces import scaled_pieces
        from pocketllm.kernels.numba.format_simd import absmax, load_e4m3x16, store_e4m3x16
        from pocketllm.kernels.numba.simd import load_f32x16, splat, store_f32
        from pocketllm.kernels.numba.vector_math import divide, larger_or_nan, smaller_or_nan

        def encode(x, codes, scale_at):  # type: ignore[no-untyped-def]
            scale = absmax(x, head_dim) / np.float32(E4M3_MAX)
            store_f32(scale_at, scale)
            for i in range(0, head_dim, 16):
                y = divide(load_f32x16(x + i * 4), splat(scale))
                store_e4m3x16(codes + i, smaller_or_nan(larger_or_nan(y, splat(-E4M3_MAX)), splat(E4M3_MAX)))

        def load(codes, i):  # type: ignore[no-untyped-def]
            return load_e4m3x16(codes + i)

        sizes = tuple(p.nbytes for p in self.planes(head_dim))
        return scaled_pieces(self.name, head_dim, sizes, None, (encode, encode), (load, load))

    def triton_pieces(self, head_dim: int) -> TritonPieces:
        from pocketllm.cache.formats.triton.fp8 import PIECES

        return PIECES


FORMATS = (Fp8(),)
