"""K and V kept as numbers of one floating-point type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pocketllm.cache.formats.base import KVFormat
from pocketllm.kernels.types import PlaneSpec

if TYPE_CHECKING:
    from pocketllm.kernels.numba.format_pieces import FormatPieces, Lanes, Row
    from pocketllm.kernels.triton.pieces import TritonPieces


class Plain(KVFormat):
    drops_key_bias = False

    def __init__(self, name: str, dtype: torch.dtype, tolerance: float) -> None:
        self.name = name
        self.dtype = dtype
        self.tolerance = tolerance

    def planes(self, head_dim: int) -> tuple[PlaneSpec, ...]:
        return PlaneSpec("k", head_dim, self.dtype), PlaneSpec("v", head_dim, self.dtype)

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return k.to(self.dtype), v.to(self.dtype)

    def decode(self, planes: Sequence[Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        k, v = planes
        return k.float(), v.float()

    def numba_pieces(self, head_dim: int) -> FormatPieces:
        from pocketllm.kernels.numba import format_simd, simd
        from pocketllm.kernels.numba.format_pieces import FormatPieces

        load, store = {
            torch.float32: (simd.load_f32x16, simd.store_f32x16),
            torch.float16: (simd.load_f16x16, format_simd.store_f16x16),
            torch.bfloat16: (simd.load_bf16x16, format_simd.store_bf16x16),
        }[self.dtype]
        load_f32x16, size = simd.load_f32x16, self.dtype.itemsize

        def encode_row(k: int, v: int, row: Row) -> None:
            for i in range(0, head_dim, 16):
                store(row[0] + i * size, load_f32x16(k + i * 4))
                store(row[1] + i * size, load_f32x16(v + i * 4))

        def load_k(row: Row, i: int) -> Lanes:
            return load(row[0] + i * size)

        def load_v(row: Row, i: int) -> Lanes:
            return load(row[1] + i * size)

        def no_scale(row: Row) -> float:
            return 1.0

        sizes = tuple(p.nbytes for p in self.planes(head_dim))
        return FormatPieces(self.name, head_dim, sizes, None, encode_row, load_k, load_v, no_scale, no_scale)

    def triton_pieces(self, head_dim: int) -> TritonPieces:
        from pocketllm.cache.formats.triton.plain import pieces

        return pieces(self.dtype)


FORMATS = (
    Plain("fp32", torch.float32, 1e-6),
    Plain("fp16", torch.float16, 1e-3),
    Plain("bf16", torch.bfloat16, 8e-3),
)
