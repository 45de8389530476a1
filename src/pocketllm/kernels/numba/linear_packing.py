"""Weights repacked, once at load, for the inner loops of `linear_tiles`: same bytes, other order.

The packed matrix is one uint8 tensor [N/32, K/step, bytes of a step]; rows and columns are padded with zeros to whole
blocks and steps. `PackedFormat` still answers as the format it holds: it decodes all of it, or rows for an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pocketllm.kernels.numba.linear_tiles import COLUMNS, Scheme
from pocketllm.kernels.numba.simd import Target
from pocketllm.kernels.types import LinearWeight, TensorSpec, WeightFormat

_CHUNK = 2048  # rows packed at a time: bounds the working copy


@dataclass(frozen=True)
class PackedFormat:
    """`source` stored by `scheme` for a matrix of `shape`."""

    source: WeightFormat
    scheme: Scheme
    shape: tuple[int, int]  # (N, K)

    @property
    def name(self) -> str:
        return self.source.name

    def specs(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        size = (-(-n // COLUMNS), -(-k // self.scheme.step), self.scheme.step_bytes)
        return (TensorSpec("packed", size, torch.uint8),)

    def decode(self, tensors: Sequence[Tensor]) -> Tensor:
        return self._unpack(tensors[0].unflatten(0, (1, -1)).transpose(0, 1))[: self.shape[0]]

    def decode_rows(self, tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
        blocks = rows // COLUMNS
        raise NotImplementedError
