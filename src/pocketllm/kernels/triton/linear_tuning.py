"""Tile sizes and splits of the products: the `linear` entry of each device's table beside this file.

They depend on a weight's format and shape and on the device, never on a batch: with the splits they say in which order a
row is summed. What only concerns speed (warps, stages) may depend on the number of rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import torch

SHARED = 96 * 1024  # bytes of shared memory a program may take for its stages, so that two fit a multiprocessor
MOST_SPLITS = 16


@dataclass(frozen=True)
class ProductConfig:
    """A product of up to 64 rows. block_n: outputs of a program; block_k: columns of a tile; stages: tiles in flight.

    splits: over how many programs the sum over K is spread.
    """

    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int = 1

    def for_rows(self, blocks: int, halves: int, bits: int, item: int) -> ProductConfig:
        """For `blocks` blocks of 8 rows of `item` bytes an element: with as many stages as fit (Triton keeps one fewer in
        memory), and warps enough that a thread has no more than 64 sums."""
        stage = self.block_k * (self.block_n * halves * bits // 8 + blocks * 8 * item)
        sums = self.block_n * halves * blocks * 8
        warps = self.warps
        while sums > 64 * 32 * warps and warps < 8:
            warps *= 2
        return replace(self, stages=max(min(self.stages, SHARED // stage + 1), 2), warps=warps)


@dataclass(frozen=True)
class TileConfig:
    """A product of many rows: tiles of rows x block_n, block_k columns at a time."""

    rows: int
    block_n: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True, eq=False)
class LinearTable:
    """What a device's file says.

    early       when a kernel lets the next one start (programmatic dependent launch, from Hopper on): 0 once it has ended,
                1 once its sums are complete, 2 once it runs. Then the next one's first weights come while this one ends
    library     let the library multiply e4m3 by e4m3 (else `fp8_tile`); it can on Hopper only
    programs    programs a multiprocessor should get; splits are added until there are that many
    defaults    format -> sizes; `shapes`: what was found better for (format, N, K)
    tiles       format -> sizes for many rows
    fp8_tile    the same for e4m3 times e4m3
    """

    early: int
    library: bool
    programs: int
    defaults: dict[str, ProductConfig]
    shapes: dict[tuple[str, int, int], ProductConfig]
    tiles: dict[str, TileConfig]
    fp8_tile: TileConfig


def parse(entry: dict[str, Any]) -> LinearTable:
    shapes = {}
    for shape in entry["shapes"]:
        sizes = dict(shape)
        key = sizes.pop("format"), sizes.pop("n"), sizes.pop("k")
        shapes[key] = ProductConfig(**sizes)
    return LinearTable(
        early=entry["early"],
        library=entry["library"],
        programs=entry["programs"],
        defaults={name: ProductConfig(**sizes) for name, sizes in entry["defaults"].items()},
        shapes=shapes,
        tiles={name: TileConfig(**sizes) for name, sizes in entry["tiles"].items()},
        fp8_tile=TileConfig(**entry["fp8_tile"]),
    )


@cache
def linear_table(device: torch.device) -> LinearTable:
    """The table of this device, or the default one."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "default"
    folder = resources.files(__package__) / "tuned"
    tables = [json.loads(file.read_text()) for file in folder.iterdir() if file.name.endswith(".json")]
    by_name = {table["device"]: table["linear"] for table in tables}
    return parse(by_name.get(name, by_name["default"]))


@cache
def product_config(table: LinearTable, multiprocessors: int, name: str, n: int, k: int, halves: int) -> ProductConfig:
    """For up to 64 rows. Narrow weights are split over K until every multiprocessor has programs enough to read."""
    if (name, n, k) in table.shapes:
        return table.shapes[name, n, k]
    config = table.defaults[name]
    columns, tiles = -(-n // halves // config.block_n), -(-k // config.block_k)
    splits = min(table.programs * multiprocessors // columns, tiles // 4, MOST_SPLITS)
    return replace(config, splits=max(splits, 1))
