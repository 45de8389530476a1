"""The readable backend in plain PyTorch. It defines what every other backend must compute."""

from collections.abc import Callable

from torch import Tensor

from pocketllm.kernels.reference.attention import append, attend, attention_workspace, dequantize, prefill
from pocketllm.kernels.reference.gated_delta import (
    gated_delta_commit,
    gated_delta_decode,
    gated_delta_prefill,
    gated_delta_verify,
)
from pocketllm.kernels.reference.linear import embedding, linear, moe, pack_weight
from pocketllm.kernels.reference.rowwise import add_rms_norm, norm_rope, rms_norm, sigmoid_mul, silu_mul

name = "reference"


def capture(run: Callable[[], Tensor]) -> tuple[Tensor, None]:
    return run(), None


__all__ = [
    "add_rms_norm",
    "append",
    "attend",
    "attention_workspace",
    "capture",
    "dequantize",
    "embedding",
    "gated_delta_commit",
    "gated_delta_decode",
    "gated_delta_prefill",
    "gated_delta_verify",
    "linear",
    "moe",
    "name",
    "norm_rope",
    "pack_weight",
    "prefill",
    "rms_norm",
    "sigmoid_mul",
    "silu_mul",
]
