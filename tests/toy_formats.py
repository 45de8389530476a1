"""KV formats that exist in tests only: what a new format needs is what stands here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pocketllm.cache.formats import KVFormat
from pocketllm.cache.formats.plain import Plain
from pocketllm.kernels.types import PlaneSpec


class Int16Fixed(KVFormat):
    """16-bit fixed point; V is stored before K, and both in one plane of pairs, as no built-in format does."""

    name = "int16_fixed"
    tolerance = 2e-3
    drops_key_bias = False

    def planes(self, head_dim: int) -> tuple[PlaneSpec, ...]:
        return (PlaneSpec("vk", 2 * head_dim, torch.int16),)

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return ((torch.cat((v, k), dim=-1).float() * 1024).round().clamp(-32767, 32767).to(torch.int16),)

    def decode(self, planes: Sequence[Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        v, k = (planes[0].float() / 1024).chunk(2, dim=-1)
        return k, v


class Fp32WithoutKeyBias(Plain):
    """Loses nothing, but leaves the K bias out of storage as the quantised formats do."""

    drops_key_bias = True

    def __init__(self) -> None:
        super().__init__("fp32_without_key_bias", torch.float32, 1e-6)
