# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""Triton pieces of fp8: codes become fp16 over 256, and scales 256 times themselves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.cache.formats.fp8 import FACTORS, TINY
from pocketllm.kernels.triton.numerics import fp8_over_256
from pocketllm.kernels.triton.pieces import HopperPieces, TritonPieces
from pocketllm.kernels.triton.storage import load_plane

_FACTORS, _TRIES, _TINY = tl.constexpr(FACTORS), tl.constexpr(len(FACTORS)), tl.constexpr(TINY)


@triton.jit
def _store(codes, scales, row, x, D: tl.constexpr, DP: tl.constexpr):
    """The search of `fp8.encode_e4m3`: four scales, the codes that fit best, their unbiased scale."""
    d = tl.arange(0, DP)
    first = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) / 448.0
    best = tl.zeros_like(x)
    most = -1.0
    for i in tl.static_range(_TRIES):
        tried = tl.minimum(tl.maximum(x / (first * _FACTORS[i]), -448.0), 448.0).to(tl.float8e4nv).to(tl.float32)
        product, square = tl.sum(x * tried, axis=0), tl.sum(tried * tried, axis=0)
        explained = product * product / tl.maximum(square, _TINY)
        better = (explained > most) | (explained != explained)
        best = tl.where(better, tried, best)
        most = tl.where(better, explained, most)
    product = tl.maximum(tl.sum(x * best, axis=0), _TINY)
    tl.store(codes + row * D + d, best.to(tl.float8e4nv), mask=d < D)
    scale = tl.sum(x * x, axis=0) / product
    tl.store(scales + row, tl.where(scale < _TINY, _TINY, scale))  # NaN stays


@triton.jit
def store_row(planes, row, k, v, D: tl.constexpr, DP: tl.constexpr):
    _store(planes[0], planes[2], row, k, D, DP)
    _store(planes[1], planes[3], row, v, D, DP)


@triton.jit
def load_k(planes, rows, D: tl.constexpr, DP: tl.constexpr):
    codes = load_plane(planes[0], rows, D, DP)
    return fp8_over_256(codes), tl.load(planes[2] + rows) * 256


@triton.jit
def load_v(planes, rows, D: tl.constexpr, DP: tl.constexpr):
    codes = load_plane(planes[1], rows, D, DP)
    return fp8_over_256(codes), tl.load(planes[3] + rows) * 256


def hopper() -> HopperPieces:
    from pocketllm.cache.formats.triton.fp8_hopper import PIECES

    return PIECES


PIECES = TritonPieces(None, torch.float16, True, store_row, load_k, load_v, hopper)
