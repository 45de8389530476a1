"""Sparse mixture of experts: a router picks top_k of many small MLPs per token; some models add one that always runs."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import Activations, LinearWeight
from pocketllm.layers.linear import Linear, sum_over_ranks
from pocketllm.layers.mlp import MLP
from pocketllm.models.config import ModelConfig
from pocketllm.parallel import FEED_FORWARD, Summands, TensorParallel
from pocketllm.weights.source import WeightSource


class SparseMoE:
    """Every rank has a part of every expert: its router chooses the same experts as the others', and none waits."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, kernels: Kernels, source: WeightSource) -> None:
        moe = config.moe
        if moe is None:
            raise ValueError("a sparse layer needs config.moe")
        self._tp, self._kernels, self._moe = tp, kernels, moe
        hidden, inner = config.hidden_size, tp.shard(moe.expert_intermediate_size, "moe_intermediate_size")
        self.readers: list[LinearWeight] = []  # experts read x as a tensor
        self.router = Linear(kernels, source.linear(["gate"], [moe.num_experts], hidden, role="small"))
        self.gate_up, self.down = [], []
        for index in range(moe.num_experts):
            expert = source.scope(f"experts.{index}")
            (gate_up,) = expert.linear(["gate_proj", "up_proj"], [inner, inner], hidden)
            (down,) = expert.linear(["down_proj"], [hidden], inner)
            self.gate_up.append(gate_up)
            self.down.append(down)
        self.shared: MLP | None = None
        if moe.shared_intermediate_size:
            shared = source.scope("shared_expert")
            self.shared = MLP(config, tp, kernels, shared, moe.shared_intermediate_size)
            self.shared_gate = Linear(kernels, source.linear(["shared_expert_gate"], [1], hidden, role="small"))

    def __call__(self, x: Activations) -> Summands:
        """x [M, H] -> [M, H]."""
        x = cast(Tensor, x)  # as no readers were named
        probabilities = self.router(x).float().softmax(-1)
        weights, experts = probabilities.topk(self._moe.top_k, dim=-1)  # [M, top_k]
        if self._moe.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        out = self._kernels.moe(x, experts, weights, self.gate_up, self.down)
        if self.shared is not None:
            shared = self._kernels.sigmoid_mul(self.shared.summand(x), self.shared_gate(x))
            out = out + cast(Tensor, shared)
        return sum_over_ranks(out, self._tp, self._kernels, FEED_FORWARD)
