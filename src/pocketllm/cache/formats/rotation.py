"""The fixed randomised Hadamard rotation that quantised formats apply to each head.

A rotation spreads a large channel over all of them, so one scale per token and head fits the rest as well: at equal bytes
it is worth 9 dB on heads with outlier channels and costs nothing without (QuaRot, arXiv 2404.00456; SpinQuant, 2405.16406).
It is orthogonal, so scores are kept if the query is rotated too, and an output of rotated V needs one inverse per head.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_SEED = 0x51A7  # any fixed value: written caches must be readable with the same signs


@functools.cache
def signs(head_dim: int) -> Tensor:
    """The fixed random signs [D] float32 (+1 or -1) applied before the Hadamard transform."""
    bits = torch.randint(0, 2, (head_dim,), generator=torch.Generator().manual_seed(_SEED))
    return bits.float() * 2 - 1


def block_size(head_dim: int) -> int:
    """Length of a Hadamard block: the largest power of two that divides head_dim (D = 96 is three blocks of 32)."""
    return head_dim & -head_dim


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of each block of the last dimension; its own inverse. float32."""
    head_dim = x.shape[-1]
    block = block_size(head_dim)
    y = x.float().reshape(-1, block)
    half = 1
    while half < block:  # butterflies: (a, b) -> (a + b, a - b) at distance `half`
        pairs = y.view(-1, block // (2 * half), 2, half)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        y = torch.stack((a + b, a - b), dim=2).view(-1, block)
        half *= 2
    return y.mul(block**-0.5).view(x.shape)


def rotate(x: Tensor) -> Tensor:
    """x [..., D] -> R x, float32."""
    return hadamard(x.float() * signs(x.shape[-1]).to(x.device))


def rotate_back(x: Tensor) -> Tensor:
    """x [..., D] -> R^T x, float32: the inverse of `rotate`."""
    return hadamard(x) * signs(x.shape[-1]).to(x.device)
