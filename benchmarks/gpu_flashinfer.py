"""Times FlashInfer's decode and verify over pages, on the shapes of `gpu_attention.py` and by the same clock.

    pip install flashinfer-python; python benchmarks/gpu_flashinfer.py [--page 16] [--backend fa2] [--out FILE]

K and V in bfloat16, pages in random order. It compiles its kernels at the first call (a minute). Its own decode kernel does
not take 6 queries to a KV head, so decode, too, is by the one with tensor cores; fa2 splits a slot's tokens among programs
(fa3 does not, and takes milliseconds).
"""

from __future__ import annotations

import argparse
import datetime
import json
from functools import partial
from pathlib import Path
from typing import Any

import flashinfer
import torch
from torch import Tensor

from gpu_attention import DEVICE, HEAD_DIM, HEADS, KV_HEADS, row
from pocketllm.kernels.triton.tune import time_graph

CASES = [
    (8, 32768, 1),
    (1, 32768, 1),
    (8, 4096, 1),
    (1, 1024, 1),
    (32, 1024, 1),
    (8, 32768, 4),
]  # slots, context, q_len
ROOM = 512 << 20  # bytes of workspace


def planned(slots: int, context: int, q_len: int, page: int, backend: str) -> Any:
    pages = context // page
    indptr = torch.arange(slots + 1, dtype=torch.int32, device=DEVICE) * pages
    indices = torch.randperm(slots * pages, device=DEVICE).int()
    last = torch.full((slots,), page, dtype=torch.int32, device=DEVICE)
    room = torch.zeros(ROOM, dtype=torch.uint8, device=DEVICE)
    shape, dtype = (HEADS, KV_HEADS, HEAD_DIM, page), torch.bfloat16
    if q_len == 1:
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=True, backend=backend)
        decode.plan(indptr, indices, last, *shape, q_data_type=dtype, kv_data_type=dtype)
        return decode
    verify = flashinfer.BatchPrefillWithPagedKVCacheWrapper(room, "NHD", backend=backend)
    queries = torch.arange(slots + 1, dtype=torch.int32, device=DEVICE) * q_len
    verify.plan(queries, indptr, indices, last, *shape, causal=True, q_data_type=dtype)
    return verify


def caches(slots: int, context: int, page: int) -> list[Tensor]:
    """[pages, 2, page, KV_HEADS, HEAD_DIM], as many as the L2 can't hold."""
    nbytes = slots * context * KV_HEADS * HEAD_DIM * 4
    shape = (slots * context // page, 2, page, KV_HEADS, HEAD_DIM)
    count = min(max(2, 2**30 // nbytes + 1), 32)
    return [torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--backend", default="fa2", choices=("fa2", "fa3"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "h200-flashinfer.json")
    args = parser.parse_args()
    name, rows = f"FlashInfer {flashinfer.__version__} {args.backend}", []
    for slots, context, q_len in CASES:
        run = planned(slots, context, q_len, args.page, args.backend)
        q = torch.randn(slots * q_len, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
        calls = [partial(run.run, q, cache) for cache in caches(slots, context, args.page)]
        calls[0]()
        torch.cuda.synchronize()
        rows.append(row(f"attend, {name}", slots, context, "bf16", q_len, time_graph(calls, 5), None))
    facts = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "card": torch.cuda.get_device_name(DEVICE),
        "torch": torch.__version__,
        "shape": f"{HEADS}/{KV_HEADS} heads x {HEAD_DIM}, pages of {args.page} tokens, per layer",
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in facts.items()]
    listed = ",\n".join(f"  {json.dumps(entry)}" for entry in rows)
    args.out.write_text("\n".join(["{", *lines, ' "rows": [', listed, " ]", "}", ""]))


if __name__ == "__main__":
    main()
