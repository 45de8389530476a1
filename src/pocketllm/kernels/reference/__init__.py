"""The readable backend in plain PyTorch. It defines what every other backend must compute."""

from collections.abc import Callable

import torch
from torch import Tensor

from pocketllm.kernels.reference.attention import append, attend, attention_workspace, dequantize, prefill
from pocketllm.kernels.reference.gated_delta import (
    gated_delta_commit,
    gated_delta_decode,
    gated_delta_prefill,
    gated_delta_verify,
)
from pocketllm.kernels.reference.linear import (
    bridge,
    embedding,
    gated_linear,
    linear,
    linear_summands,
    moe,
    pack_weight,
)
from pocketllm.kernels.reference.rowwise import add_rms_norm, add_up, norm_rope, rms_norm, sigmoid_mul, silu_mul

name = "reference"
captures = False
keeps_dtype = False
meets_ranks = False
short_prefills: tuple[int, ...] = ()


def set_num_threads(num_threads: int) -> None:
    """OpenMP keeps this number per calling thread."""
    torch.set_num_threads(num_threads)


def warm_up(run: Callable[[], None]) -> None:
    """Nothing here is compiled."""


def capture(run: Callable[[], Tensor]) -> tuple[Tensor, None]:
    return run(), None


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
