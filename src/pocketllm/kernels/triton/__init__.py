"""The GPU backend in Triton."""

from pocketllm.kernels.reference import set_num_threads
from pocketllm.kernels.triton.attention import append, attend, attention_workspace, dequantize
from pocketllm.kernels.triton.bridge import bridge
from pocketllm.kernels.triton.capture import capture, captures, short_prefills, warm_up
from pocketllm.kernels.triton.gated_delta import (
    gated_delta_commit,
    gated_delta_decode,
    gated_delta_prefill,
    gated_delta_verify,
)
from pocketllm.kernels.triton.linear import embedding, gated_linear, linear, pack_weight
from pocketllm.kernels.triton.moe import moe
from pocketllm.kernels.triton.prefill_library import prefill
from pocketllm.kernels.triton.rowwise import norm_rope, rms_norm, sigmoid_mul, silu_mul
from pocketllm.kernels.triton.summands import add_rms_norm, add_up, linear_summands

name = "triton"
keeps_dtype = True
meets_ranks = True

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
