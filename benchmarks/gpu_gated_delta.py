"""Times the Gated DeltaNet kernels of one layer of Qwen3.5-27B on a GPU, with several ways to share out the states.

    python benchmarks/gpu_gated_delta.py [--tokens 8192]

Steps (decode of 1, 8 and 32 slots) and one prefill of --tokens tokens; then the prefill by kernel. `floor` is the time in
which a device-to-device copy moves the states, read and written.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gpu_attention import copy_bandwidth
from pocketllm.kernels import triton as kernels
from pocketllm.kernels.triton import gated_delta
from pocketllm.kernels.triton.gated_delta import StateConfig
from pocketllm.kernels.triton.tune import time_graph
from pocketllm.kernels.types import GatedDeltaWeights, LayerState

DEVICE = torch.device("cuda", 0)
KEY_HEADS, HEADS, DIM, TAPS = 16, 48, 128, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
SLOTS = 32


def weights() -> GatedDeltaWeights:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE)

    return GatedDeltaWeights(
        random(CHANNELS, TAPS), random(HEADS), random(HEADS), random(DIM), 1e-6, KEY_HEADS, HEADS, DIM, DIM
    )


def state() -> LayerState:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(SLOTS + 1, *shape, device=DEVICE)

    return LayerState(
        zeros(CHANNELS, TAPS - 1), zeros(HEADS, DIM, DIM), zeros(0, CHANNELS), zeros(0, KEY_HEADS, DIM),
        zeros(0, HEADS, DIM), zeros(0, HEADS),
    )  # fmt: skip


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    qkvz = torch.randn(tokens, CHANNELS + HEADS * DIM, device=DEVICE).bfloat16()
    ba = torch.randn(tokens, 2 * HEADS, device=DEVICE).bfloat16()
    return qkvz[:, :CHANNELS], qkvz[:, CHANNELS:], ba[:, :HEADS], ba[:, HEADS:]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    bandwidth, w = copy_bandwidth(), weights()
    states = [state() for _ in range(3)]  # more than L2 holds
    for columns, warps in ((32, 4), (32, 2), (32, 1), (16, 1), (16, 2), (64, 4), (64, 8), (128, 8)):
        gated_delta.STEP = StateConfig(columns, warps)
        times = []
        for slots in (1, 8, 32):
            x, slot_ids = inputs(slots), torch.arange(slots, dtype=torch.int32, device=DEVICE)
            times.append(time_graph([partial(kernels.gated_delta_decode, *x, w, s, slot_ids) for s in states], 5))
        print(
            f"step, {columns} columns, {warps} warps: us at 1, 8, 32 slots " + " ".join(f"{t:6.1f}" for t in times),
            flush=True,
        )
    nbytes = 2 * HEADS * DIM * DIM * 4
    print("floor: " + " ".join(f"{n * nbytes / bandwidth * 1e6:6.1f}" for n in (1, 8, 32)))
    x, n = inputs(args.tokens), args.tokens
    prefill = partial(kernels.gated_delta_prefill, *x, w, states[0], ints(0), ints(0, n), ints(n))
    for columns, warps, stages in itertools.product((16, 32, 64), (2, 4, 8), (2, 3)):
        gated_delta.SCAN = StateConfig(columns, warps, stages)
        try:
            us = time_graph([prefill], 5)
        except Exception as failure:
            print(f"no {gated_delta.SCAN}: {str(failure).splitlines()[0][:80]}", flush=True)
            continue
        print(f"prefill of {n}, {columns} columns, {warps} warps, {stages} stages: {us:.0f} us", flush=True)
    gated_delta.SCAN = StateConfig(64, 4, 2)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(4):
            prefill()
        torch.cuda.synchronize()
    for event in sorted(recorded.key_averages(), key=lambda event: -event.device_time_total)[:6]:
        print(f"  {event.key[:40]:40} {event.device_time_total / 4:8.0f} us")


if __name__ == "__main__":
    main()
