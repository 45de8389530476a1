"""Reads a GGUF file under Hugging Face names, undoing what llama.cpp's converter does to some tensors.

What the converter changes (ggml-org/llama.cpp, conversion/llama.py and qwen.py), and what this reader does:

    llama              rows of q_proj and k_proj are interleaved for another RoPE       moved back, in whole rows
    qwen35, qwen35moe  value heads are tiled over key heads instead of grouped          moved back
    hybrids            ssm_a is -exp(A_log); conv1d has lost its dimension of 1         undone
    hybrids            norms that multiply by 1 + w are stored as 1 + w                 kept: config.norm_offset is 0
    qwen3next          in_proj_qkvz is cut into the two matrices of Qwen3.5             kept: not fused_projections
    sparse layers      experts are stacked in one tensor                                offered one by one
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pocketllm.errors import ModelError
from pocketllm.kernels.types import LinearWeight
from pocketllm.weights import gguf_blocks
from pocketllm.weights.formats import StoredFormat, reorder_columns
from pocketllm.weights.gguf_file import GgufFile, GgufTensor

Index = np.ndarray[Any, np.dtype[np.int64]]

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}
_IGNORED = "rope_freqs.weight"  # frequencies of the context extension: the config reader answers for them


@dataclass(frozen=True)
class _Stored:
    """What a canonical name takes from a GGUF tensor: `rows` of it, in that order, with `columns` in that order."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    rows: slice | Index | None = None  # None: all
    columns: Index | None = None
    is_decay: bool = False  # holds -exp(A_log)


