"""`WeightSource`: where a layer's constructor takes its weights from, by checkpoint name.

A model is built once, top down; every layer asks for exactly the tensors it needs. So the same constructor code loads a
checkpoint, makes random weights, or only counts bytes for the memory plan, and a checkpoint's missing, extra and misshapen
tensors are known when the last layer is built (`finish` names them all in one error).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from pocketllm.kernels.types import LinearWeight
from pocketllm.parallel import Dim

Role = Literal[
    "linear", "embedding", "head", "small"
]  # small: never quantised (routers, per-head scalars' projections)


class WeightSource(Protocol):
    def scope(self, prefix: str) -> WeightSource:
        """The same source with `prefix + "."` before every name."""

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
        """The matrices `<name>.weight` (and `<name>.bias`) stacked along their rows: [sum(out_features), in_features].

        Neighbours stored in the same way become one `LinearWeight`; a mixed stack comes back as several, in order.
        A `Part` in place of a number asks for a rank's shard of that dimension; ValueError if a shard would part elements
        that share a scale. `rows` [sum of the sizes] int64 reorders the rows of the stack (row i is row rows[i]).
        """

    def tensor(self, name: str, shape: tuple[Dim, *tuple[int, ...]], *, offset: float = 0.0) -> Tensor:
        """A small tensor in float32, `offset` added (1.0 for norms that multiply by 1 + w). shape[0] may be a `Part`."""

    def has(self, name: str) -> bool:
        """Whether the source holds `name` (a full tensor name below this scope)."""

    def finish(self) -> None:
        """After the last layer: ModelError naming every missing, extra or misshapen tensor."""
