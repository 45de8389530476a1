"""`linear` and `embedding` of the CPU backend. Weights must be packed first: `pack_weight`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from pocketllm.kernels.numba.launch import launch
from pocketllm.kernels.numba.linear_kernels import product_kernel, scratch_bytes
from pocketllm.kernels.numba.linear_packing import PackedFormat, pack_weight
from pocketllm.kernels.numba.runtime import ThreadPool
from pocketllm.kernels.numba.simd import Target
from pocketllm.kernels.types import LinearWeight


@dataclass(frozen=True)
class Linear:
    """Matrix products on the threads of `pool`, with the instructions of `target`.

    A row of a result is the same, bit for bit, for any number of rows, place among them and number of threads.
    """

    pool: ThreadPool
    target: Target

    def pack_weight(self, weight: LinearWeight) -> LinearWeight:
        """The weight in the layout `linear` reads; call once, at load. ValueError for a format without a kernel."""
        return pack_weight(weight, self.target)

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """x [M, K] -> x W^T + bias, [M, N], in x's dtype; any M. TypeError if the weight is not packed."""
        if not isinstance(weight.format, PackedFormat):
            raise TypeError(f"a {weight.format.name} weight in its stored layout: pack it first with pack_weight")
        n, k = weight.shape
        rows = x.shape[0]
        if x.dim() != 2 or x.shape[1] != k:
            raise ValueError(f"x has shape {tuple(x.shape)}: the weight needs [M, {k}]")
        source = x.float().contiguous()
        out = torch.empty((rows, n), dtype=torch.float32)
        scheme = weight.format.scheme
        scratch = torch.empty(scratch_bytes(scheme, rows, k), dtype=torch.uint8)
        bias = weight.bias.data_ptr() if weight.bias is not None else 0
        launch(
            product_kernel(scheme),
            self.pool.handle,
            source.data_ptr(),
            rows,
            k,
            weight.tensors[0].data_ptr(),
            n,
            bias,
            out.data_ptr(),
            scratch.data_ptr(),
        )
        return out.to(x.dtype)

    def embedding(self, token_ids: Tensor, weight: LinearWeight, dtype: object) -> Tensor:
        """token_ids [T] int64 -> rows of the table, [T, K] in `dtype`; decodes these rows only."""
        return weight.format.decode_rows(weight.tensors, token_ids).to(cast(torch.dtype, dtype))
