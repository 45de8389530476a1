"""Operations on single rows: norms, rotary embedding, gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pocketllm.kernels.types import Readers
from pocketllm.parallel import Summands


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def add_up(x: Summands, dtype: torch.dtype) -> Tensor:
    """Summands of one rank. (On CPUs, ranks have no memory in common: they send messages.)"""
    if x.single is not None:
        return x.single.to(dtype)
    total = x.parts[0].float()
    for part in x.parts[1:]:
        total = total + part.float()
    return total.to(dtype)


def add_rms_norm(x: Summands, residual: Tensor, weight: Tensor, eps: float, readers: Readers = ()) -> Tensor:
    residual.add_(add_up(x, residual.dtype))
    return rms_norm(residual, weight, eps)


def norm_rope(x: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    y = x.float()  # [T, H, D]
    if norm is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * norm
    return rotate_half(y, cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)).to(x.dtype)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D] with cos, sin [..., R/2] broadcast over it: rotates pairs (i, i + R/2), leaves dims R.. as they are."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def silu_mul(gate_up: Tensor, readers: Readers = ()) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def sigmoid_mul(x: Tensor, gate: Tensor, readers: Readers = ()) -> Tensor:
    return x * sigmoid(gate.flatten(1)).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Computed in float64, returned in float32.

    torch computes the last few elements of a tensor with another exp than the rest; in float64 that difference is gone
    once rounded, so an element's result does not depend on its place.
    """
    return torch.sigmoid(x.double()).float()
