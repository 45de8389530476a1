"""Reading configs: both spellings of every key, what a family implies, what is refused, and the built-in shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pocketllm.errors import ModelError
from pocketllm.kernels import reference
from pocketllm.models.config import ModelConfig
from pocketllm.models.config_hf import config_from_dict, config_from_folder
from pocketllm.models.qwen import QwenModel
from pocketllm.models.registry import ConfigStorage, config_from_shape, shape_names
from pocketllm.parallel import TensorParallel
from pocketllm.weights.base import Policy
from pocketllm.weights.dummy import PlannedSource
from tiny_models import KINDS, config_of, make


def _dict(kind: str = "qwen3", **overrides: Any) -> dict[str, Any]:
    return config_of(kind, **overrides)


@pytest.mark.parametrize("kind", KINDS)
def test_config_agrees_with_transformers(kind: str, tmp_path: Path) -> None:
    folder, oracle = make(kind, tmp_path)
    config, theirs = config_from_folder(folder), oracle.config
    assert config.num_layers == theirs.num_hidden_layers
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.rope.rotary_dim == 2 * len(oracle.model.rotary_emb.inv_freq)
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    attention = oracle.model.layers[3].self_attn
    assert config.head_dim == attention.head_dim
    assert config.qkv_bias == (attention.k_proj.bias is not None)
    assert config.o_bias == (attention.o_proj.bias is not None)
    assert config.qk_norm == hasattr(attention, "q_norm")
    assert config.attn_output_gate == (attention.q_proj.out_features > config.num_heads * config.head_dim)
    assert config.eos_token_ids == (510,)
    linear = tuple(hasattr(layer, "linear_attn") for layer in oracle.model.layers)
    assert tuple(t == "linear_attention" for t in config.layer_types) == linear
    sparse = tuple(hasattr(layer.mlp, "experts") for layer in oracle.model.layers)
    assert tuple(config.is_sparse(i) for i in range(4)) == sparse
    if config.moe:
        assert config.moe.num_experts == 8
        assert bool(config.moe.shared_intermediate_size) == hasattr(oracle.model.layers[0].mlp, "shared_expert")


def test_old_and_new_rope_spellings_agree() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768}
    new = _dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **yarn}, max_position_embeddings=32768)
    old = _dict(rope_theta=1e6, rope_scaling={"type": "yarn", **yarn}, max_position_embeddings=32768)
    del old["rope_parameters"]
    a, b = config_from_dict(new), config_from_dict(old)
    assert a.rope == b.rope
    assert (a.rope.scaling, a.rope.factor, a.max_position_embeddings) == ("yarn", 4.0, 131072)
    plain = _dict(rope_theta=5e6, rope_scaling=None)
    del plain["rope_parameters"]
    assert config_from_dict(plain).rope.theta == 5e6
    assert config_from_dict(plain).rope.scaling == "default"


def test_nested_text_config_and_parent_keys() -> None:
    text = _dict("qwen3_5", dtype="bfloat16", eos_token_id=500)
    del text["tie_word_embeddings"]
    kept = ["lm_head", "model.visual.x", "model.language_model.layers.0.linear_attn.in_proj_a"]
    outer = {
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": True,
        "quantization_config": {
            "quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": kept
        },
    }  # fmt: skip
    config = config_from_dict(outer, {"eos_token_id": [501, 500], "do_sample": True, "temperature": 0.6, "top_k": 20})
    assert config.tie_word_embeddings
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (501, 500)
    assert config.quantization == "fp8_block"
    assert config.unquantized == {"lm_head", "model.layers.0.linear_attn.in_proj_a"}
    assert config.generation_defaults == {"temperature": 0.6, "top_k": 20.0}
    assert config.norm_offset == 1.0


def test_partial_rotary_and_layer_pattern_defaults() -> None:
    values = _dict("qwen3_5", num_hidden_layers=8, partial_rotary_factor=0.5)
    del values["layer_types"], values["rope_parameters"]
    config = config_from_dict(values)
    assert config.attention_layers == (3, 7)
    assert config.rope.rotary_dim == 32
    assert config_from_dict(values | {"full_attention_interval": 2}).attention_layers == (1, 3, 5, 7)
    del values["partial_rotary_factor"]
    assert config_from_dict(values).rope.rotary_dim == 16


def test_dense_layers_among_sparse_ones() -> None:
    config = config_from_dict(_dict("qwen3_moe", mlp_only_layers=[1]))
    assert config.sparse_layers == (True, False, True, True)
    assert config_from_dict(_dict("qwen3_moe", decoder_sparse_step=2)).sparse_layers == (False, True, False, True)


def test_sampling_defaults_only_if_the_model_samples() -> None:
    generation = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.05}
    assert config_from_dict(_dict(), generation).generation_defaults == {"repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen4_exp"}, "'qwen4_exp' is not supported: known are llama, qwen2"),
        ({"hidden_size": None}, "hidden_size = None: must be a whole number, at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_key_value_heads": "x"}, "num_key_value_heads = 'x'"),
        ({"head_dim": -1}, "head_dim = -1"),
        ({"rope_parameters": 3}, "of the wrong kind: 'int' object"),
        ({"rms_norm_eps": None}, "of the wrong kind"),
        ({"layer_types": 4}, "of the wrong kind"),
        ({"eos_token_id": {}}, r"eos_token_id = .*: must be token ids"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}, "sliding windows"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types must name 4 layers"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq' .*not supported"),
        ({"dtype": "float64"}, "'float64' is not supported"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_dict(_dict() | change)


def test_windows_that_no_layer_uses_are_no_obstacle() -> None:
    config_from_dict(_dict(use_sliding_window=True, sliding_window=4096, max_window_layers=4))
    config_from_dict(_dict(use_sliding_window=False, sliding_window=4096, max_window_layers=0))


def test_damaged_config_files(tmp_path: Path) -> None:
    folder, _ = make("qwen3", tmp_path)
    (folder / "config.json").write_text(json.dumps(_dict())[:-20])
    with pytest.raises(ModelError, match=r"config\.json: can't be read as JSON"):
        config_from_folder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        config_from_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        config_from_folder(folder)


# -- shapes ------------------------------------------------------------------------------------------------------------

# billions of parameters of the text model (tied matrices once), KV bytes a token in 16 bits
_SHAPES = {
    "qwen2.5-0.5b": (0.494, 12288), "qwen2.5-1.5b": (1.544, 28672), "qwen2.5-3b": (3.086, 36864),
    "qwen2.5-7b": (7.616, 57344), "qwen2.5-14b": (14.770, 196608), "qwen2.5-32b": (32.764, 262144),
    "qwen2.5-72b": (72.706, 327680), "qwen2.5-coder-0.5b": (0.494, 12288), "qwen3-0.6b": (0.596, 114688),
    "qwen3-1.7b": (1.721, 114688), "qwen3-4b": (4.022, 147456), "qwen3-8b": (8.191, 147456),
    "qwen3-14b": (14.768, 163840), "qwen3-32b": (32.762, 262144), "qwen3-30b-a3b": (30.532, 98304),
    "qwen3-next-80b-a3b": (79.674, 24576), "qwen3.5-0.8b": (0.752, 12288), "qwen3.5-2b": (1.882, 12288),
    "qwen3.5-4b": (4.206, 32768), "qwen3.5-9b": (8.954, 32768), "qwen3.5-27b": (26.896, 65536),
    "qwen3.8-27b-fp8": (26.896, 65536), "qwen3.5-35b-a3b": (34.661, 20480), "smollm2-135m": (0.1345, 23040),
}  # fmt: skip


def _parameters(config: ModelConfig) -> int:
    """Counted by building the network on the meta device, all in float32."""
    source = PlannedSource(ConfigStorage(config), Policy("none", torch.float32), tied_head=config.tie_word_embeddings)
    cpu = torch.device("cpu")
    QwenModel(config, TensorParallel(), reference, source, max_context=8, dtype=torch.float32, device=cpu)
    return source.nbytes // 4


@pytest.mark.parametrize("name", shape_names())
def test_shape_has_the_published_size(name: str) -> None:
    config = config_from_shape(name)
    billions, kv_bytes = _SHAPES[name]
    assert abs(_parameters(config) / 1e9 - billions) / billions < 2e-3
    assert 2 * len(config.attention_layers) * config.num_kv_heads * config.head_dim * 2 == kv_bytes


def test_shape_spot_values() -> None:
    assert set(shape_names()) == set(_SHAPES)
    big = config_from_shape("qwen3.8-27b-fp8")
    assert big.attention_layers == tuple(range(3, 64, 4))
    assert (big.rope.rotary_dim, big.rope.theta, big.max_position_embeddings) == (64, 1e7, 262144)
    assert big.gated_delta is not None
    assert (big.gated_delta.conv_dim, big.gated_delta.value_dim) == (10240, 6144)
    assert set(big.eos_token_ids) == {248044, 248046}
    assert config_from_shape("qwen2.5-72b").rms_norm_eps == 1e-5
    assert config_from_shape("qwen2.5-7b").qkv_bias
    assert not config_from_shape("qwen2.5-7b").o_bias
    moe = config_from_shape("qwen3.5-35b-a3b").moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.shared_intermediate_size, moe.norm_topk_prob) == (256, 8, 512, True)
    with pytest.raises(ModelError, match="no shape named 'qwen9': known are qwen2"):
        config_from_shape("qwen9")
