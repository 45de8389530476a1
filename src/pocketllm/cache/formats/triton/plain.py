# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""Triton pieces of the plain formats: products run in the stored type."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.kernels.triton.pieces import TritonPieces
from pocketllm.kernels.triton.storage import load_plane


@triton.jit
def store_row(planes, row, k, v, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    tl.store(planes[0] + row * D + d, k.to(planes[0].dtype.element_ty), mask=d < D)
    tl.store(planes[1] + row * D + d, v.to(planes[1].dtype.element_ty), mask=d < D)


@triton.jit
def load_k(planes, rows, D: tl.constexpr, DP: tl.constexpr):
    return load_plane(planes[0], rows, D, DP), 1.0


@triton.jit
def load_v(planes, rows, D: tl.constexpr, DP: tl.constexpr):
    return load_plane(planes[1], rows, D, DP), 1.0


def pieces(dtype: torch.dtype) -> TritonPieces:
    return TritonPieces(None, dtype, False, store_row, load_k, load_v)
