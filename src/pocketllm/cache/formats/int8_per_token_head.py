"""int8 with a symmetric float32 scale per token and head, after the randomised Hadamard rotation of K and of V.

Near lossless: the rotation makes each head's values close to Gaussian, for which 8 bits per value are 43 dB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pocketllm.cache.formats.base import KVFormat, absmax_scale
from pocketllm.cache.formats.rotation import rotate, rotate_back, signs
from pocketllm.kernels.types import PlaneSpec

if TYPE_CHECKING:
    from pocketllm.kernels.numba.format_pieces import FormatPieces, Lanes
    from pocketllm.kernels.triton.pieces import TritonPieces


def encode_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D], already rotated -> codes int8 [..., D] and scale [..., 1] float32. Rounds half to even."""
    scale = absmax_scale(x, 127.0)
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


def numba_int8(head_dim: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(encode, load) of int8 codes for Numba kernels, see `format_pieces.scaled_pieces`. Bit for bit `encode_int8`."""
    from pocketllm.kernels.numba.format_simd import absmax, load_i8x16, store_i8x16
    from pocketllm.kernels.numba.simd import load_f32x16, splat, store_f32
    from pocketllm.kernels.numba.vector_math import divide, round_even

    def encode(x: int, codes: int, scale_at: int) -> None:
        scale = absmax(x, head_dim) / np.float32(127.0)
        store_f32(scale_at, scale)
        for i in range(0, head_dim, 16):
            store_i8x16(codes + i, round_even(divide(load_f32x16(x + i * 4), splat(scale))))

    def load(codes: int, i: int) -> Lanes:
        return load_i8x16(codes + i)

    return encode, load


class Int8PerTokenHead(KVFormat):
    name = "int8_per_token_head"
    tolerance = 0.015

    def planes(self, head_dim: int) -> tuple[PlaneSpec, ...]:
        return (
            PlaneSpec("k", head_dim, torch.int8),
            PlaneSpec("v", head_dim, torch.int8),
            PlaneSpec("k_scale", 1, torch.float32),
            PlaneSpec("v_scale", 1, torch.float32),
        )

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        k_codes, k_scale = encode_int8(rotate(k))
        v_codes, v_scale = encode_int8(rotate(v))
        return k_codes, v_codes, k_scale, v_scale

    def decode(self, planes: Sequence[Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        k, v, k_scale, v_scale = planes
        return rotate_back(k.float() * k_scale), rotate_back(v.float() * v_scale)

    def numba_pieces(self, head_dim: int) -> FormatPieces:
        from pocketllm.kernels.numba.format_pieces import scaled_pieces

        encode, load = numba_int8(head_dim)
        sizes = tuple(p.nbytes for p in self.planes(head_dim))
        return scaled_pieces(self.name, head_dim, sizes, signs(head_dim), (encode, encode), (load, load))

    def triton_pieces(self, head_dim: int) -> TritonPieces:
        from pocketllm.cache.formats.triton.int8_per_token_head import pieces

        return pieces(head_dim)


FORMATS = (Int8PerTokenHead(),)
