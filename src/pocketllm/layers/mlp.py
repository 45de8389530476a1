"""The dense feed-forward block: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor

from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import Activations
from pocketllm.layers.linear import Linear, RowParallelLinear
from pocketllm.models.config import ModelConfig
from pocketllm.parallel import FEED_FORWARD, Summands, TensorParallel
from pocketllm.weights.source import WeightSource


class MLP:
    def __init__(
        self, config: ModelConfig, tp: TensorParallel, kernels: Kernels, source: WeightSource, intermediate_size: int
    ) -> None:
        hidden, inner = config.hidden_size, tp.shard(intermediate_size, "intermediate_size")
        bias = config.mlp_bias
        self.gate_up = Linear(kernels, source.linear(["gate_proj", "up_proj"], [inner, inner], hidden, bias=bias))
        self.down = RowParallelLinear(tp, kernels, source, "down_proj", hidden, inner, place=FEED_FORWARD, bias=bias)
        self.readers = self.gate_up.parts

    def __call__(self, x: Activations) -> Summands:
        """x [M, H] -> [M, H]."""
        return self.down(self.gate_up.gated(x, [self.down.weight]))

    def summand(self, x: Activations) -> Tensor:
        """This rank's part of the result, for a caller that adds more to it before it sums over the ranks."""
        return self.down.summand(self.gate_up.gated(x, [self.down.weight]))
