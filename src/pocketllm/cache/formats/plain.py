"""K and V kept as numbers of one floating-point type."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pocketllm.cache.formats.base import KVFormat
from pocketllm.kernels.types import PlaneSpec


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


FORMATS = (
    Plain("fp32", torch.float32, 1e-6),
    Plain("fp16", torch.float16, 1e-3),
    Plain("bf16", torch.bfloat16, 8e-3),
)
