"""Matrix products over stored weights: decode the weight, multiply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pocketllm.kernels.reference.rowwise import silu_mul
from pocketllm.kernels.types import Bridge, LinearWeight, Readers
from pocketllm.parallel import SMALL_BATCH, Place, Summands


def pack_weight(weight: LinearWeight) -> LinearWeight:
    return weight


BLOCK = 8
DECODE_ROWS = 4096  # rows of a quantised weight decoded at a time: bounds the workspace


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    if len(weight.tensors) == 1:  # plain: decoding is a view
        y = _product(x, weight.format.decode(weight.tensors))
    else:
        rows = torch.arange(weight.shape[0], device=x.device)
        parts = [
            _product(x, weight.format.decode_rows(weight.tensors, some)) for some in torch.split(rows, DECODE_ROWS)
        ]
        y = torch.cat(parts, dim=-1)
    return y if weight.bias is None else y + weight.bias.to(x.dtype)


def gated_linear(x: Tensor, weight: LinearWeight, readers: Readers = ()) -> Tensor:
    return silu_mul(linear(x, weight))


def linear_summands(x: Tensor, weight: LinearWeight, place: Place | None = None) -> Summands:
    return Summands.of(linear(x, weight))


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    matrix = matrix.to(x.dtype)  # no copy if stored in the compute type
    if len(x) > SMALL_BATCH:
        return F.linear(x, matrix)
    # The library's product sums in an order that depends on the number of rows: always give it the same number.
    padded = F.pad(x, (0, 0, 0, -len(x) % BLOCK))
    return torch.cat([F.linear(block, matrix) for block in torch.split(padded, BLOCK)])[: len(x)]


def embedding(token_ids: Tensor, weight: LinearWeight, dtype: object) -> Tensor:
    return weight.format.decode_rows(weight.tensors, token_ids).to(cast(torch.dtype, dtype))


def bridge(weights: Bridge, num_rows: int, dtype: object, places: Sequence[Place] = ()) -> None:
    """Step by step is as good on this backend."""


def moe(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: list[LinearWeight], down: list[LinearWeight]
) -> Tensor:
    out = torch.zeros_like(x)
    for expert in torch.unique(expert_ids).tolist():
        rows, choice = (expert_ids == expert).nonzero(as_tuple=True)
        y = linear(gated_linear(x[rows], gate_up[expert]), down[expert])
        out.index_add_(0, rows, y * expert_weights[rows, choice].unsqueeze(1).to(y.dtype))
    return out
