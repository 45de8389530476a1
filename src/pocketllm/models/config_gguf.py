"""GGUF metadata -> `ModelConfig`. What the metadata leaves out (biases, norms, layer kinds) the tensor names tell.

The config describes what `weights.gguf_reader` hands out: norms of hybrid models include their 1 (`norm_offset` 0), and
Qwen3-Next's projections are those of Qwen3.5 (`fused_projections` False).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from gguf.constants import GGMLQuantizationType, TokenType

from pocketllm.errors import ModelError
from pocketllm.models.config import GatedDeltaConfig, LayerType, ModelConfig, MoEConfig, RopeConfig
from pocketllm.weights.gguf_file import GgufFile


@dataclass(frozen=True)
class _Architecture:
    model_type: str
    hybrid: bool = False
    moe: bool = False
    norm_topk_prob: bool = True  # fixed by the architecture: GGUF has no key for it


ARCHITECTURES: dict[str, _Architecture] = {
    "llama": _Architecture("llama"),
    "qwen2": _Architecture("qwen2"),
    "qwen2moe": _Architecture("qwen2_moe", moe=True, norm_topk_prob=False),
    "qwen3": _Architecture("qwen3"),
    "qwen3moe": _Architecture("qwen3_moe", moe=True),
    "qwen3next": _Architecture("qwen3_next", hybrid=True, moe=True),
    "qwen35": _Architecture("qwen3_5_text", hybrid=True),
    "qwen35moe": _Architecture("qwen3_5_moe_text", hybrid=True, moe=True),
}
_END_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")  # control tokens that end a turn, besides eos
_DTYPES = {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16"}


def config_from_gguf(source: Path | GgufFile) -> ModelConfig:
    """ModelError if the file is damaged, its architecture is not supported or a needed key is missing."""
    file = source if isinstance(source, GgufFile) else GgufFile(source)
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: GGUF architecture {name!r} is not supported: known are {', '.join(ARCHITECTURES)}"
        )
    return _Parser(file, str(name)).config()


class _Parser:
    def __init__(self, file: GgufFile, name: str) -> None:
        self.file, self.name, self.arch = file, name, ARCHITECTURES[name]
        self.num_layers = self.integer("block_count") - self.integer("nextn_predict_layers", 0)

    def config(self) -> ModelConfig:
        arch, hidden = self.arch, self.integer("embedding_length")
        heads = self.integer("attention.head_count")
        head_dim = self.integer("attention.key_length", hidden // heads)
        if "token_embd.weight" not in self.file.tensors:
            raise ModelError(f"{self.file.path}: token_embd.weight is missing")
        if not arch.moe and self.integer("expert_count", 0):
            raise ModelError(f"{self.file.path}: {self.name} with experts is not supported")
        embedding = self.file.tensors["token_embd.weight"]
        rope, context = self._rope(head_dim)
        return ModelConfig(
            model_type=arch.model_type,
            vocab_size=embedding.shape[0],
            hidden_size=hidden,
            num_layers=self.num_layers,
            num_heads=heads,
            num_kv_heads=self.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=self.integer("feed_forward_length", 0 if arch.moe else None),
            rms_norm_eps=_rounded(self.value("attention.layer_norm_rms_epsilon")),
            rope=rope,
            max_position_embeddings=context,
            layer_types=self._layer_types(),
            tie_word_embeddings="output.weight" not in self.file.tensors,
            qkv_bias=self._any("attn_q.bias"),
            o_bias=self._any("attn_output.bias"),
            mlp_bias=self._any("ffn_up.bias"),
            qk_norm=self._any("attn_q_norm.weight"),
            attn_output_gate=arch.hybrid,
            gated_delta=self._gated_delta() if arch.hybrid else None,
            moe=self._moe() if arch.moe else None,
            sparse_layers=self._sparse_layers() if arch.moe else (),
            eos_token_ids=self._eos(),
            dtype=_DTYPES.get(embedding.type, "bfloat16"),
        )

    def value(self, key: str, default: Any = None) -> Any:
        found = self.file.metadata.get(f"{self.name}.{key}", default)
        if found is None:
            raise ModelError(f"{self.file.path}: the key {self.name}.{key} is missing")
        return found

    def integer(self, key: str, default: int | None = None) -> int:
        found = self.value(key, default)
        if not isinstance(found, int):
            raise ModelError(f"{self.file.path}: the key {self.name}.{key} must be a whole number, not {found!r}")
        return found

    def _rope(self, head_dim: int) -> tuple[RopeConfig, int]:
        if "rope_freqs.weight" in self.file.tensors:
            raise ModelError(
                f"{self.file.path}: RoPE frequencies stored as a tensor (rope_freqs.weight) are not supported: "
                "use the model's safetensors version"
            )
        kind, context = self.value("rope.scaling.type", "none"), self.integer("context_length")
        kind = "default" if kind == "none" else kind
        if kind not in ("default", "linear", "yarn"):
            raise ModelError(f"{self.file.path}: rope scaling {kind!r} is not supported: known are linear, yarn")
        rope = RopeConfig(
            theta=float(self.value("rope.freq_base", 10000.0)),
            rotary_dim=self.integer("rope.dimension_count", head_dim),
            scaling=cast(Literal["default", "linear", "yarn"], kind),
            factor=float(self.value("rope.scaling.factor", 1.0)),
            original_max_position=self.integer("rope.scaling.original_context_length", context),
        )
        return rope, context

    def _layer_types(self) -> tuple[LayerType, ...]:
        kinds: list[LayerType] = ["full_attention"] * self.num_layers
        for i in range(self.num_layers):
            if self.arch.hybrid and f"blk.{i}.attn_q.weight" not in self.file.tensors:
                kinds[i] = "linear_attention"
        return tuple(kinds)

    def _gated_delta(self) -> GatedDeltaConfig:
        value_heads = self.integer("ssm.time_step_rank")
        return GatedDeltaConfig(
            num_key_heads=self.integer("ssm.group_count"),
            num_value_heads=value_heads,
            key_head_dim=self.integer("ssm.state_size"),
            value_head_dim=self.integer("ssm.inner_size") // value_heads,
            conv_kernel=self.integer("ssm.conv_kernel"),
            fused_projections=False,
        )

    def _moe(self) -> MoEConfig:
        shared = next((t for n, t in self.file.tensors.items() if n.endswith("ffn_up_shexp.weight")), None)
        return MoEConfig(
            num_experts=self.integer("expert_count"),
            top_k=self.integer("expert_used_count"),
            expert_intermediate_size=self.integer("expert_feed_forward_length"),
            shared_intermediate_size=shared.shape[0] if shared else 0,
            norm_topk_prob=self.arch.norm_topk_prob,
        )

    def _sparse_layers(self) -> tuple[bool, ...]:
        return tuple(f"blk.{i}.ffn_gate_inp.weight" in self.file.tensors for i in range(self.num_layers))

    def _eos(self) -> tuple[int, ...]:
        metadata = self.file.metadata
        tokens, kinds = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
        ends = [i for i, t in enumerate(tokens) if t in _END_TEXTS and kinds[i : i + 1] == [TokenType.CONTROL]]
        keyed = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
        return tuple(dict.fromkeys([*(i for i in keyed if i is not None), *ends]))

    def _any(self, suffix: str) -> bool:
        return any(name.startswith("blk.") and name.endswith(f".{suffix}") for name in self.file.tensors)


def _rounded(value: float) -> float:
    """GGUF stores 1e-6 as the nearest float32; the shortest decimal that rounds to it is what the model was given."""
    return float(f"{value:.7g}")
