"""Times `bridge`, all that lies between two mixers, at the shapes of Qwen3.5-27B on one GPU.

    python benchmarks/gpu_bridge.py [--rows 1 8 32 64] [--json FILE]

64 layers of distinct weights in one CUDA graph, each bridge's result feeding the next one's residual but not its x, which
mixers make. `floor` is the time in which a device-to-device copy would move the weights. `steps` is the same layers step by
step: products, sums with norms, and silu * up, as in passes that no bridge takes.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gpu_attention import copy_bandwidth
from gpu_linear import DEVICE, LAYERS, random_layers, random_weight
from pocketllm.kernels import triton as kernels
from pocketllm.kernels.triton.pairs import to_pairs
from pocketllm.kernels.triton.tune import time_graph
from pocketllm.kernels.types import Activations, Bridge

HIDDEN, WIDTH = 5120, 6144


def bridges() -> list[Bridge]:
    """Of every layer but the last, which leads to no mixer."""
    layers, gain = random_layers(), torch.ones(HIDDEN, device=DEVICE)
    small = kernels.pack_weight(random_weight("bf16", 96, HIDDEN))
    made = []
    for layer, following in itertools.pairwise(layers):
        into = (following["gdn_in"], small) if "gdn_in" in following else (following["attn_in"],)
        made.append(Bridge(layer["out"], gain, layer["gate_up"], layer["down"], gain, into, 1e-6))
    return made


def by_steps(weights: Bridge, x: Tensor, residual: Tensor) -> list[Tensor]:
    h = kernels.add_rms_norm(kernels.linear_summands(x, weights.out), residual, weights.norm, weights.eps)
    h = kernels.gated_linear(h, weights.gate_up, [weights.down])
    down = kernels.linear_summands(h, weights.down)
    assert weights.next_norm is not None
    h = kernels.add_rms_norm(down, residual, weights.next_norm, weights.eps)
    return [kernels.linear(h, weight) for weight in weights.next_in]


def chain(layers: list[Bridge], x: Activations, residual: Tensor, steps: Callable[..., list[Tensor]] | None) -> None:
    for weights in layers:
        if steps is None:
            cross = kernels.bridge(weights, len(residual), residual.dtype)
            assert cross is not None, "this device's table says no bridge"
            cross(x, residual)
        else:
            steps(weights, x, residual)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    layers = bridges()
    nbytes = sum(w.nbytes for b in layers for w in (b.out, b.gate_up, b.down, *b.next_in))
    floor, rows = nbytes / bandwidth * 1e3, []
    card = torch.cuda.get_device_name(DEVICE)
    print(f"{card}, copy {bandwidth / 1e12:.2f} TB/s, {LAYERS - 1} bridges, floor {floor:.2f} ms", flush=True)
    for m in options.rows:
        x, residual = (torch.randn(m, k, device=DEVICE).bfloat16() for k in (WIDTH, HIDDEN))
        pairs = to_pairs(x)
        whole = time_graph([partial(chain, layers, pairs, residual, None)], 5) / 1e3
        steps = time_graph([partial(chain, layers, x, residual, by_steps)], 5) / 1e3
        row = {"rows": m, "ms": round(whole, 3), "floor_ms": round(floor, 3), "steps_ms": round(steps, 3)}
        rows.append(row | {"share": round(floor / whole, 3)})
        print(" ".join(f"{k}={v}" for k, v in rows[-1].items()), flush=True)
    if options.json is not None:
        facts = {"date": datetime.date.today().isoformat(), "card": card, "copy_tb_per_s": round(bandwidth / 1e12, 3)}
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
