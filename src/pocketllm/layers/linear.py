"""`Linear`: one or more stacked weight matrices applied to the same input; `RowParallelLinear`: one cut along its input.

Between the two lies what a rank can do alone (Megatron-LM, arXiv 1909.08053): the first matrix of a layer is cut along its
outputs, so that a rank has whole heads or channels; the second along its inputs, and the ranks' results are summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import Activations, LinearWeight, Readers
from pocketllm.parallel import Part, Summands, TensorParallel
from pocketllm.weights.source import WeightSource


class Linear:
    """y = x W^T + bias. Stacked matrices (q|k|v, gate|up) in one storage format are one product; else one per part."""

    def __init__(self, kernels: Kernels, parts: Sequence[LinearWeight]) -> None:
        self._kernels = kernels
        self.parts = list(parts)

    def __call__(self, x: Activations) -> Tensor:
        """x [M, K] -> [M, N]."""
        outputs = self.outputs(x)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def outputs(self, x: Activations) -> list[Tensor]:
        """x [M, K] -> [M, N of each part]."""
        return [self._kernels.linear(x, part) for part in self.parts]

    def gated(self, x: Activations, readers: Readers = ()) -> Activations:
        """For a stack gate | up: x [M, K] -> silu(gate) * up, [M, N / 2]."""
        if len(self.parts) == 1:
            return self._kernels.gated_linear(x, self.parts[0], readers)
        return self._kernels.silu_mul(self(x), readers)


def cut(outputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """The columns of outputs [.., M, N] side by side, in pieces of these sizes; nothing is copied unless a piece lies in
    two of them. Columns past the last piece are left out."""
    left, pieces = list(outputs), []
    for size in sizes:
        taken = [left.pop(0)]
        while (width := sum(t.shape[-1] for t in taken)) < size:
            taken.append(left.pop(0))
        whole = taken[0] if len(taken) == 1 else torch.cat(taken, dim=-1)
        pieces.append(whole[..., :size])
        if width > size:
            left.insert(0, whole[..., size:])
    return pieces


class RowParallelLinear:
    """y = x W^T + bias of which each rank has the columns that belong to its part of x."""

    def __init__(
        self,
        tp: TensorParallel,
        kernels: Kernels,
        source: WeightSource,
        name: str,
        out_features: int,
        in_features: Part,
        *,
        place: int,
        bias: bool = False,
    ) -> None:
        """place: see `TensorParallel.place`."""
        self._tp, self._kernels, self._place = tp, kernels, place
        (self.weight,) = source.linear([name], [out_features], in_features, bias=bias)
        if self.weight.bias is not None and tp.rank > 0:  # it is to be added once
            self.weight.bias.zero_()

    def __call__(self, x: Activations) -> Summands:
        """x [M, K of this rank] -> [M, N], for every rank to add up."""
        place = self._tp.place(self._place, len(x)) if self._kernels.meets_ranks else None
        y = self._kernels.linear_summands(x, self.weight, place)
        if self._tp.size == 1 or place is not None:
            return y
        return Summands.of(self._tp.all_reduce(self._kernels.add_up(y, x.dtype)))

    def summand(self, x: Activations) -> Tensor:
        """This rank's part of the sum."""
        return self._kernels.linear(x, self.weight)


def sum_over_ranks(x: Tensor, tp: TensorParallel, kernels: Kernels, place: int) -> Summands:
    """x [M, N], a summand of each rank, for every rank to add up."""
    found = tp.place(place, len(x)) if kernels.meets_ranks else None
    if found is None:
        return Summands.of(tp.all_reduce(x))
    return Summands(found.room((1, *x.shape), x.dtype).copy_(x), found)
