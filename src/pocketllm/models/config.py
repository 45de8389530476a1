"""`ModelConfig`: the shape of a model in one set of words, whatever file it was read from.

Readers of Hugging Face `config.json` and GGUF metadata stand in `config_hf.py` and `config_gguf.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LayerType = Literal["full_attention", "linear_attention"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: `rotary_dim` of the head's dims are rotated, pair i being (x[i], x[i + rotary_dim/2])."""

    theta: float
    rotary_dim: int
    scaling: Literal["default", "linear", "yarn", "llama3"] = "default"
    factor: float = 1.0
    original_max_position: int = 0  # yarn, llama3
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    truncate: bool = True  # yarn: round the correction range to whole dims


@dataclass(frozen=True)
class MoEConfig:
    num_experts: int
    top_k: int
    expert_intermediate_size: int
    shared_intermediate_size: int  # 0: no shared expert
    norm_topk_prob: bool


@dataclass(frozen=True)
class GatedDeltaConfig:
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    fused_projections: bool  # Qwen3-Next: in_proj_qkvz and in_proj_ba, rows grouped by key head

    @property
    def key_dim(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True)
class ModelConfig:
    """Everything the layers need to know. Sizes are of the whole model (not of one tensor-parallel rank)."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of dense MLP layers
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    layer_types: tuple[LayerType, ...]  # one per layer
    tie_word_embeddings: bool = False
    norm_offset: float = 0.0  # 1.0: RMSNorm multiplies by (1 + w) (Qwen3-Next, 3.5 and later)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attn_output_gate: bool = False  # q_proj holds [query | gate] rows per head; output * sigmoid(gate)
    gated_delta: GatedDeltaConfig | None = None
    moe: MoEConfig | None = None
    sparse_layers: tuple[bool, ...] = ()  # per layer: MoE (True) or dense MLP; () = all dense
    num_mtp_layers: int = 0  # that predict further tokens (`models.mtp`); a checkpoint may have them and not say so
    eos_token_ids: tuple[int, ...] = ()  # union of config.json and generation_config.json
    dtype: str = "bfloat16"  # of the checkpoint's unquantised weights
    quantization: str | None = None  # weight format of the checkpoint's quantised linears, e.g. "fp8_block"
    unquantized: frozenset[str] = frozenset()  # module names the checkpoint keeps unquantised
    generation_defaults: dict[str, float] = field(default_factory=dict, hash=False)  # temperature, top_p, top_k, ...

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have a KV cache."""
        return tuple(i for i, t in enumerate(self.layer_types) if t == "full_attention")

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have recurrent state."""
        return tuple(i for i, t in enumerate(self.layer_types) if t == "linear_attention")

    def is_sparse(self, layer: int) -> bool:
        return bool(self.sparse_layers) and self.sparse_layers[layer]
