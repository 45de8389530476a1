"""`BaseSource`: what every weight source does alike. It stacks, orders and counts; a subclass supplies single matrices.

A matrix is handed out in the format that `Policy` chooses from three things: how the file stores it, the user's
`quantization` option, and its role. The plan of a model's memory and its loading use the same policy, so they agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pocketllm.errors import ModelError
from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import LinearWeight
from pocketllm.options import EmbeddingStorage, EngineOptions, Quantization
from pocketllm.parallel import Dim, Part
from pocketllm.weights.formats import FORMATS, Dense, StoredFormat, merge, reorder_rows
from pocketllm.weights.source import Role

_ERROR_LINES = 20  # problems named in full by `finish`

_KEPT = {
    "w8": ("w8", "w4", "w4_shifted"),
    "w4": ("w4", "w4_shifted"),
}  # stored formats that re-encoding would not make smaller


def _as_it_is(weight: LinearWeight) -> LinearWeight:
    return weight


@dataclass(frozen=True)
class Policy:
    """Which format a matrix is kept in: `EngineOptions.quantization` applied to its role and its storage.

    pack: the backend's `pack_weight`, applied to every finished matrix (on the meta device too, where bytes are planned).
    """

    quantization: Quantization
    compute_dtype: torch.dtype
    pack: Callable[[LinearWeight], LinearWeight] = _as_it_is
    embeddings: EmbeddingStorage = "none"

    @classmethod
    def of(cls, options: EngineOptions, compute_dtype: torch.dtype, kernels: Kernels) -> Policy:
        return cls(options.quantization, compute_dtype, kernels.pack_weight, options.quantize_embeddings)

    def target(self, stored: StoredFormat, role: Role) -> StoredFormat:
        """auto: as stored; none: the compute type; w8, w4: re-encoded where that is smaller.

        Matrices of role small are always plain, the embedding and the head never less than w8 by re-encoding. These two
        follow `quantize_embeddings` first, if they are plain in the file.
        """
        if self.embeddings != "none" and role in ("embedding", "head") and isinstance(stored, Dense):
            return FORMATS[{"w8": "w8", "fp8": "fp8_block"}[self.embeddings]]
        if self.quantization == "none":
            return Dense(self.compute_dtype)
        if self.quantization == "bf16":
            return Dense(torch.bfloat16)
        if role == "small":
            return stored if isinstance(stored, Dense) else Dense(torch.float32)
        if self.quantization == "auto":
            return stored
        wanted = "w8" if role in ("embedding", "head") else self.quantization
        return stored if stored.name in _KEPT[wanted] else FORMATS[wanted]


class BaseSource(ABC):
    """A `WeightSource` but for where single tensors come from. `nbytes`: what was handed out, shared weights once."""

    def __init__(self, policy: Policy, *, tied_head: bool) -> None:
        self.policy = policy
        self.nbytes = 0
        self.problems: list[str] = []
        self._tied_head = tied_head
        self._embedding: LinearWeight | None = None

    @abstractmethod
    def has(self, name: str) -> bool: ...

    @abstractmethod
    def matrix(self, name: str, rows: Part, columns: Part, role: Role) -> LinearWeight:
        """A shard of `<name>.weight` in the format of the policy, without bias. ModelError if it can't be had; ValueError
        if it can't be cut so."""

    @abstractmethod
    def vector(self, name: str, shape: tuple[int, ...], offset: float) -> Tensor:
        """A small tensor, float32, in memory of its own. ModelError if it can't be had."""

    def scope(self, prefix: str) -> Scope:
        return Scope(self, prefix)

    def linear(
        self,
        names: Sequence[str],
        out_features: Sequence[Dim],
        in_features: Dim,
        *,
        bias: bool = False,
        rows: Tensor | None = None,
        role: Role = "linear",
    ) -> list[LinearWeight]:
        """See `WeightSource.linear`. With a tied head, `lm_head` is the embedding itself."""
        if self._tied_head and role == "head" and self._embedding is not None:
            return [self._embedding]
        rows_of, columns = [Part.of(dim) for dim in out_features], Part.of(in_features)
        parts = [self._part(name, part, columns, bias, role) for name, part in zip(names, rows_of, strict=True)]
        if self.problems:  # `finish` will raise: a layer needs nothing but sizes now
            return [placeholder(sum(part.size for part in rows_of), columns.size, bias)]
        stack = merge(parts)
        if rows is not None:
            try:
                stack = _reordered(stack, rows)
            except ModelError as error:
                self.problems.append(f"{', '.join(names)}: {error}")
        stack = [self.policy.pack(weight) for weight in stack]
        self.nbytes += sum(weight.nbytes for weight in stack)
        if role == "embedding":
            self._embedding = stack[0]
        return stack

    def tensor(self, name: str, shape: tuple[Dim, *tuple[int, ...]], *, offset: float = 0.0) -> Tensor:
        part, *others = Part.of(shape[0]), *shape[1:]
        try:
            values = part.take(self.vector(name, (part.total, *others), offset))
        except ModelError as error:
            self.problems.append(str(error))
            return torch.zeros(part.size, *others)
        self.nbytes += values.nbytes
        return values

    def finish(self) -> None:
        """ModelError naming every problem met (the first 20 in full)."""
        if self.problems:
            shown = "\n".join(f"  {line}" for line in self.problems[:_ERROR_LINES])
            more = len(self.problems) - _ERROR_LINES
            rest = f"\n  and {more} more" if more > 0 else ""
            raise ModelError(f"{len(self.problems)} weights do not fit the model:\n{shown}{rest}")

    def _part(self, name: str, rows: Part, columns: Part, bias: bool, role: Role) -> LinearWeight:
        weight, added = placeholder(rows.size, columns.size, False), None
        try:
            weight = self.matrix(name, rows, columns, role)
        except ModelError as error:
            self.problems.append(str(error))
        try:
            added = rows.take(self.vector(f"{name}.bias", (rows.total,), 0.0)) if bias else None
        except ModelError as error:
            self.problems.append(str(error))
        return LinearWeight(weight.format, weight.shape, weight.tensors, added)


