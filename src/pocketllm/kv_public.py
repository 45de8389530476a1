"""The k8v4 scheme that other engines ship, for comparison by `kv_eval` in the same run. Engines do not offer it.

K: a plain cast to e4m3, no scale, no rotation. V: 16 evenly spaced levels between the smallest and the largest value of the
token's head, their distance and the minimum stored as fp16, no rotation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pocketllm.cache.formats.base import KVFormat
from pocketllm.kernels.types import PlaneSpec

E4M3_MAX = 448.0


def encode_min_max4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., D] -> codes 0..15 uint8 [..., D], step and minimum fp16 [..., 1]. Codes are chosen with the unrounded step."""
    low, high = x.aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    codes = ((x - low) / step.clamp_min(1e-12) + 0.5).floor().clamp(0, 15).to(torch.uint8)
    return codes, step.half(), low.half()


class PublicK8V4(KVFormat):
    name = "public_k8v4"
    tolerance = 0.15
    drops_key_bias = False

    def planes(self, head_dim: int) -> tuple[PlaneSpec, ...]:
        return (
            PlaneSpec("k", head_dim, torch.float8_e4m3fn),
            PlaneSpec("v", head_dim // 2, torch.uint8),
            PlaneSpec("v_step", 1, torch.float16),
            PlaneSpec("v_low", 1, torch.float16),
        )

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        codes, step, low = encode_min_max4(v.float())
        packed = codes[..., ::2] | codes[..., 1::2] << 4
        return k.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), packed, step, low

    def decode(self, planes: Sequence[Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        k, packed, step, low = planes
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)  # [..., D]
        return k.float(), codes.float() * step.float() + low.float()
