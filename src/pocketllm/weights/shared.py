"""`SharedSource`: several models built from one copy of their matrices.

Engines that differ in their caches alone (`kv_eval` runs one for each KV type, side by side) need the weights once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from pocketllm.kernels.types import LinearWeight
from pocketllm.parallel import Dim
from pocketllm.weights.source import Role, WeightSource


@dataclass(frozen=True)
class SharedSource:
    """Asks `source` for each matrix once and hands the same one to every model that is built from here.

    Small tensors and biases are copies: a layer may change its own (attention cuts the K bias out).
    """

    source: WeightSource
    prefix: str = ""
    stacks: dict[tuple[str, ...], list[LinearWeight]] = field(default_factory=dict)  # full names -> as handed out first

    def scope(self, prefix: str) -> SharedSource:
        return SharedSource(self.source.scope(prefix), f"{self.prefix}{prefix}.", self.stacks)

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
        key = tuple(self.prefix + name for name in names)
        if key not in self.stacks:
            self.stacks[key] = self.source.linear(names, out_features, in_features, bias=bias, rows=rows, role=role)
        return [part if part.bias is None else replace(part, bias=part.bias.clone()) for part in self.stacks[key]]

    def tensor(self, name: str, shape: tuple[Dim, *tuple[int, ...]], *, offset: float = 0.0) -> Tensor:
        return self.source.tensor(name, shape, offset=offset)

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def finish(self) -> None:
        self.source.finish()
