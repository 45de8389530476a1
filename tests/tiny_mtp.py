"""Tiny models with a layer for multi-token prediction, and transformers' own such layer as their oracle."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

import tiny_models

_NAMES = {"enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden.", "eh_proj.": "fc.", "post_norm.": "norm.",
          "mtp_block.": "layers.0."}  # fmt: skip


class MtpOracle:
    def __init__(self, model: Any, seed: int) -> None:
        self.model = copy.copy(model)
        self.model.config = copy.deepcopy(model.config)
        self.model.config.num_mtp_layers, self.model.config.mtp_layer_types = 1, ["full_attention"]
        self.layers: Any = MtpModel(self.model, 1).eval()
        self.layers.config._attn_implementation = "eager"
        for name, values in self.layers.layers.named_parameters():
            noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed + len(name)))
            with torch.no_grad():
                values.copy_(0.1 * noise if "norm" in name else noise / values.shape[-1] ** 0.5)

    def tensors(self) -> dict[str, Tensor]:
        """As a checkpoint has them; experts stacked in one tensor."""
        found = {}
        for name, values in self.layers.layers[0].state_dict().items():
            (old,) = [old for old in _NAMES if name.startswith(old)]
            found["mtp." + _NAMES[old] + name.removeprefix(old)] = values.contiguous()
        return found

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """What follows, by the layer: greedily, from the state before each token (zero before the first)."""
        ids, drafted = torch.tensor([tokens]), []
        states = self.model.get_decoder()(ids).last_hidden_state
        states = torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), dim=1)
        for _ in range(count):
            positions = torch.arange(ids.shape[1])[None]
            out = self.layers.forward_layer(0, states, positions, None, input_ids=ids)
            drafted.append(int(self.model.lm_head(out[0, -1]).argmax()))
            ids = torch.cat((ids, torch.tensor([[drafted[-1]]])), dim=1)
            states = torch.cat((states, out[:, -1:]), dim=1)
        return drafted


def make_mtp(kind: str, tmp_path: Path, **overrides: Any) -> tuple[Path, MtpOracle]:
    """A folder as of `tiny_models.make`, with `mtp.*`, and its oracle."""
    folder, model = tiny_models.make(kind, tmp_path, **overrides)
    oracle = MtpOracle(model, seed=7)
    file, config = folder / "model.safetensors", folder / "config.json"
    save_file({**load_file(file), **oracle.tensors()}, file)
    config.write_text(json.dumps({**json.loads(config.read_text()), "mtp_num_hidden_layers": 1}))
    return folder, oracle
