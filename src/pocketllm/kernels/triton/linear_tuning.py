"""Tile sizes and splits of the products: the `linear` entry of each device's table beside this file.

Tiles along K and splits depend on a weight's format and shape and on the device, never on a batch: they say in which order
a row is summed. What only concerns speed (outputs of a program, warps, stages) may depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from pocketllm.kernels.triton.tuning import device_name, device_table

SHARED = 96 * 1024  # bytes of shared memory a program may take for its stages, so that two fit a multiprocessor
MOST_SPLITS = 16


@dataclass(frozen=True)
class ProductConfig:
    """A product of up to 64 rows. block_n: outputs of a program; block_k: columns of a tile; stages: tiles in flight.

    splits  over how many programs the sum over K is spread
    more    for more rows: [16, 32 or 64, block_n, warps, stages] each. Rows of x are read again by every program, so
            that more of them want programs of more outputs
    """

    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int = 1
    more: tuple[tuple[int, int, int, int], ...] = ()

    def for_rows(self, blocks: int, halves: int, bits: int, item: int) -> ProductConfig:
        """For `blocks` blocks of 8 rows of `item` bytes an element: with as many stages as fit (Triton keeps one fewer in
        memory), and, where `more` does not say, warps enough that a thread has no more than 32 sums."""
        rows, sizes = blocks * 8, {entry[0]: entry[1:] for entry in self.more}
        block_n, warps, stages = sizes.get(rows, (self.block_n, self.warps, self.stages))
        stage = self.block_k * (block_n * halves * bits // 8 + rows * item)
        room = SHARED if block_n * halves <= 128 else 2 * SHARED  # such a program is alone on its multiprocessor
        while rows not in sizes and block_n * halves * rows > 32 * 32 * warps and warps < 8:
            warps *= 2
        return replace(self, block_n=block_n, warps=warps, stages=max(min(stages, room // stage + 1), 2))


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
                1 once its sums are complete, 2 once it runs and has its input. Then the next one's programs are there
                when this one ends, and have asked for what does not depend on it
    early_rows  rows of a pass up to which it does; early_product_rows: of a product's, whose many programs, if they wait,
                take room from those that run
    library     let the library multiply e4m3 by e4m3 (else `fp8_tile`); it can on Hopper only
    bridge      go from mixer to mixer in one kernel (Hopper only)
    programs    programs a multiprocessor should get; splits are added until there are that many
    defaults    format -> sizes; `shapes`: what was found better for (format, N, K)
    tiles       format -> sizes for many rows
    fp8_tile    the same for e4m3 times e4m3
    """

    early: int
    early_rows: int
    early_product_rows: int
    library: bool
    bridge: bool
    programs: int
    defaults: dict[str, ProductConfig]
    shapes: dict[tuple[str, int, int], ProductConfig]
    tiles: dict[str, TileConfig]
    fp8_tile: TileConfig

    def early_for(self, num_rows: int) -> int:
        """`early`, of a pass of so many rows."""
        return self.early if num_rows <= self.early_rows else 0

    def early_for_product(self, num_rows: int) -> int:
        """The same of a product."""
        return self.early_for(num_rows) if num_rows <= self.early_product_rows else 0


def _product_config(sizes: dict[str, Any]) -> ProductConfig:
    more = tuple(tuple(entry) for entry in sizes.pop("more", ()))
    return ProductConfig(**sizes, more=more)


def parse(entry: dict[str, Any]) -> LinearTable:
    shapes = {}
    for shape in entry["shapes"]:
        sizes = dict(shape)
        key = sizes.pop("format"), sizes.pop("n"), sizes.pop("k")
        shapes[key] = _product_config(sizes)
    return LinearTable(
        early=entry["early"],
        early_rows=entry["early_rows"],
        early_product_rows=entry["early_product_rows"],
        library=entry["library"],
        bridge=entry["bridge"],
        programs=entry["programs"],
        defaults={name: _product_config(sizes) for name, sizes in entry["defaults"].items()},
        shapes=shapes,
        tiles={name: TileConfig(**sizes) for name, sizes in entry["tiles"].items()},
        fp8_tile=TileConfig(**entry["fp8_tile"]),
    )


@cache
def linear_table(device: torch.device) -> LinearTable:
    """The table of this device, or the default one."""
    return parse(device_table(device_name(device))["linear"])


@cache
def product_config(table: LinearTable, multiprocessors: int, name: str, n: int, k: int, halves: int) -> ProductConfig:
    """For up to 64 rows. Narrow weights are split over K until every multiprocessor has programs enough to read."""
    if (name, n, k) in table.shapes:
        return table.shapes[name, n, k]
    config = table.defaults[name]
    columns, tiles = -(-n // halves // config.block_n), -(-k // config.block_k)
    splits = min(table.programs * multiprocessors // columns, tiles // 4, MOST_SPLITS)
    return replace(config, splits=max(splits, 1))
