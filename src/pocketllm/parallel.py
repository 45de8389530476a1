"""Tensor parallelism as a value that is passed in: no process group is needed to build a layer.

`TensorParallel(0, 1)` is the default everywhere, so every layer can be built and run in a unit test. The collective
operations of a larger group come from a subclass; with one rank there is nothing to exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorParallel:
    """This process's place in a group of `size` ranks that each hold a shard of every large weight."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"tensor parallel rank {self.rank} of {self.size}: rank must be in [0, size), size >= 1")

    def shard(self, total: int, what: str) -> int:
        """Size of this rank's part of a dimension of `total`; ValueError if it can't be cut evenly."""
        if total % self.size:
            raise ValueError(f"{what} = {total} can't be sharded over {self.size} ranks: use a divisor of {total}")
        return total // self.size

    def replicate_or_shard(self, heads: int, what: str) -> int:
        """KV heads of this rank: sharded while there are enough heads, else each head is held by several ranks."""
        if heads >= self.size:
            return self.shard(heads, what)
        if self.size % heads:
            raise ValueError(f"{what} = {heads} can't be replicated over {self.size} ranks: use a multiple of {heads}")
        return 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of `x` over the ranks, on every rank."""
        return x
