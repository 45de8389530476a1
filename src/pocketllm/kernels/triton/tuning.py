"""Tile and split sizes: one small table per device, found by `tune`, kept as JSON beside this file.

The entry depends on the head dimension and on the bytes a token takes, which are fixed when an engine is built, never on
a batch: the split size is part of what defines a result to the last bit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

import torch


@dataclass(frozen=True)
class AttendConfig:
    """split: tokens per split; block_n: tokens per tile; programs per multiprocessor; Triton's warps and stages.

    registers: most a thread may have, so that as many programs fit at a time; None: as the compiler likes.
    """

    split: int
    block_n: int
    programs: int
    warps: int
    stages: int
    registers: int | None = None


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
    verify: AttendConfig  # for several row blocks; all that defines a sum (split, block_n, warps) is as in `attend`
    prefill: PrefillConfig


def parse(text: str) -> tuple[AttentionConfig, ...]:
    return tuple(
        AttentionConfig(
            entry["head_dim"],
            entry["token_bytes"],
            AttendConfig(**entry["attend"]),
            AttendConfig(**(entry["attend"] | entry["verify"])),
            PrefillConfig(**entry["prefill"]),
        )
        for entry in json.loads(text)["attention"]
    )


@cache
def _table(device_name: str) -> tuple[AttentionConfig, ...]:
    folder = resources.files(__package__) / "tuned"
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".json") and json.loads(text := file.read_text())["device"] == device_name:
            return parse(text)
    return parse((folder / "default.json").read_text())


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@cache
def attention_config(device: torch.device, head_dim: int, token_bytes: int) -> AttentionConfig:
    """The table's entry of this device (or of the default table) nearest in head_dim, then in bytes per token."""
    table = _table(_device_name(device))
    return min(table, key=lambda c: (abs(c.head_dim - head_dim), abs(c.token_bytes - token_bytes)))


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
