"""Rotary position embedding tables (RoFormer, arXiv 2104.09864), with the Qwen and Llama families' context extensions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pocketllm.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> tuple[Tensor, float]:
    """Angle per position of each pair, [R/2] float32, and the factor that cos and sin are multiplied by."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    base = 1.0 / rope.theta**exponents
    if rope.scaling == "linear":
        return base / rope.factor, 1.0
    if rope.scaling == "llama3":
        return _llama3(rope, base), 1.0
    if rope.scaling == "yarn":
        scale = rope.attention_factor or (0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0)
        return _yarn(rope, base), scale
    return base, 1.0


def _llama3(rope: RopeConfig, base: Tensor) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    turns = rope.original_max_position * base / (2 * math.pi)  # over the original context
    smooth = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return base * ((1 - smooth) / rope.factor + smooth)


def _yarn(rope: RopeConfig, base: Tensor) -> Tensor:
    """Interpolates the pairs that turn less than beta_slow times over the original context (arXiv 2309.00071)."""

    def pair_turning(turns: float) -> float:
        span = rope.original_max_position / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


class RotaryEmbedding:
    """cos and sin [max_context, R/2] float32. Text only: multi-axis RoPE with equal axes is plain RoPE."""

    def __init__(self, rope: RopeConfig, max_context: int, device: torch.device) -> None:
        frequencies, scale = inverse_frequencies(rope)
        angles = torch.outer(torch.arange(max_context, dtype=torch.float32), frequencies)
        self.cos = (angles.cos() * scale).to(device)
        self.sin = (angles.sin() * scale).to(device)

    @property
    def nbytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes

    @staticmethod
    def planned_nbytes(rope: RopeConfig, max_context: int) -> int:
        return 2 * max_context * (rope.rotary_dim // 2) * 4
