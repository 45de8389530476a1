"""Tensor parallelism as a value that is passed in: no process group is needed to build a layer.

A rank holds a shard of every large weight: some heads, some columns of the MLP, some rows of the vocabulary. `Part` says
which; what a layer computes from its shard is one summand of the layer's output, and `all_reduce` adds the summands up.
`TensorParallel(0, 1)` is the default everywhere, so every layer can be built and run in a unit test. The collective
operations of a larger group come from a subclass; with one rank there is nothing to exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """What is kept of a dimension of `total` elements: the ranges [start, stop), in order."""

    total: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, dim: Dim) -> Part:
        """A plain number is a whole dimension."""
        return dim if isinstance(dim, Part) else cls(dim, ((0, dim),))

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    @property
    def is_whole(self) -> bool:
        return self.ranges == ((0, self.total),)

    def times(self, unit: int) -> Part:
        """The part of a dimension that holds `unit` elements for each of this one's: heads -> their rows."""
        return Part(self.total * unit, tuple((start * unit, stop * unit) for start, stop in self.ranges))

    def take(self, x: Tensor) -> Tensor:
        """The kept elements of x's first dimension, in memory of their own."""
        if self.is_whole:
            return x
        if x.is_meta:  # of a plan; joining meta tensors makes torch import its compiler, which takes a second
            return x.new_empty(self.size, *x.shape[1:])
        return torch.cat([x[start:stop] for start, stop in self.ranges])


Dim = int | Part


def blocks(*parts: Part) -> Part:
    """The part of a dimension that holds several blocks, one after the other (q | k | v), each with its own part."""
    ranges: list[tuple[int, int]] = []
    offset = 0
    for part in parts:
        ranges += [(offset + start, offset + stop) for start, stop in part.ranges]
        offset += part.total
    whole = all(part.is_whole for part in parts)
    return Part(offset, ((0, offset),) if whole else tuple(ranges))


@dataclass(frozen=True, eq=False)
class Place:
    """Memory by which kernels of all ranks exchange summands, in one of two ways.

    They may stay in `memory` and be read by the others once flags have said that they are there. Or they are sent, into the
    others' inboxes, as words of 8 bytes that hold a number and a stamp: whoever finds the stamp has the number. That is one
    way through the link, where reading takes three: flag, request, answer. (Nobody sends the embedding's.)
    """

    memory: Tensor  # [bytes] uint8: this rank's
    addresses: Tensor  # [size] int64: each rank's, as this one's device sees it
    flags: Tensor  # [size] int64: addresses of each rank's flags, [MOST_MEETINGS, size] int32; a flag is 1 from when a
    #                kernel has said that its rank's memory is ready until the one it says it to has seen that
    # [size] int64: addresses of each rank's words int64, 0 at first: [size (from), rows, hidden size], or, of up to FEW_ROWS
    # rows, [size, parts, rows, hidden size]
    inboxes: Tensor
    stop: Tensor  # [1] int32, of all places: from when it is not 0, nobody waits for words
    rank: int
    size: int
    # What programs of bridges meet by (`kernels.triton.bridge`), by their shape, of which there is one
    meetings: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor at the beginning of `memory`."""
        return self.memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


@dataclass(frozen=True, eq=False)
class Summands:
    """A tensor [M, N] that is yet to be added up: over splits of a product, over ranks, or both.

    Whoever reads it next adds, in order and in float32: the parts of a rank, then the ranks' sums.
    """

    parts: Tensor  # [S, M, N]
    place: Place | None = None  # where the other ranks' are, in the same order as this rank's; None: these are all

    @classmethod
    def of(cls, x: Tensor) -> Summands:
        return cls(x[None])

    @property
    def single(self) -> Tensor | None:
        """The tensor itself, if there is nothing to add."""
        return self.parts[0] if len(self.parts) == 1 and self.place is None else None


@dataclass(frozen=True)
class TensorParallel:
    """This process's place in a group of `size` ranks that each hold a shard of every large weight."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"tensor parallel rank {self.rank} of {self.size}: rank must be in [0, size), size >= 1")

    def shard(self, total: int, what: str) -> Part:
        """This rank's part of a dimension of `total`; ValueError if it can't be cut evenly."""
        if total % self.size:
            raise ValueError(f"{what} = {total} can't be sharded over {self.size} ranks: use a divisor of {total}")
        each = total // self.size
        return Part(total, ((self.rank * each, (self.rank + 1) * each),))

    def replicate_or_shard(self, heads: int, what: str) -> Part:
        """KV heads of this rank: sharded while there are enough heads, else each head is held by several ranks."""
        if heads >= self.size:
            return self.shard(heads, what)
        if self.size % heads:
            raise ValueError(f"{what} = {heads} can't be replicated over {self.size} ranks: use a multiple of {heads}")
        head = self.rank * heads // self.size
        return Part(heads, ((head, head + 1),))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of `x` [M, K] over the ranks, on every rank. May be computed in place.

        A row's sum does not depend on M, bit for bit, up to 64 rows (see `kernels.protocol`).
        """
        return x

    def open_places(self, hidden_size: int) -> None:
        """Called once by all ranks alike: `place` has memory for rows of this width from then on, where devices allow it."""

    def place(self, index: int, rows: int) -> Place | None:
        """Where to put summands [.., rows, N] for the others, or None: then `all_reduce` is the way.

        Of two sums that follow each other, each must use another `index`, of 0 to NUM_PLACES - 1: memory may be written
        again only after all ranks have come to a later sum.
        """
        return None

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, on every rank; the others give a tensor of its shape, which may be written to."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Columns of all ranks side by side on rank 0: [M, K] -> [M, size * K]. The other ranks get back their own."""
        return x


SMALL_BATCH = 64  # rows up to which a row's sum, in a product or over the ranks, must not depend on their number
MIXER, FEED_FORWARD, EMBEDDING = range(3)  # see `TensorParallel.place`
NUM_PLACES = 3
FEW_ROWS = 8  # rows up to which ranks may send each other parts of sums as they are
MOST_PARTS = 6  # of summands in a place: it has room for so many of SMALL_BATCH rows in float32
MOST_MEETINGS = 1024  # programs of one kernel that meet those of the other ranks


def place_nbytes(hidden_size: int) -> int:
    """Of each place's memory."""
    return MOST_PARTS * SMALL_BATCH * hidden_size * 4


def inbox_nbytes(hidden_size: int, size: int) -> int:
    """Of each place's inbox on each of `size` ranks: sums of all rows, or parts of few."""
    return size * max(SMALL_BATCH, MOST_PARTS * FEW_ROWS) * hidden_size * 8


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of each rank's tensor, in one order, accumulated in float32."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
