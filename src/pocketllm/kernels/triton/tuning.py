"""Tile and split sizes: one small table per device, found by `tune`, kept as JSON beside this file or in the user's folder.

The entry depends on the head dimension and on the bytes a token takes, which are fixed when an engine is built, never on
a batch: the split size is part of what defines a result to the last bit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class AttendConfig:
    """split: tokens per split; block_n: tokens per tile; programs per multiprocessor; Triton's warps and stages. (To
    `attend_hopper_plain` only splits matter; to `attend_hopper`, too, and its own are longer: `of_both_groups`.)

    halves: unpack V by halves of its dims, for less shared memory and fewer registers. first_split: tokens per split among
    a slot's first `first_tokens`, whole splits of them: one short slot alone would else keep few multiprocessors busy.
    """

    split: int
    block_n: int
    programs: int
    warps: int
    stages: int
    halves: bool = False
    first_split: int = 0
    first_tokens: int = 0

    def __post_init__(self) -> None:
        first, until, split = self.splits
        if until % first:
            raise ValueError(f"the first {until} tokens must be whole splits of {first}")
        if first > split:
            raise ValueError(f"the first splits, of {first} tokens, must not be longer than the others, of {split}")
        if split % self.block_n or first % self.block_n:
            raise ValueError(f"splits of {first} and {split} tokens must be whole tiles of {self.block_n}")

    @property
    def splits(self) -> tuple[int, int, int]:
        """As kernels take them: tokens per split before the token of the second number, and after it."""
        return self.first_split or self.split, self.first_tokens, self.split

    def num_splits(self, tokens: int) -> int:
        first, until, split = self.splits
        return -(-min(tokens, until) // first) + -(-max(tokens - until, 0) // split)


@dataclass(frozen=True)
class PrefillConfig:
    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class AttentionConfig:
    head_dim: int
    token_bytes: int  # of one KV head, K and V together
    attend: AttendConfig
    verify: AttendConfig  # for several blocks of rows; all that defines a sum is as in `attend` (`tune.SAME`)
    prefill: PrefillConfig


def user_folder() -> Path:
    """Where `pocketllm tune` writes tables; they go before those beside this file."""
    return Path.home() / ".config" / "pocketllm" / "tuned"


def device_table(name: str) -> dict[str, Any]:
    """The package's table of the device called so, or the default one; what the user's file has takes the place of its."""

    def tables(folder: Any) -> dict[str, dict[str, Any]]:
        files = [file for file in folder.iterdir() if file.name.endswith(".json")] if folder.is_dir() else []
        return {table["device"]: table for table in (json.loads(file.read_text()) for file in files)}

    packaged = tables(resources.files(__package__) / "tuned")
    return {**packaged.get(name, packaged["default"]), **tables(user_folder()).get(name, {})}


def parse(table: dict[str, Any]) -> tuple[AttentionConfig, ...]:
    return tuple(
        AttentionConfig(
            entry["head_dim"],
            entry["token_bytes"],
            AttendConfig(**entry["attend"]),
            AttendConfig(**(entry["attend"] | entry["verify"])),
            PrefillConfig(**entry["prefill"]),
        )
        for entry in table["attention"]
    )


@cache
def device_name(device: torch.device) -> str:
    """What the tables call a device; of meta tensors, which plans are made of, the device that there is."""
    if device.type == "cuda" or (device.type == "meta" and torch.cuda.is_available()):
        return torch.cuda.get_device_name(None if device.type == "meta" else device)
    return "default"


@cache
def attention_config(device: torch.device, head_dim: int, token_bytes: int) -> AttentionConfig:
    """The table's entry of this device (or of the default table) nearest in head_dim, then in bytes per token."""
    table = parse(device_table(device_name(device)))
    return min(table, key=lambda c: (abs(c.head_dim - head_dim), abs(c.token_bytes - token_bytes)))


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of compute capability 9.0, which Gluon's Hopper kernels are made for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
