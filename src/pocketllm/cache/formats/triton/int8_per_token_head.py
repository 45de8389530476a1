# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""Triton pieces of int8_per_token_head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.cache.formats.rotation import signs
from pocketllm.kernels.triton.numerics import int8_to_fp16, round_even
from pocketllm.kernels.triton.pieces import HopperPieces, TritonPieces
from pocketllm.kernels.triton.storage import load_plane


@triton.jit
def store_int8(codes, scales, row, x, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    largest = tl.max(tl.abs(x), axis=0) + tl.sum(0.0 * x, axis=0)  # a maximum passes over NaN
    scale = tl.where(largest < 1e-12, 1e-12, largest) / 127.0
    y = tl.minimum(tl.maximum(round_even(x / scale), -127.0), 127.0)
    tl.store(codes + row * D + d, y.to(tl.int8), mask=d < D)
    tl.store(scales + row, scale)


@triton.jit
def store_row(planes, row, k, v, D: tl.constexpr, DP: tl.constexpr):
    store_int8(planes[0], planes[2], row, k, D, DP)
    store_int8(planes[1], planes[3], row, v, D, DP)


@triton.jit
def load_k(planes, rows, D: tl.constexpr, DP: tl.constexpr):
    codes = load_plane(planes[0], rows, D, DP)
    return int8_to_fp16(codes), tl.load(planes[2] + rows)


@triton.jit
def load_v(planes, rows, D: tl.constexpr, DP: tl.constexpr):
    codes = load_plane(planes[1], rows, D, DP)
    return int8_to_fp16(codes), tl.load(planes[3] + rows)


def hopper() -> HopperPieces:
    from pocketllm.cache.formats.triton.int8_per_token_head_hopper import PIECES

    return PIECES


def pieces(head_dim: int) -> TritonPieces:
    return TritonPieces(signs(head_dim), torch.float16, True, store_row, load_k, load_v, hopper)
