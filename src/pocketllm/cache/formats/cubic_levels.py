"""The 16 levels of a value in 4 bits: code q stands for scale * level(q - 7.5) with level(x) = x + CUBIC x^3.

The cubic follows the Lloyd-Max quantiser of a Gaussian closely and is computed in two multiply-adds, where a table would
need a gather per value.

Two codes share a byte in planar halves: the low nibble of byte j is element j, the high nibble element j + D/2, so both
halves unpack to contiguous vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from pocketllm.kernels.numba.format_pieces import Lanes

CUBIC = 1 / 133.375  # its inverse is an fp16 number, which GPU kernels use
TINY = 1e-12  # keeps all-zero rows finite; far below any V of a real model


def levels() -> Tensor:
    """The 16 levels [16] float32, ascending, before the scale."""
    x = torch.arange(16, dtype=torch.float32) - 7.5
    return x + CUBIC * x**3


def nearest(x: Tensor) -> Tensor:
    """The code (int64) of the level nearest to each x."""
    table = levels().to(x.device)
    return torch.bucketize(x, (table[1:] + table[:-1]) / 2)


def fit(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Of the codes of x [..., n] nearest for `scale` [..., 1]: their least-squares scale, and the part of |x|^2 that they
    explain with it, [..., 1] each."""
    level = levels().to(x.device)[nearest(x / scale)]
    product, square = (x * level).sum(-1, keepdim=True), level.square().sum(-1, keepdim=True)
    return (product / square).clamp_min(TINY), product.square() / square


def pack(codes: Tensor) -> Tensor:
    """codes [..., D] -> bytes [..., D/2] uint8."""
    low, high = codes.to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`, int64."""
    return torch.cat((packed & 15, packed >> 4), dim=-1).long()


def numba_levels() -> tuple[tuple[np.float32, ...], tuple[np.float32, ...]]:
    """The levels, and the midpoints between neighbours."""
    values = levels()
    midpoints = (values[1:] + values[:-1]) / 2
    return tuple(np.float32(x) for x in values.tolist()), tuple(np.float32(x) for x in midpoints.tolist())


def numba_pack(head_dim: int) -> Callable[..., Any]:
    """(x, packed): packs the codes, D float32 at address x."""
    from pocketllm.kernels.numba.format_simd import store_nibbles
    from pocketllm.kernels.numba.simd import load_f32x16

    half = head_dim // 2

    def pack_codes(x: int, packed: int) -> None:
        for i in range(0, half, 8):
            store_nibbles(packed + i, load_f32x16(x + i * 4), load_f32x16(x + (half + i) * 4))

    return pack_codes


def numba_load(head_dim: int) -> Callable[..., Any]:
    """(codes, i) -> the levels of elements i .. i + 15."""
    from pocketllm.kernels.numba.format_simd import load_high_nibbles, load_low_nibbles, load_nibbles

    half, (table, _) = head_dim // 2, numba_levels()

    def load_whole(codes: int, i: int) -> Lanes:
        if i < half:
            return load_low_nibbles(codes + i, table)
        return load_high_nibbles(codes + i - half, table)

    def load_parts(codes: int, i: int) -> Lanes:
        first, first_shift = (codes + i, 0) if i < half else (codes + i - half, 4)
        second, second_shift = (codes + i + 8, 0) if i + 8 < half else (codes + i + 8 - half, 4)
        return load_nibbles(first, first_shift, second, second_shift, table)

    return load_whole if half % 16 == 0 else load_parts
