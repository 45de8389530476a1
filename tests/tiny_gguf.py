"""GGUF files of the tiny models, laid out as llama.cpp's converter does it (see `tiny_models.make_gguf`)."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny_models import build, is_hybrid, load_oracle, new_folder, split_experts

_ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen2_moe": "qwen2moe", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe",
}  # fmt: skip
_GGUF_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
}  # fmt: skip
_GGUF_GLOBAL = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_ALWAYS_F32 = ("ssm_conv1d", "ssm_alpha", "ssm_beta", "ssm_ba", "ffn_gate_inp", "ffn_gate_inp_shexp")


@functools.cache
def build_gguf(kind: str, overrides: str, type_name: str, seed: int) -> tuple[Path, Any]:
    source, _ = build(kind, overrides, torch.float32, seed)
    config = json.loads((source / "config.json").read_text())
    plain = new_folder(kind + "-decoded")
    path = plain / f"{kind}-{type_name}.gguf"
    writer = gguf.GGUFWriter(path, _ARCHITECTURES[kind])
    _write_metadata(writer, config)
    decoded: dict[str, Tensor] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    tensors = split_experts(load_file(source / "model.safetensors"))
    for name in sorted(tensors, key=_expert_number):
        values, module = tensors[name].numpy(), _module(name)
        small = values.ndim != 2 or _GGUF_NAMES.get(module) in _ALWAYS_F32
        type_ = GGMLQuantizationType.F32 if small else GGMLQuantizationType[type_name]
        stored = values if type_ == GGMLQuantizationType.F32 else gguf.quants.quantize(values, type_)
        decoded[name] = torch.from_numpy(gguf.quants.dequantize(stored, type_).astype(np.float32))
        if ".experts." in name:
            projection = module.rpartition(".")[2].removesuffix("_proj")
            stacks.setdefault(f"blk.{name.split('.')[2]}.ffn_{projection}_exps.weight", []).append(stored)
        else:
            for gguf_name, part in _converted(kind, config, name, stored):
                _add_tensor(writer, gguf_name, part, type_)
    for gguf_name, parts in stacks.items():
        _add_tensor(writer, gguf_name, np.stack(parts), GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shutil.copy(source / "config.json", plain)
    save_file({k: v.contiguous() for k, v in decoded.items()}, plain / "model.safetensors", {"format": "pt"})
    return path, load_oracle(plain)


def _module(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `mlp.up_proj`; `model.norm.weight` -> `norm`."""
    parts = name.removeprefix("model.").split(".")
    return ".".join(p for p in (parts[2:] if parts[0] == "layers" else parts) if p not in ("weight", "bias"))


def _expert_number(name: str) -> tuple[str, int]:
    _, _, rest = name.partition(".experts.")
    return ("", int(rest.split(".")[0])) if rest else (name, 0)


def _add_tensor(writer: gguf.GGUFWriter, name: str, stored: np.ndarray, kind: GGMLQuantizationType) -> None:
    writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=kind)


def _converted(kind: str, config: dict[str, Any], name: str, x: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """GGUF names and contents of one tensor (its rows may be quantised bytes) after the converter's changes."""
    module, suffix = _module(name), "." + name.rpartition(".")[2]
    if is_hybrid(kind) and module.endswith("norm") and module != "linear_attn.norm":
        x = x + np.float32(1)
    if module in _GGUF_GLOBAL:
        return [(_GGUF_GLOBAL[module] + suffix, x)]
    block = f"blk.{name.split('.')[2]}."
    heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
    if kind == "llama" and module in heads:
        x = x.reshape(config[heads[module]], 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if module == "post_attention_layernorm":
        return [(block + ("post_attention_norm" if is_hybrid(kind) else "ffn_norm") + suffix, x)]
    if module == "linear_attn.in_proj_qkvz":
        qkv, z = _cut_qkvz(config, x)
        return [(f"{block}attn_qkv.weight", qkv), (f"{block}attn_gate.weight", z)]
    if module.startswith("linear_attn."):
        x = np.squeeze(x, 1) if module.endswith("conv1d") else x
        x = -np.exp(x) if module.endswith("A_log") else x
        x = x if kind == "qwen3_next" else _tiled(config, module.removeprefix("linear_attn."), x)
    bare = module in ("linear_attn.A_log", "linear_attn.dt_bias")
    return [(block + _GGUF_NAMES[module] + ("" if bare else suffix), x)]


def _cut_qkvz(config: dict[str, Any], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    heads, dk = config["linear_num_key_heads"], config["linear_key_head_dim"]
    dv = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    q, k, v, z = np.split(x.reshape(heads, 2 * dk + 2 * dv, -1), np.cumsum([dk, dk, dv]), axis=1)
    return np.concatenate([p.reshape(-1, x.shape[1]) for p in (q, k, v)]), z.reshape(-1, x.shape[1])


def _tiled(config: dict[str, Any], module: str, x: np.ndarray) -> np.ndarray:
    """Value heads from grouped [key head, r] to tiled [r, key head] order, on the axis that has them."""
    keys, r = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    key_rows = 2 * keys * config["linear_key_head_dim"]
    if module == "out_proj":
        return x.reshape(len(x), keys, r, -1).swapaxes(1, 2).reshape(x.shape)
    if module == "norm":
        return x
    head, rest = (x[:key_rows], x[key_rows:]) if module in ("in_proj_qkv", "conv1d") else (x[:0], x)
    return np.concatenate([head, rest.reshape(keys, r, -1, *x.shape[1:]).swapaxes(0, 1).reshape(rest.shape)])


def _write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config.get("intermediate_size", 0))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_eos_token_id(config["eos_token_id"])
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "linear_num_key_heads" in config:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
