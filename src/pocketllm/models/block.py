"""`Block`: attention or Gated DeltaNet, followed by a dense or sparse feed-forward part."""

from __future__ import annotations

from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import Bridge
from pocketllm.layers.attention import Attention
from pocketllm.layers.gated_delta import GatedDeltaNet
from pocketllm.layers.mlp import MLP
from pocketllm.layers.norm import RMSNorm
from pocketllm.layers.rope import RotaryEmbedding
from pocketllm.models.config import LayerType, ModelConfig
from pocketllm.models.moe import SparseMoE
from pocketllm.parallel import TensorParallel
from pocketllm.weights.source import WeightSource


class Block:
    """x += mixer(norm(x)); x += feed_forward(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        kernels: Kernels,
        source: WeightSource,
        rope: RotaryEmbedding,
        layer_type: LayerType,
        *,
        sparse: bool,
        drop_key_bias: bool,
    ) -> None:
        self.input_norm = RMSNorm(config, kernels, source, "input_layernorm", config.hidden_size)
        self.mixer: Attention | GatedDeltaNet
        if layer_type == "full_attention":
            scope = source.scope("self_attn")
            self.mixer = Attention(config, tp, kernels, scope, rope, drop_key_bias=drop_key_bias)
        else:
            self.mixer = GatedDeltaNet(config, tp, kernels, source.scope("linear_attn"))
        self.post_norm = RMSNorm(config, kernels, source, "post_attention_layernorm", config.hidden_size)
        mlp = source.scope("mlp")
        self.feed_forward = (
            SparseMoE(config, tp, kernels, mlp) if sparse else MLP(config, tp, kernels, mlp, config.intermediate_size)
        )
        self.bridge: Bridge | None = None

    def lead_to(self, block: Block | None) -> None:
        """Says which block comes next (None: this is the last), once both are there."""
        inner = self.feed_forward
        if isinstance(inner, MLP) and len(inner.gate_up.parts) == 1:
            self.bridge = Bridge(
                self.mixer.out_proj.weight,
                self.post_norm.weight,
                inner.gate_up.parts[0],
                inner.down.weight,
                None if block is None else block.input_norm.weight,
                () if block is None else tuple(block.mixer.projection.parts),
                self.post_norm.eps,
            )
