"""RMSNorm with an optional residual sum."""

from __future__ import annotations

from torch import Tensor

from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import Activations, Readers
from pocketllm.models.config import ModelConfig
from pocketllm.parallel import Summands
from pocketllm.weights.source import WeightSource


class RMSNorm:
    """The weight is held in float32; models that multiply by (1 + w) have the 1 added at load."""

    def __init__(self, config: ModelConfig, kernels: Kernels, source: WeightSource, name: str, size: int) -> None:
        self.weight = source.tensor(f"{name}.weight", (size,), offset=config.norm_offset)
        self.eps = config.rms_norm_eps
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, K]."""
        return self._kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Summands, residual: Tensor, readers: Readers = ()) -> Activations:
        """Adds x to residual in place; returns the norm of the sum, for `readers` as in `kernels.protocol`."""
        return self._kernels.add_rms_norm(x, residual, self.weight, self.eps, readers)
