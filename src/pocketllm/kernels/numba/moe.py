"""Mixture of experts on a CPU: each expert's rows together, one matrix product after another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pocketllm.kernels.types import LinearWeight


def mixture(
    linear: Callable[[Tensor, LinearWeight], Tensor],
    gated_linear: Callable[[Tensor, LinearWeight], Tensor],
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: list[LinearWeight],
    down: list[LinearWeight],
) -> Tensor:
    """As `Kernels.moe`, with the products to use. A row's experts are summed in the order of their numbers, whatever else
    the batch contains."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in torch.unique(expert_ids).tolist():
        rows, choice = (expert_ids == expert).nonzero(as_tuple=True)
        y = linear(gated_linear(x[rows], gate_up[expert]), down[expert])
        out[rows] += y * expert_weights[rows, choice].unsqueeze(1).to(y.dtype)  # a row chooses an expert once
    return out.to(x.dtype)
