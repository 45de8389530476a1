"""Reads a Hugging Face folder: one `model.safetensors`, or the files that `model.safetensors.index.json` names.

Files are memory-mapped: opening reads headers, a tensor's bytes are read from disk when they are first used.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pocketllm.errors import ModelError
from pocketllm.kernels.types import LinearWeight
from pocketllm.weights.formats import BLOCK, Dense, Fp8Block, StoredFormat
from pocketllm.weights.reader import MTP, canonical_name

_DENSE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_FP8 = "F8_E4M3"
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_SCALE_SUFFIX = "_scale_inv"  # of the tensor's own name; multiplied, in spite of its name


@dataclass(frozen=True)
class _Stored:
    """A tensor of a file, or rows `rows` of its expert `expert` where a file stacks the experts [E, rows, columns]."""

    file: Path
    key: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    expert: int | None = None
    rows: tuple[int, int] | None = None


class SafetensorsReader:
    """A `Reader` over a folder. ModelError if a file is missing, damaged or cut short, or blocks are not 128 x 128."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._handles: dict[Path, Any] = {}
        self._stored: dict[str, _Stored] = {}
        self._scales: dict[str, _Stored] = {}  # by the canonical name of the weight they belong to
        self._check_block_size()
        for file, keys in _files_and_keys(folder):
            self._read_header(file, keys)

    def names(self) -> Collection[str]:
        return self._stored.keys()

    def has(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def format_of(self, name: str) -> StoredFormat:
        stored = self._stored[name]
        if stored.dtype in _DENSE:
            return Dense(_DENSE[stored.dtype])
        if stored.dtype != _FP8:
            raise ModelError(
                f"{stored.file.name}: {stored.key} is stored as {stored.dtype}: F32, BF16, F16 and "
                "F8_E4M3 with weight_scale_inv can be read"
            )
        self._check_scale(name, stored)
        return Fp8Block()

    def matrix(self, name: str) -> LinearWeight:
        form, stored = self.format_of(name), self._stored[name]
        n, k = stored.shape
        tensors: tuple[Tensor, ...] = (self._load(stored),)
        if stored.dtype == _FP8:
            tensors = (*tensors, self._load(self._scales[name]).float())
        return LinearWeight(form, (n, k), tensors)

    def tensor(self, name: str) -> Tensor:
        weight = self._stored[name]
        if weight.dtype == _FP8 and len(weight.shape) == 2:
            return Fp8Block().decode(self.matrix(name).tensors)
        self.format_of(name)
        return self._load(weight)

    def _check_block_size(self) -> None:
        config = read_json(self.path / "config.json") if (self.path / "config.json").exists() else {}
        quantization = config.get("quantization_config") or {}
        size = quantization.get("weight_block_size") or [BLOCK, BLOCK]
        if list(size) != [BLOCK, BLOCK]:
            raise ModelError(f"{self.path}: FP8 weights in blocks of {size}: only [{BLOCK}, {BLOCK}] can be read")

    def _read_header(self, file: Path, keys: Collection[str] | None) -> None:
        try:
            handle: Any = safe_open(file, framework="pt", device="cpu")
            present = frozenset(handle.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{file}: damaged, cut short or missing ({error}): download it again") from None
        self._handles[file] = handle
        for key in present if keys is None else keys:
            name = canonical_name(key)
            if name is None:
                continue
            if key not in present:
                raise ModelError(f"{file}: tensor {key} is not in it, though the index says so: download it again")
            header = handle.get_slice(key)
            self._add(name, _Stored(file, key, str(header.get_dtype()), tuple(header.get_shape())))

    def _add(self, name: str, stored: _Stored) -> None:
        into = self._scales if name.endswith(_SCALE_SUFFIX) else self._stored
        name = name.removesuffix(_SCALE_SUFFIX)
        base, _, last = name.removesuffix(".weight").rpartition(".")
        if base.endswith("mlp.experts") and len(stored.shape) == 3:
            into.update(_unstacked(base, last, stored))
        else:
            into[name] = stored

    def _check_scale(self, name: str, stored: _Stored) -> None:
        scale = self._scales.get(name)
        where = f"{stored.file.name}: {stored.key}"
        if len(stored.shape) != 2 or scale is None:
            raise ModelError(f"{where} is float8 without block scales ({stored.key}{_SCALE_SUFFIX})")
        wanted = tuple(-(-s // BLOCK) for s in stored.shape)
        if scale.shape != wanted or scale.dtype not in _SCALE_DTYPES:
            raise ModelError(
                f"{where}: its scale is {scale.dtype} {list(scale.shape)}: must be "
                f"{list(wanted)} of {', '.join(_SCALE_DTYPES)}"
            )

    def _load(self, stored: _Stored) -> Tensor:
        try:
            tensor: Tensor = self._handles[stored.file].get_tensor(stored.key)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{stored.file}: tensor {stored.key} can't be read ({error})") from None
        if stored.expert is not None:
            tensor = tensor[stored.expert]
        return tensor[slice(*stored.rows)] if stored.rows else tensor


def _unstacked(base: str, last: str, stored: _Stored) -> dict[str, _Stored]:
    """Entries per expert of a stacked tensor: gate_up_proj [E, 2I, H] (gate rows first) or {gate,up,down}_proj."""
    experts, rows, columns = stored.shape
    parts = {last: (0, rows)}
    if last == "gate_up_proj":
        if rows % (2 * BLOCK if stored.dtype == _FP8 else 2):
            raise ModelError(f"{stored.file.name}: {stored.key} {list(stored.shape)} can't be halved into gate and up")
        parts = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)}
    return {
        f"{base}.{e}.{part}.weight": _Stored(
            stored.file, stored.key, stored.dtype, (stop - start, columns), e, (start, stop)
        )
        for e in range(experts)
        for part, (start, stop) in parts.items()
    }


def _files_and_keys(folder: Path) -> list[tuple[Path, Collection[str] | None]]:
    """The weight files, each with the tensors the index takes from it (None: all of them)."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: has no weight_map: download it again")
        files: dict[str, list[str]] = {}
        for key, file in weight_map.items():
            files.setdefault(file, []).append(key)
        needed = {f: k for f, k in files.items() if any(canonical_name(key) is not None for key in k)}
        missing = sorted(file for file in needed if not (folder / file).exists())
        for file in [f for f in missing if all((canonical_name(key) or MTP).startswith(MTP) for key in needed[f])]:
            missing.remove(file)  # of use for drafts only, and with them its tensors will be missed
            del needed[file]
        if missing:
            raise ModelError(f"{folder}: weight files named by the index are missing: {', '.join(missing[:20])}")
        return [(folder / file, keys) for file, keys in needed.items()]
    if single.exists():
        return [(single, None)]
    raise ModelError(f"{folder}: no weights: expected model.safetensors or model.safetensors.index.json")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelError if it is no valid JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: can't be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return value
