"""int8 with a symmetric float32 scale per token and head, after the randomised Hadamard rotation of K and of V.

Near lossless: the rotation makes each head's values close to Gaussian, for which 8 bits per value are 43 dB.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pocketllm.cache.formats.base import KVFormat, absmax_scale
from pocketllm.cache.formats.rotation import rotate, rotate_back
from pocketllm.kernels.types import PlaneSpec


def encode_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D], already rotated -> codes int8 [..., D] and scale [..., 1] float32. Rounds half to even."""
    scale = absmax_scale(x, 127.0)
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


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


FORMATS = (Int8PerTokenHead(),)
