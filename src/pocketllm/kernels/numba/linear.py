"""`linear` and `embedding` of the CPU backend. Weights must be packed first: `pack_weight`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from pocketllm.kernels.numba.launch import launch
from pocketllm.kernels.numba.linear_kernels import gated_product_kernel, product_kernel, scratch_bytes
from pocketllm.kernels.numba.linear_packing import PackedFormat, pack_weight
from pocketllm.kernels.numba.linear_tiles import COLUMNS, Scheme
from pocketllm.kernels.numba.rowwise import silu_mul
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
        scheme, source, scratch, bias = self._prepared(x, weight)
        n, k = weight.shape
        out = torch.empty((len(x), n), dtype=torch.float32)
        self._launch(product_kernel(scheme), source, weight, n, k, bias, out, scratch)
        return out.to(x.dtype)

    def gated_linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """x [M, K] -> silu(gate) * up, [M, I], of a weight that stacks gate | up [2I, K]."""
        n, k = weight.shape
        inner = n // 2
        if inner % COLUMNS:
            return silu_mul(self.linear(x, weight))
        scheme, source, scratch, bias = self._prepared(x, weight)
        out = torch.empty((len(x), inner), dtype=torch.float32)
        self._launch(gated_product_kernel(scheme), source, weight, inner, k, bias, out, scratch)
        return out.to(x.dtype)

    def _prepared(self, x: Tensor, weight: LinearWeight) -> tuple[Scheme, Tensor, Tensor, int]:
        if not isinstance(weight.format, PackedFormat):
            raise TypeError(f"a {weight.format.name} weight in its stored layout: pack it first with pack_weight")
        k = weight.shape[1]
        if x.dim() != 2 or x.shape[1] != k:
            raise ValueError(f"x has shape {tuple(x.shape)}: the weight needs [M, {k}]")
        scheme = weight.format.scheme
        scratch = torch.empty(scratch_bytes(scheme, len(x), k), dtype=torch.uint8)
        return scheme, x.float().contiguous(), scratch, weight.bias.data_ptr() if weight.bias is not None else 0

    def _launch(
        self, kernel: Any, x: Tensor, weight: LinearWeight, n: int, k: int, bias: int, out: Tensor, scratch: Tensor
    ) -> None:
        launch(
            kernel,
            self.pool.handle,
            x.data_ptr(),
            len(x),
            k,
            weight.tensors[0].data_ptr(),
            n,
            bias,
            out.data_ptr(),
            scratch.data_ptr(),
        )

    def embedding(self, token_ids: Tensor, weight: LinearWeight, dtype: object) -> Tensor:
        """token_ids [T] int64 -> rows of the table, [T, K] in `dtype`; decodes these rows only."""
        return weight.format.decode_rows(weight.tensors, token_ids).to(cast(torch.dtype, dtype))
