"""The CPU backend: kernels in Python, compiled by Numba and kept on disk; vectors of 16 float32, several threads."""

from __future__ import annotations

import torch
from torch import Tensor

from pocketllm.kernels.numba.attention import append, attend, attention_workspace, dequantize, prefill
from pocketllm.kernels.numba.gated_delta import (
    gated_delta_commit,
    gated_delta_decode,
    gated_delta_prefill,
    gated_delta_verify,
)
from pocketllm.kernels.numba.launch import capture
from pocketllm.kernels.numba.linear import Linear
from pocketllm.kernels.numba.moe import mixture
from pocketllm.kernels.numba.progress import warm_up
from pocketllm.kernels.numba.rowwise import add_rms_norm, norm_rope, rms_norm, sigmoid_mul, silu_mul
from pocketllm.kernels.numba.simd import Target
from pocketllm.kernels.numba.threads import pool
from pocketllm.kernels.numba.threads import set_num_threads as set_pool_threads
from pocketllm.kernels.reference import add_up, bridge
from pocketllm.kernels.types import LinearWeight, Readers
from pocketllm.parallel import Place, Summands

name = "numba"
captures = True
keeps_dtype = False
meets_ranks = False
short_prefills: tuple[int, ...] = ()  # what fills them up would be computed
_TARGET = Target.host()


def set_num_threads(num_threads: int) -> None:
    """Kernels use these threads; torch, whose idle threads would spin against them, is left with one."""
    torch.set_num_threads(1)
    set_pool_threads(num_threads)


def _products() -> Linear:
    return Linear(pool(), _TARGET)


def pack_weight(weight: LinearWeight) -> LinearWeight:
    return _products().pack_weight(weight)


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    return _products().linear(x, weight)


def linear_summands(x: Tensor, weight: LinearWeight, place: Place | None = None) -> Summands:
    return Summands.of(linear(x, weight))


def gated_linear(x: Tensor, weight: LinearWeight, readers: Readers = ()) -> Tensor:
    return _products().gated_linear(x, weight)


def embedding(token_ids: Tensor, weight: LinearWeight, dtype: object) -> Tensor:
    return _products().embedding(token_ids, weight, dtype)


def moe(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: list[LinearWeight], down: list[LinearWeight]
) -> Tensor:
    return mixture(linear, gated_linear, x, expert_ids, expert_weights, gate_up, down)


__all__ = [
    "add_rms_norm",
    "add_up",
    "append",
    "attend",
    "attention_workspace",
    "bridge",
    "capture",
    "captures",
    "dequantize",
    "embedding",
    "gated_delta_commit",
    "gated_delta_decode",
    "gated_delta_prefill",
    "gated_delta_verify",
    "gated_linear",
    "keeps_dtype",
    "linear",
    "linear_summands",
    "meets_ranks",
    "moe",
    "name",
    "norm_rope",
    "pack_weight",
    "prefill",
    "rms_norm",
    "set_num_threads",
    "short_prefills",
    "sigmoid_mul",
    "silu_mul",
    "warm_up",
]
