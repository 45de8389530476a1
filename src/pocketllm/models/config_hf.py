"""Hugging Face `config.json` (and `generation_config.json`) -> `ModelConfig`.

Reads old and new spellings: rope_theta and rope_scaling or rope_parameters, torch_dtype or dtype, the text part at top
level or below `text_config`, quantization_config on either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pocketllm.errors import ModelError
from pocketllm.models.config import GatedDeltaConfig, LayerType, ModelConfig, MoEConfig, RopeConfig
from pocketllm.weights.formats import BLOCK
from pocketllm.weights.reader import canonical_name
from pocketllm.weights.safetensors_reader import read_json


@dataclass(frozen=True)
class _Family:
    """What a model type implies without saying so in its config."""

    attention_bias: bool = False  # default of the key
    biased_output: bool = True  # o_proj has a bias too if attention_bias is set
    bias_key: str = "attention_bias"
    qk_norm: bool = False
    hybrid: bool = False  # Gated DeltaNet layers, gated attention, norms that multiply by 1 + w
    fused_projections: bool = False
    moe: bool = False
    shared_expert: bool = False
    norm_topk_prob: bool = False  # default of the key
    windows_from_layer: bool = False  # max_window_layers says from which layer on windows slide


_QWEN2 = _Family(attention_bias=True, biased_output=False, bias_key="qkv_bias", windows_from_layer=True)
_QWEN3_5 = _Family(qk_norm=True, hybrid=True)
_QWEN3_5_MOE = _Family(qk_norm=True, hybrid=True, moe=True, shared_expert=True, norm_topk_prob=True)
FAMILIES: dict[str, _Family] = {
    "llama": _Family(),
    "qwen2": _QWEN2,
    "qwen2_moe": _Family(
        attention_bias=True, biased_output=False, bias_key="qkv_bias", moe=True, shared_expert=True,
        windows_from_layer=True,
    ),
    "qwen3": _Family(qk_norm=True, windows_from_layer=True),
    "qwen3_moe": _Family(qk_norm=True, moe=True),
    "qwen3_next": _Family(
        qk_norm=True, hybrid=True, fused_projections=True, moe=True, shared_expert=True, norm_topk_prob=True
    ),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
}  # fmt: skip

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
_DTYPES = ("float32", "bfloat16", "float16")


def config_from_folder(folder: Path) -> ModelConfig:
    """The config of a model folder. ModelError if config.json is missing, damaged or of an unsupported model."""
    path = folder / "config.json"
    if not path.exists():
        raise ModelError(f"{folder}: has no config.json: expected a Hugging Face model folder")
    generation = folder / "generation_config.json"
    try:
        return config_from_dict(read_json(path), read_json(generation) if generation.exists() else {})
    except ModelError as error:
        raise ModelError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def config_from_dict(values: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """`values` is the object of config.json, `generation` that of generation_config.json."""
    try:
        return _Parser(values, generation or {}).config()
    except (TypeError, ValueError, AttributeError) as error:  # the sizes are checked by name; this is the rest
        raise ModelError(f"a value is of the wrong kind: {error}") from error


class _Parser:
    def __init__(self, outer: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
        self.outer, self.generation = outer, generation
        self.text: Mapping[str, Any] = outer.get("text_config") or outer
        self.model_type = str(self.text.get("model_type") or outer.get("model_type"))
        if self.model_type not in FAMILIES:
            raise ModelError(f"model_type {self.model_type!r} is not supported: known are {', '.join(FAMILIES)}")
        self.family = FAMILIES[self.model_type]
        self.num_layers = self.integer("num_hidden_layers")
        self.num_heads = self.integer("num_attention_heads")

    def config(self) -> ModelConfig:
        family, text = self.family, self.text
        if text.get("hidden_act", "silu") != "silu":
            raise ModelError(f"hidden_act {text['hidden_act']!r} is not supported: only silu is")
        self._refuse_sliding_windows()
        bias = bool(text.get(family.bias_key, family.attention_bias))
        hidden = self.integer("hidden_size")
        head_dim = self.integer("head_dim", 256 if family.hybrid else hidden // self.num_heads)
        rope, max_position = self._rope(head_dim)
        quantization, unquantized = self._quantization()
        sparse = self._sparse_layers()
        no_dense = (0, 0) if sparse and all(sparse) else ()  # then the size of dense layers may be left out, or be 0
        return ModelConfig(
            model_type=self.model_type,
            vocab_size=self.integer("vocab_size"),
            hidden_size=hidden,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.integer("num_key_value_heads", self.num_heads),
            head_dim=head_dim,
            intermediate_size=self.integer("intermediate_size", *no_dense),
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            rope=rope,
            max_position_embeddings=max_position,
            layer_types=self._layer_types(),
            tie_word_embeddings=bool(self.outer.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            norm_offset=1.0 if family.hybrid else 0.0,
            qkv_bias=bias,
            o_bias=bias and family.biased_output,
            mlp_bias=bool(text.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            attn_output_gate=family.hybrid,
            gated_delta=self._gated_delta() if family.hybrid else None,
            moe=self._moe() if family.moe else None,
            sparse_layers=sparse,
            num_mtp_layers=self.integer("mtp_num_hidden_layers", 0, least=0) if family.hybrid else 0,
            eos_token_ids=self._eos(),
            dtype=self._dtype(),
            quantization=quantization,
            unquantized=unquantized,
            generation_defaults=self._generation_defaults(),
        )

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.text.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(f"{key} = {value!r}: must be a whole number, at least {least}")
        return value

    def _rope(self, head_dim: int) -> tuple[RopeConfig, int]:
        """The rotary embedding, and how many positions it serves."""
        text = self.text
        values: dict[str, Any] = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
        kind = values.get("rope_type") or values.get("type") or "default"
        if kind not in ("default", "linear", "yarn", "llama3"):
            raise ModelError(f"rope_type {kind!r} is not supported: known are default, linear, yarn, llama3")
        partial = values.get("partial_rotary_factor", text.get("partial_rotary_factor"))
        if partial is None:
            partial = 0.25 if self.family.hybrid else 1.0
        max_position = self.integer("max_position_embeddings")
        factor = float(values.get("factor") or 1.0)
        original = int(values.get("original_max_position_embeddings") or max_position)
        attention_factor = values.get("attention_factor")
        rope = RopeConfig(
            theta=float(values.get("rope_theta", text.get("rope_theta", 10000.0))),
            rotary_dim=int(head_dim * float(partial)),
            scaling=cast(Literal["default", "linear", "yarn", "llama3"], kind),
            factor=factor,
            original_max_position=original,
            low_freq_factor=float(values.get("low_freq_factor", 1.0)),
            high_freq_factor=float(values.get("high_freq_factor", 4.0)),
            beta_fast=float(values.get("beta_fast") or 32.0),
            beta_slow=float(values.get("beta_slow") or 1.0),
            attention_factor=None if attention_factor is None else float(attention_factor),
            truncate=bool(values.get("truncate", True)),
        )
        return rope, max(max_position, int(original * factor)) if kind == "yarn" else max_position

    def _layer_types(self) -> tuple[LayerType, ...]:
        kinds = self.text.get("layer_types")
        if kinds is None:
            interval = self.integer("full_attention_interval", 4) if self.family.hybrid else 1
            kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(self.num_layers)]
        known = ("full_attention", "linear_attention") if self.family.hybrid else ("full_attention",)
        if len(kinds) != self.num_layers or not set(kinds) <= set(known):
            raise ModelError(
                f"layer_types must name {self.num_layers} layers of the kinds {', '.join(known)}, "
                f"not {len(kinds)} of {', '.join(sorted(set(kinds)))}"
            )
        return tuple(kinds)

    def _refuse_sliding_windows(self) -> None:
        text = self.text
        if not text.get("use_sliding_window") or text.get("sliding_window") is None:
            return
        if self.family.windows_from_layer and self.integer("max_window_layers", 28, 0) >= self.num_layers:
            return
        raise ModelError("sliding windows in the model's own attention layers are not supported (use_sliding_window)")

    def _gated_delta(self) -> GatedDeltaConfig:
        return GatedDeltaConfig(
            num_key_heads=self.integer("linear_num_key_heads", 16),
            num_value_heads=self.integer("linear_num_value_heads", 32),
            key_head_dim=self.integer("linear_key_head_dim", 128),
            value_head_dim=self.integer("linear_value_head_dim", 128),
            conv_kernel=self.integer("linear_conv_kernel_dim", 4),
            fused_projections=self.family.fused_projections,
        )

    def _moe(self) -> MoEConfig:
        shared = self.integer("shared_expert_intermediate_size", least=0) if self.family.shared_expert else 0
        return MoEConfig(
            num_experts=self.integer("num_experts" if "num_experts" in self.text else "num_local_experts"),
            top_k=self.integer("num_experts_per_tok"),
            expert_intermediate_size=self.integer("moe_intermediate_size"),
            shared_intermediate_size=shared,
            norm_topk_prob=bool(self.text.get("norm_topk_prob", self.family.norm_topk_prob)),
        )

    def _sparse_layers(self) -> tuple[bool, ...]:
        if not self.family.moe:
            return ()
        dense = self.text.get("mlp_only_layers") or ()
        step = self.integer("decoder_sparse_step", 1)
        return tuple(i not in dense and (i + 1) % step == 0 for i in range(self.num_layers))

    def _eos(self) -> tuple[int, ...]:
        """config.json and generation_config.json disagree in released models: either's tokens end a text."""
        found: list[int] = []
        for values in (self.generation, self.text, self.outer):
            ids = values.get("eos_token_id")
            found += ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(isinstance(token, int) and token >= 0 for token in found):
            raise ModelError(f"eos_token_id = {found}: must be token ids")
        return tuple(dict.fromkeys(found))

    def _dtype(self) -> str:
        for values in (self.text, self.outer):
            name = values.get("dtype") or values.get("torch_dtype")
            if name is not None:
                if name not in _DTYPES:
                    raise ModelError(f"dtype {name!r} is not supported: known are {', '.join(_DTYPES)}")
                return str(name)
        return "bfloat16"

    def _quantization(self) -> tuple[str | None, frozenset[str]]:
        values = self.outer.get("quantization_config") or self.text.get("quantization_config")
        if not values:
            return None, frozenset()
        method, size = values.get("quant_method"), values.get("weight_block_size")
        if method != "fp8" or size is None or list(size) != [BLOCK, BLOCK]:
            raise ModelError(
                f"quantization {method!r} with weight_block_size {size} is not supported: use a checkpoint in "
                f"bfloat16, in fp8 with blocks of [{BLOCK}, {BLOCK}], or a GGUF file"
            )
        names = values.get("modules_to_not_convert") or values.get("ignored_layers") or ()
        return "fp8_block", frozenset(name for n in names if (name := canonical_name(n)) is not None)

    def _generation_defaults(self) -> dict[str, float]:
        keys = _SAMPLING_KEYS if self.generation.get("do_sample") else ()
        return {
            key: float(self.generation[key])
            for key in (*keys, "repetition_penalty")
            if self.generation.get(key) is not None
        }