@dataclass(frozen=True)
class Scope:
    """A source below a prefix: `scope("model.layers.3").scope("mlp")` asks for `model.layers.3.mlp.<name>`."""

    source: BaseSource
    prefix: str

    def scope(self, prefix: str) -> Scope:
        return Scope(self.source, f"{self.prefix}.{prefix}")

    def linear(
        self,
        names: Sequence[str],
        out_features: Sequence[Dim],
        in_features: Dim,
        *,
        bias: bool = False,
        rows: Tensor | None = None,
        role: Role = "linear",
    ) -> list[LinearWeight]:
        full = [f"{self.prefix}.{name}" for name in names]
        return self.source.linear(full, out_features, in_features, bias=bias, rows=rows, role=role)

    def tensor(self, name: str, shape: tuple[Dim, *tuple[int, ...]], *, offset: float = 0.0) -> Tensor:
        return self.source.tensor(f"{self.prefix}.{name}", shape, offset=offset)

    def has(self, name: str) -> bool:
        return self.source.has(f"{self.prefix}.{name}")

    def finish(self) -> None:
        self.source.finish()


def placeholder(n: int, k: int, bias: bool) -> LinearWeight:
    """A matrix of zeros that takes no memory."""
    return LinearWeight(
        Dense(torch.float32), (n, k), (torch.zeros(1, 1).expand(n, k),), torch.zeros(n) if bias else None
    )


def _reordered(stack: list[LinearWeight], rows: Tensor) -> list[LinearWeight]:
    """Rows of the whole stack in a new order. A mixed stack is cut where the source of the rows changes."""
    ends = torch.tensor([weight.shape[0] for weight in stack]).cumsum(0)
    rows = rows.cpu()
    owner = torch.bucketize(rows, ends, right=True)  # which part of the stack a row comes from
    cuts = (torch.nonzero(owner[1:] != owner[:-1]).flatten() + 1).tolist()
    pieces = []
    for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        part = int(owner[start])
        first = int(ends[part]) - stack[part].shape[0]
        pieces.append(reorder_rows(stack[part], rows[start:stop] - first))
    return merge(pieces)
