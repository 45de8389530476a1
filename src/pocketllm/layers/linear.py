"""`Linear`: one or more stacked weight matrices applied to the same input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import LinearWeight


class Linear:
    """y = x W^T + bias. Stacked matrices (q|k|v, gate|up) in one storage format are one product; else one per part."""

    def __init__(self, kernels: Kernels, parts: Sequence[LinearWeight]) -> None:
        self._kernels = kernels
        self.parts = list(parts)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""
        outputs = [self._kernels.linear(x, part) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def gated(self, x: Tensor) -> Tensor:
        """For a stack gate | up: x [M, K] -> silu(gate) * up, [M, N / 2]."""
        if len(self.parts) == 1:
            return self._kernels.gated_linear(x, self.parts[0])
        return self._kernels.silu_mul(self(x))
