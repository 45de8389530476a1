"""The dense feed-forward block: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor

from pocketllm.kernels.protocol import Kernels
from pocketllm.layers.linear import Linear
from pocketllm.models.config import ModelConfig
from pocketllm.parallel import TensorParallel
from pocketllm.weights.source import WeightSource


class MLP:
    def __init__(
        self, config: ModelConfig, tp: TensorParallel, kernels: Kernels, source: WeightSource, intermediate_size: int
    ) -> None:
        hidden, inner = config.hidden_size, tp.shard(intermediate_size, "intermediate_size")
        bias = config.mlp_bias
        self._tp = tp
        self.gate_up = Linear(kernels, source.linear(["gate_proj", "up_proj"], [inner, inner], hidden, bias=bias))
        self.down = Linear(kernels, source.linear(["down_proj"], [hidden], inner, bias=bias))

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, H] -> [M, H]."""
        return self._tp.all_reduce(self.down(self.gate_up.gated(x)))