class GgufReader:
    """A `Reader` over an open GGUF file of a supported architecture (`models.config_gguf` checks that)."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self._file = file
        self._arch = str(file.metadata.get("general.architecture"))
        self._num_layers = self._number("block_count") - self._number("nextn_predict_layers", 0)
        self._stored: dict[str, _Stored] = {}
        for tensor in file.tensors.values():
            self._add(tensor)

    def names(self) -> Collection[str]:
        return self._stored.keys()

    def has(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def format_of(self, name: str) -> StoredFormat:
        tensor = self._stored[name].tensor
        try:
            return gguf_blocks.format_of(tensor.type)
        except ModelError as error:
            raise ModelError(f"{tensor.name}: {error}") from None

    def matrix(self, name: str) -> LinearWeight:
        stored, form = self._stored[name], self.format_of(name)
        n, k = stored.shape
        weight = LinearWeight(form, (n, k), gguf_blocks.unpack(self._raw(stored), stored.tensor.type))
        return weight if stored.columns is None else reorder_columns(weight, torch.from_numpy(stored.columns))

    def tensor(self, name: str) -> Tensor:
        stored = self._stored[name]
        self.format_of(name)
        values = gguf_blocks.decode(self._raw(stored), stored.tensor.type).view(stored.shape)
        return torch.log(-values) if stored.is_decay else values

    def _raw(self, stored: _Stored) -> gguf_blocks.Bytes:
        rows = self._file.rows(stored.tensor)
        if len(stored.shape) == 1:  # a vector: one element a row
            if rows.size % stored.tensor.shape[-1]:
                raise ModelError(f"{stored.tensor.name}: a vector can't be of type {stored.tensor.type.name}")
            rows = rows.reshape(stored.tensor.shape[-1], -1)
        return np.ascontiguousarray(rows if stored.rows is None else rows[stored.rows])

    def _add(self, tensor: GgufTensor) -> None:
        if tensor.name == _IGNORED:
            return
        parts = tensor.name.split(".")
        if parts[0] != "blk" or len(parts) < 3 or not parts[1].isdecimal():
            self._stored[_GLOBAL.get(tensor.name, tensor.name)] = _Stored(tensor, tensor.shape)
            return
        if int(parts[1]) >= self._num_layers:  # blocks of the multi-token predictor
            return
        layer, module, kind = f"model.layers.{int(parts[1])}.", parts[2], ".".join(parts[3:])
        if module in _EXPERTS:
            self._add_experts(layer, _EXPERTS[module], tensor)
        elif module in ("ssm_a", "ssm_dt"):
            name = "A_log" if module == "ssm_a" else "dt_bias"
            rows = self._value_rows(1)
            size = math.prod(tensor.shape)
            self._stored[f"{layer}linear_attn.{name}"] = _Stored(tensor, (size,), rows, is_decay=module == "ssm_a")
        elif module == "ssm_ba":
            self._add_ba(layer, tensor)
        elif module in _IN_BLOCK:
            self._stored[f"{layer}{_IN_BLOCK[module]}.{kind}"] = self._placed(module, tensor)
        else:
            self._stored[tensor.name] = _Stored(tensor, tensor.shape)

    def _placed(self, module: str, tensor: GgufTensor) -> _Stored:
        shape = tensor.shape
        if module == "ssm_conv1d":
            return _Stored(tensor, (shape[0], 1, shape[-1]), self._value_rows(self._head_dim(), self._key_rows()))
        if module == "ffn_gate_inp_shexp":
            return _Stored(tensor, (1, shape[-1]))
        if self._arch == "llama" and module in ("attn_q", "attn_k"):
            heads = self._number("attention.head_count")
            if module == "attn_k":
                heads = self._number("attention.head_count_kv", heads)
            return _Stored(tensor, shape, _rotary_rows(shape[0], heads))
        if module == "attn_qkv":
            return _Stored(tensor, shape, self._value_rows(self._head_dim(), self._key_rows()))
        if module == "attn_gate":
            return _Stored(tensor, shape, self._value_rows(self._head_dim()))
        if module in ("ssm_alpha", "ssm_beta"):
            return _Stored(tensor, shape, self._value_rows(1))
        if module == "ssm_out":
            return _Stored(tensor, shape, columns=self._value_rows(self._head_dim()))
        return _Stored(tensor, shape)

    def _add_experts(self, layer: str, projections: tuple[str, ...], tensor: GgufTensor) -> None:
        experts, rows, columns = tensor.shape
        size = rows // len(projections)
        for e in range(experts):
            for i, projection in enumerate(projections):
                start = e * rows + i * size
                name = f"{layer}mlp.experts.{e}.{projection}.weight"
                self._stored[name] = _Stored(tensor, (size, columns), slice(start, start + size))

    def _add_ba(self, layer: str, tensor: GgufTensor) -> None:
        """qwen3next: rows stand per key head, [b of its value heads | a of them]."""
        groups = np.arange(tensor.shape[0]).reshape(self._number("ssm.group_count"), 2, -1)
        for i, name in enumerate(("in_proj_b", "in_proj_a")):
            rows = groups[:, i].reshape(-1)
            self._stored[f"{layer}linear_attn.{name}.weight"] = _Stored(tensor, (len(rows), tensor.shape[1]), rows)

    def _value_rows(self, head_dim: int, first: int = 0) -> Index | None:
        """Where the rows of value heads in grouped order stand in tiled order; `first` rows before them stay."""
        if self._arch not in ("qwen35", "qwen35moe"):
            return None
        key_heads, value_heads = self._number("ssm.group_count"), self._number("ssm.time_step_rank")
        heads = np.arange(value_heads).reshape(-1, key_heads).T.reshape(-1)
        rows = first + (heads[:, None] * head_dim + np.arange(head_dim)).reshape(-1)
        return np.concatenate([np.arange(first), rows])

    def _head_dim(self) -> int:
        return self._number("ssm.inner_size") // self._number("ssm.time_step_rank")

    def _key_rows(self) -> int:
        return 2 * self._number("ssm.group_count") * self._number("ssm.state_size")

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._file.metadata.get(f"{self._arch}.{key}", default)
        if not isinstance(value, int):
            raise ModelError(f"{self.path}: the key {self._arch}.{key} must be a whole number, not {value!r}")
        return value


def _rotary_rows(total: int, heads: int) -> Index:
    """Where row (head, half, i) of the rotate-half order stands in a file that keeps the pairs (i, half) together."""
    return np.arange(total).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
