"""From a model's name to its config and weights: `read_model`; and the shapes that can be run without any file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch

from pocketllm.errors import ModelError
from pocketllm.models.config import ModelConfig
from pocketllm.models.config_gguf import config_from_gguf
from pocketllm.models.config_hf import config_from_dict, config_from_folder
from pocketllm.options import LoadFormat
from pocketllm.weights.base import Policy
from pocketllm.weights.checkpoint import CheckpointSource
from pocketllm.weights.dummy import DummySource
from pocketllm.weights.formats import Dense, Fp8Block, StoredFormat
from pocketllm.weights.gguf_file import GgufFile
from pocketllm.weights.gguf_reader import GgufReader
from pocketllm.weights.hub import EMBEDDED_NAME, find_model
from pocketllm.weights.reader import MTP, Reader, Storage
from pocketllm.weights.safetensors_reader import SafetensorsReader
from pocketllm.weights.source import WeightSource


@dataclass(frozen=True)
class Checkpoint:
    """A model that can be built: its config, and where its weights come from (`reader` None: random ones)."""

    config: ModelConfig
    path: Path | None  # folder or .gguf file; None for a shape
    name: str
    storage: Storage  # what `weights.dummy.PlannedSource` needs to count bytes
    reader: Reader | None

    def open_source(self, policy: Policy, device: torch.device, seed: int = 0) -> WeightSource:
        """The weights, put on `device` as they are asked for. `seed` is that of random weights."""
        tied = self.config.tie_word_embeddings
        if self.reader is None:
            return DummySource(self.storage, policy, device, tied_head=tied, seed=seed)
        return CheckpointSource(self.reader, policy, device, tied_head=tied)


class ConfigStorage:
    """How a checkpoint of this config stores its weights, so far as the config alone can tell."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._plain = Dense(getattr(torch, config.dtype))

    def has(self, name: str) -> bool:
        config, module = self._config, name.rpartition(".")[0]
        if name == "lm_head.weight":
            return not config.tie_word_embeddings
        if name.startswith(MTP) and not config.num_mtp_layers:
            return False
        if name.endswith("_proj.bias"):
            if module.endswith(("q_proj", "k_proj", "v_proj")):
                return config.qkv_bias
            return config.o_bias if module.endswith("o_proj") else config.mlp_bias
        return True

    def format_of(self, name: str) -> StoredFormat:
        module = name.removesuffix(".weight")
        quantised = self._config.quantization == "fp8_block" and not module.endswith("embed_tokens")
        return Fp8Block() if quantised and not self._is_listed(module) else self._plain

    def _is_listed(self, module: str) -> bool:
        """Entries of `unquantized` name a module, the end of its name, or a parent of it."""
        parts, listed = module.split("."), self._config.unquantized
        ends = (".".join(parts[i:]) for i in range(len(parts)))
        starts = (".".join(parts[:i]) for i in range(1, len(parts)))
        return any(name in listed for name in (*ends, *starts))


def read_model(model: str | Path | None, load_format: LoadFormat = "auto") -> Checkpoint:
    """Finds a model and reads its config and the headers of its weight files.

    model: a folder, a .gguf file, a hub id, or None for the embedded model; with load_format "dummy" also one of
    `shape_names()`, or a folder that has no weights. ModelError if it can't be found or read.
    """
    if isinstance(model, str) and model in shape_names() and not Path(model).exists():
        if load_format != "dummy":
            raise ModelError(f"{model} is a shape without weights: use load_format 'dummy', or give a folder or hub id")
        config = config_from_shape(model)
        return Checkpoint(config, None, model, ConfigStorage(config), None)
    path = find_model(model)
    name = EMBEDDED_NAME if model is None else str(model) if not Path(model).exists() else path.stem
    if path.suffix == ".gguf":
        file = GgufFile(path)
        config = config_from_gguf(file)
        reader = GgufReader(file)
        return Checkpoint(config, path, name, reader, None if load_format == "dummy" else reader)
    config = config_from_folder(path)
    if load_format == "dummy":
        return Checkpoint(config, path, name, ConfigStorage(config), None)
    folder = SafetensorsReader(path)
    return Checkpoint(config, path, name, folder, folder)


def shape_names() -> tuple[str, ...]:
    """Models whose shapes are built in, for runs with random weights."""
    files = resources.files("pocketllm.models").joinpath("shapes").iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


def config_from_shape(name: str) -> ModelConfig:
    """The config of a built-in shape. ModelError lists the names if there is no such shape."""
    if name not in shape_names():
        raise ModelError(f"no shape named {name!r}: known are {', '.join(shape_names())}")
    text = resources.files("pocketllm.models").joinpath("shapes", f"{name}.json").read_text(encoding="utf-8")
    return config_from_dict(json.loads(text))
