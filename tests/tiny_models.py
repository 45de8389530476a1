"""Tiny random models of every supported kind, with the transformers model as oracle.

`make` writes a Hugging Face folder, `make_fp8` one with FP8 block weights, `make_gguf` a GGUF file.
Weights are random in *every* tensor: default initialisation (norm weights of zero, dt_bias of one) hides bugs.
A model is built once a session; every call gets its own copy of the files, which a test may damage.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

KINDS = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": 510,
}
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_HYBRID: dict[str, Any] = {
    "head_dim": 64,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 16, **_PLAIN_ROPE},
    "qwen2": {"model_type": "qwen2", **_PLAIN_ROPE},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **_MOE,
        "shared_expert_intermediate_size": 96,
        "norm_topk_prob": False,
        **_PLAIN_ROPE,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, **_PLAIN_ROPE},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 32, **_MOE, "norm_topk_prob": True, **_PLAIN_ROPE},
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_HYBRID,
        **_MOE,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **_HYBRID},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **_HYBRID, **_MOE, "shared_expert_intermediate_size": 32},
}


def make(
    kind: str, tmp_path: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> tuple[Path, Any]:
    """A folder written by `save_pretrained` and the transformers model it holds, in float32 and eval mode.

    `dtype` is that of the stored weights (the oracle has the rounded values). `overrides` are config keys;
    `num_hidden_layers=8` repeats the layer pattern of a hybrid model. The oracle is shared: do not change it.
    """
    folder, oracle = build(kind, json.dumps(overrides, sort_keys=True), dtype, seed)
    return _copy(folder, tmp_path), oracle


def make_fp8(
    kind: str, tmp_path: Path, *, scale_dtype: torch.dtype = torch.bfloat16, seed: int = 0, **overrides: Any
) -> tuple[Path, Any]:
    """A folder with float8_e4m3fn linears and 128x128 block scales, and the oracle with the dequantised weights.

    Hidden size is 256 and the MLP 320 wide: several blocks and ragged edges. Heads are 128 wide where a
    layer may reorder rows, which FP8 storage allows by whole blocks only. Unquantised tensors are bfloat16.
    """
    overrides = {**_fp8_sizes(kind), **overrides}
    folder, oracle = _build_fp8(kind, json.dumps(overrides, sort_keys=True), scale_dtype, seed)
    return _copy(folder, tmp_path), oracle


def make_gguf(kind: str, tmp_path: Path, *, type: str = "Q8_0", seed: int = 0, **overrides: Any) -> tuple[Path, Any]:
    """A GGUF file as llama.cpp's converter lays it out, and the oracle with the weights the file decodes to.

    `type` is the GGUF type of the matrices (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0 ...). It has no tokenizer.
    Value heads of hybrid models are 32 wide, so that quantised columns can be put in the converter's order.
    """
    from tiny_gguf import build_gguf  # which imports this module

    if is_hybrid(kind):
        overrides = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, **overrides}
    path, oracle = build_gguf(kind, json.dumps(overrides, sort_keys=True), type, seed)
    return Path(shutil.copy(path, tmp_path)), oracle


def is_hybrid(kind: str) -> bool:
    return kind in ("qwen3_next", "qwen3_5", "qwen3_5_moe")


def config_of(kind: str, **overrides: Any) -> dict[str, Any]:
    """The config.json values of a tiny model of this kind."""
    values = {**_COMMON, **_SETTINGS[kind], **overrides}
    if "layer_types" in values and "layer_types" not in overrides:
        pattern, layers = values["layer_types"], values["num_hidden_layers"]
        values["layer_types"] = (pattern * math.ceil(layers / len(pattern)))[:layers]
    return values


def randomize(model: Any, seed: int) -> None:
    """Fills every parameter so that each one matters: norms vary, decays spread, logits have std about 1."""
    gen = torch.Generator().manual_seed(seed)
    plain_norms = getattr(model.config, "model_type", "") in ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=gen)
            if name.endswith("A_log"):
                p.copy_(torch.log(0.05 + 3.95 * torch.rand(p.shape, generator=gen)))
            elif name.endswith("dt_bias"):
                p.copy_(0.5 * noise)
            elif "norm" in name:
                p.copy_(0.1 * noise + (1.0 if plain_norms or "linear_attn.norm" in name else 0.0))
            elif name.endswith("bias"):
                p.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                p.copy_(noise)
            else:
                p.copy_(noise / math.sqrt(p.shape[-1]))


@functools.cache
def _session_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="pocketllm-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def new_folder(name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=name + "-", dir=_session_folder()))


def _copy(folder: Path, tmp_path: Path) -> Path:
    target = tmp_path / folder.name
    shutil.copytree(folder, target, dirs_exist_ok=True)
    return target


@functools.cache
def build(kind: str, overrides: str, dtype: torch.dtype, seed: int) -> tuple[Path, Any]:
    values = config_of(kind, **json.loads(overrides))
    config = AutoConfig.for_model(**values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.float32).eval()
    randomize(model, seed)
    model.to(dtype)
    folder = new_folder(kind)
    model.save_pretrained(folder)
    return folder, model.to(torch.float32)


def load_oracle(folder: Path) -> Any:
    """The transformers model of a folder, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


