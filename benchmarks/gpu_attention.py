"""Times attention on one GPU at the shapes of Qwen3.5-27B, and writes rows to results/h200-attention.json.

    python benchmarks/gpu_attention.py [--formats NAME ...] [--out FILE]

Every figure is the median over replays of a CUDA graph that walks through layers of distinct storage, so neither launches
nor the L2 flatter it. `share` is the bandwidth of the bytes the format needs over that of a device-to-device copy.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from pocketllm.cache.formats import KV_FORMATS
from pocketllm.kernels import triton as kernels
from pocketllm.kernels.triton.tune import CASES, Case, attend_calls, random_layers, time_graph
from pocketllm.kernels.triton.tuning import AttentionConfig, attention_config
from pocketllm.kernels.types import AttentionMask

HEADS, KV_HEADS, HEAD_DIM = 24, 4, 256
FORMATS = ("fp16", "bf16", "fp8", "int8_per_token_head", "turboquant_k8v4")
DEVICE = torch.device("cuda", 0)
NEW, CACHED = 8192, 32768  # prefill: tokens of the chunk, tokens before it


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large device-to-device copy: the best of five."""
    a = torch.randint(0, 255, (4 * 2**30,), dtype=torch.uint8, device=DEVICE)
    b, best = torch.empty_like(a), float("inf")
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return 2 * a.nbytes / (best * 1e-3)


def sdpa_prefill() -> dict[str, float]:
    """Microseconds of torch's attention on the same shape in 16 bits, by backend."""
    q = torch.randn(1, HEADS, NEW, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
    k, v = torch.randn(2, 1, KV_HEADS, CACHED + NEW, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
    from torch.nn.attention.bias import causal_lower_right

    times = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        for label, bias in (("", causal_lower_right(NEW, CACHED + NEW)), (" without its mask", None)):
            try:
                with sdpa_kernel(backend):
                    call = partial(F.scaled_dot_product_attention, q, k, v, attn_mask=bias, enable_gqa=True)
                    call()
                    times[backend.name + label] = time_graph([call], 3)
            except RuntimeError as error:
                print("no", backend.name, label, str(error).splitlines()[0][:90])
    return times


def rows_of(name: str, bandwidth: float, config: AttentionConfig, layers: dict[Case, Any]) -> list[dict[str, Any]]:
    codec, rows = KV_FORMATS[name], []
    for case in (*CASES, Case(8, 32768, 2), Case(8, 32768, 4)):
        kv = layers[Case(case.slots, case.context)]
        us = time_graph(attend_calls(config, kv, case, HEADS, torch.bfloat16))
        nbytes = case.slots * case.context * KV_HEADS * codec.bytes_per_token(HEAD_DIM)
        op = "attend" if case.q_len == 1 else "verify"
        rows.append(row(op, case.slots, case.context, name, case.q_len, us, nbytes / (us * 1e-6) / bandwidth))
    kv = layers[CASES[0]]
    k, v = torch.randn(2, 8, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
    slots, positions = torch.arange(8, device=DEVICE).int(), torch.full((8,), 30000, device=DEVICE)
    us = time_graph([lambda x=x: kernels.append(x, k, v, slots, positions) for x in kv] * 8)
    rows.append(row("append", 8, 30000, name, 1, us, None))
    return rows


def prefill_row(name: str, layers: dict[Case, Any], new: int) -> dict[str, Any]:
    kv = layers[CASES[0]][0]
    first = kv.block_table.flatten()[: (CACHED + NEW) // 256]  # one long slot of the pages there are
    kv = type(kv)(
        kv.planes, torch.stack((first, torch.full_like(first, kv.planes[0].shape[0] - 1))), kv.codec, HEAD_DIM
    )
    q = torch.randn(new, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
    slots, lens = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.tensor([CACHED + new], device=DEVICE)
    bounds = torch.tensor([0, new], dtype=torch.int32, device=DEVICE)
    us = time_graph([lambda: kernels.prefill(kv, q, slots, bounds, lens, HEAD_DIM**-0.5, AttentionMask())], 3)
    return row("prefill", 1, CACHED, name, new, us, None)


def row(op: str, slots: int, context: int, kv: str, q_len: int, us: float, share: float | None) -> dict[str, Any]:
    entry = {"op": op, "slots": slots, "context": context, "kv": kv, "q_len": q_len, "us": round(us, 2)}
    entry["share"] = None if share is None else round(share, 3)
    print(entry, flush=True)
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "h200-attention.json")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.3f} TB/s", flush=True)
    rows: list[dict[str, Any]] = []
    for backend, us in sdpa_prefill().items():
        rows.append(row(f"prefill, torch {backend}", 1, CACHED, "bf16", NEW, us, None))
    for name in options.formats:
        codec = KV_FORMATS[name]
        layers = {c: random_layers(codec, HEAD_DIM, KV_HEADS, c.slots, c.context, DEVICE) for c in CASES}
        config = attention_config(DEVICE, HEAD_DIM, codec.bytes_per_token(HEAD_DIM))
        rows += rows_of(name, bandwidth, config, layers)
        rows += [prefill_row(name, layers, NEW), prefill_row(name, layers, 512)]
        del layers
        torch.cuda.empty_cache()
    report = {
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name(DEVICE),
        "copy_tb_per_s": round(bandwidth / 1e12, 3),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "shape": f"{HEADS}/{KV_HEADS} heads x {HEAD_DIM}, per layer",
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(k)}: {json.dumps(v)}," for k, v in report.items()]
    listed = ",\n".join(f"  {json.dumps(r)}" for r in rows)
    options.out.write_text("\n".join(["{", *lines, ' "rows": [', listed, " ]", "}", ""]))


if __name__ == "__main__":
    start = time.time()
    main()
    print(f"{time.time() - start:.0f} s")
