"""Mixture of experts on a GPU: `Kernels.moe`, in a fixed number of launches that no choice of experts changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from pocketllm.kernels.triton.linear import TYPES
from pocketllm.kernels.triton.linear_pieces import pieces_of, planes_of
from pocketllm.kernels.triton.linear_tuning import LinearTable, linear_table
from pocketllm.kernels.triton.moe_kernels import combine_kernel, expert_kernel
from pocketllm.kernels.types import LinearWeight
from pocketllm.parallel import SMALL_BATCH

FEW_ROWS, MANY_ROWS = 8, 64  # of a block, in a batch of up to 64 rows and beyond


def moe(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: list[LinearWeight],
    down: list[LinearWeight],
) -> Tensor:
    table, (num_rows, top_k), x = linear_table(x.device), expert_ids.shape, x.contiguous()
    out = torch.empty_like(x)
    if not num_rows:
        return out
    pairs = expert_ids.flatten()
    order = torch.argsort(pairs, stable=True)
    counts = torch.zeros(len(gate_up), dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, pairs, torch.ones_like(pairs, dtype=torch.int32))
    rows = FEW_ROWS if num_rows <= SMALL_BATCH else MANY_ROWS
    early = table.early_for(num_rows)
    inner = _experts(table, early, x, gate_up, order, counts, top_k, rows, gated=True)
    y = _experts(table, early, inner, down, order, counts, 1, rows, gated=False)
    combine_kernel[(-(-x.shape[1] // 256), num_rows)](
        y, expert_weights.contiguous(), out, x.shape[1], TOP_K=top_k, BLOCK=256, EARLY=early, num_warps=2,
        launch_pdl=early > 0,
    )  # fmt: skip
    return out


def _experts(
    table: LinearTable,
    early: int,
    x: Tensor,
    experts: Sequence[LinearWeight],
    order: Tensor,
    counts: Tensor,
    top_k: int,
    rows: int,
    gated: bool,
) -> Tensor:
    """Each pair's expert applied to its row of x [pairs / top_k, K]: [pairs, N], or [pairs, N / 2]."""
    first = experts[0]
    pieces, (n, k), num_pairs = pieces_of(first), first.shape, len(order)
    config = table.defaults[first.format.name].for_rows(rows // 8, 2 if gated else 1, pieces.bits, x.element_size())
    outputs = n // 2 if gated else n
    out = torch.empty(num_pairs, outputs, dtype=x.dtype, device=x.device)
    blocks = min(num_pairs, num_pairs // rows + len(experts))  # an expert may leave one block partly empty
    expert_kernel[(blocks, -(-outputs // config.block_n))](
        x, planes_of(first), _offsets(experts), order, counts, out, len(experts), n, k,
        TOP_K=top_k, EXPERTS=max(1 << (len(experts) - 1).bit_length(), 2), GATED=gated, ROWS=rows,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, EVEN_K=k % config.block_k == 0, PARTS=pieces.parts,
        DTYPE=TYPES[x.dtype], LOAD=pieces.load, SCALE=pieces.scale, EARLY=early, num_warps=config.warps,
        num_stages=config.stages, launch_pdl=early > 0,
    )  # fmt: skip
    return out


def _offsets(experts: Sequence[LinearWeight]) -> Tensor:
    """See `moe_kernels.expert_kernel`. ValueError for experts that do not look alike."""
    first = experts[0]
    if any(e.format.name != first.format.name or e.shape != first.shape or e.bias is not None for e in experts):
        raise ValueError("experts of one layer must share a format and a shape, and have no bias")
    offsets = []
    for i, plane in enumerate(first.tensors):
        size = plane.element_size()
        offsets.append(tuple((e.tensors[i].data_ptr() - plane.data_ptr()) // size for e in experts))
    if any(offset % 16 for offset in offsets[0]):
        raise ValueError("experts must lie at multiples of 16 elements from each other")
    return _on_device(tuple(offsets), first.tensors[0].device)


@cache
def _on_device(offsets: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """The numbers as a tensor: copied once, so that a recorded pass finds them where they were."""
    return torch.tensor(offsets, dtype=torch.int64).to(device)