# -- FP8 ---------------------------------------------------------------------------------------------------------------

_NOT_QUANTISED = ("lm_head", "embed_tokens", "norm", "conv1d", "in_proj_a", "in_proj_b", "in_proj_ba", "mlp.gate",
                  "shared_expert_gate")  # fmt: skip


def _fp8_sizes(kind: str) -> dict[str, Any]:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 320}
    if "moe" in kind or kind == "qwen3_next":
        sizes |= {"moe_intermediate_size": 128}
    if kind in ("qwen2_moe", "qwen3_next", "qwen3_5_moe"):
        sizes |= {"shared_expert_intermediate_size": 160}
    if is_hybrid(kind):
        sizes |= {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    if kind == "qwen3_next":
        sizes |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 4}
    return sizes


def quantize_fp8(weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """[N, K] -> (float8_e4m3fn [N, K], scale [ceil(N/128), ceil(K/128)], what they decode to in float32)."""
    n, k = weight.shape
    rows, cols = math.ceil(n / 128), math.ceil(k / 128)
    padded = torch.zeros(rows * 128, cols * 128)
    padded[:n, :k] = weight
    absmax = padded.view(rows, 128, cols, 128).abs().amax(dim=(1, 3)).clamp_min(1e-12)
    scale = torch.exp2(torch.ceil(torch.log2(absmax / 448))).to(scale_dtype)  # powers of two
    if scale_dtype != torch.float8_e8m0fnu:
        scale = (absmax / 448 * 1.01).to(scale_dtype)
    wide = scale.float().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    stored = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored, scale, stored.float() * wide


@functools.cache
def _build_fp8(kind: str, overrides: str, scale_dtype: torch.dtype, seed: int) -> tuple[Path, Any]:
    source, _ = build(kind, overrides, torch.bfloat16, seed)
    tensors = split_experts(load_file(source / "model.safetensors"))
    stored: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    kept = []
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or any(module.endswith(word) for word in _NOT_QUANTISED):
            stored[name], decoded[name] = tensor, tensor.float()
            kept.append(module)
        else:
            q, scale, value = quantize_fp8(tensor.float(), scale_dtype)
            stored[name], stored[module + ".weight_scale_inv"], decoded[name] = q, scale, value
    plain, folder = new_folder(kind + "-decoded"), new_folder(kind + "-fp8")
    shutil.copy(source / "config.json", plain)
    save_file({k: v.contiguous() for k, v in decoded.items()}, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": kept,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder, load_oracle(plain)


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fused expert tensors as per-expert matrices: the layout of the FP8 releases."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                result[f"{base}{e}.gate_proj.weight"], result[f"{base}{e}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(tensor):
                result[f"{name.removesuffix('down_proj')}{e}.down_proj.weight"] = down
        else:
            result[name] = tensor
    return result
