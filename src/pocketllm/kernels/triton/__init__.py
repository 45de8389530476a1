"""The GPU backend in Triton: attention over slots; the other operations are still those of the reference."""

from pocketllm.kernels.reference import capture, set_num_threads, warm_up
from pocketllm.kernels.reference.gated_delta import (
    gated_delta_commit,
    gated_delta_decode,
    gated_delta_prefill,
    gated_delta_verify,
)
from pocketllm.kernels.reference.linear import embedding, gated_linear, linear, moe, pack_weight
from pocketllm.kernels.reference.rowwise import add_rms_norm, norm_rope, rms_norm, sigmoid_mul, silu_mul
from pocketllm.kernels.triton.attention import append, attend, attention_workspace, dequantize, prefill

name = "triton"
captures = False

__all__ = [
    "add_rms_norm",
    "append",
    "attend",
    "attention_workspace",
    "capture",
    "captures",
    "dequantize",
    "embedding",
    "gated_delta_commit",
    "gated_delta_decode",
    "gated_delta_prefill",
    "gated_delta_verify",
    "gated_linear",
    "linear",
    "moe",
    "name",
    "norm_rope",
    "pack_weight",
    "prefill",
    "rms_norm",
    "set_num_threads",
    "sigmoid_mul",
    "silu_mul",
    "warm_up",
]
