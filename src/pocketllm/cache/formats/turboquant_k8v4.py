"""TurboQuant K8V4: K in 8 bits, V in 4 bits, both after the randomised Hadamard rotation, one scale each per token-head.

After the rotation a head's values are close to Gaussian whatever the model did (TurboQuant, arXiv 2504.19874), so V's 16
levels can be fixed in advance: code q stands for scale * level(q - 7.5) with level(x) = x + 0.0055 x^3. The cubic follows
the Lloyd-Max quantiser of a Gaussian to within 0.3 dB and is computed in two multiply-adds, where a table would need a
gather per value. The scale is the least-squares one for the codes chosen.

Two codes share a byte in planar halves: the low nibble of byte j is element j, the high nibble element j + D/2, so both
halves unpack to contiguous vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pocketllm.cache.formats.base import KVFormat
from pocketllm.cache.formats.int8_per_token_head import encode_int8
from pocketllm.cache.formats.rotation import rotate, rotate_back
from pocketllm.kernels.types import PlaneSpec

CUBIC = 0.0055


def levels() -> Tensor:
    """The 16 levels [16] float32, ascending, before the scale."""
    x = torch.arange(16, dtype=torch.float32) - 7.5
    return x + CUBIC * x**3


LEVELS_RMS = 3.7  # start of the scale search: a Gaussian of this RMS fills the levels best


def encode_v4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D], already rotated -> packed codes uint8 [..., D/2] and scale [..., 1] float32."""
    table = levels().to(x.device)
    midpoints = (table[1:] + table[:-1]) / 2
    scale = x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12) / LEVELS_RMS
    for _ in range(2):  # nearest codes for the scale, then the best scale for the codes
        level = table[torch.bucketize(x / scale, midpoints)]
        scale = ((x * level).sum(-1, keepdim=True) / level.square().sum(-1, keepdim=True)).clamp_min(1e-12)
    low, high = torch.bucketize(x / scale, midpoints).to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4, scale


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


FORMATS = (TurboQuantK8V4(),)
