"""Times attention on one GPU at the shapes of Qwen3.8-27B, and decode and verify at those of Qwen3-8B, too (rows that say
`heads`). Writes rows to results/h200-attention.json.

    python benchmarks/gpu_attention.py [--formats NAME ...] [--out FILE]
    python benchmarks/gpu_attention.py --variants [--seconds N] [--workers N] [--formats NAME ...]

Every figure is the median over replays of a CUDA graph that walks through layers of distinct storage, so neither launches
nor the L2 flatter it. `share` is the bandwidth of the bytes the format needs over that of a device-to-device copy. Printed
before a format's rows: the error against the reference, and whether verified rows are decoded rows and rows alone those of a
batch, bit for bit. Kernels are compiled ahead by worker processes.

--variants compares tile sizes of decode and verify instead, one line each, the most promising of every format first: the
same checks, microseconds of decode (8 x 32,768, 1 x 32,768, 8 x 4,096, and the first with queries already rotated) and of
verifying 4 tokens a slot at 8 x 32,768, and the quotient of that and the first. A variant that fails says so and is passed
over; none begins after --seconds. (Where `attend_hopper` takes a format, variants differ in their splits only.)
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from pocketllm.cache.formats import KV_FORMATS
from pocketllm.engine.device import set_cache_aside
from pocketllm.kernels import reference
from pocketllm.kernels import triton as kernels
from pocketllm.kernels.triton.attention import LONG, attend_with, prefill_with
from pocketllm.kernels.triton.tune import CASES, PAGE, Case, attend_calls, random_layers, time_graph
from pocketllm.kernels.triton.tuning import AttendConfig, AttentionConfig, PrefillConfig, attention_config
from pocketllm.kernels.types import AttentionMask, LayerKV, PrefillPart

HEADS, KV_HEADS, HEAD_DIM = 24, 4, 256
OTHER = (32, 8, 128)  # as those three, of a smaller dense model
FORMATS = ("fp16", "bf16", "fp8", "int8_per_token_head", "turboquant_k8v4")
DEVICE = torch.device("cuda", 0)
NEW_TOKENS = (1, 2, 4)  # of a slot: decode, verify
SHORT = Case(1, 1024)  # of which next to nothing is reading
MANY = Case(32, 1024)
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


def library_decode() -> list[dict[str, Any]]:
    """Torch's FlashAttention-2 and cuDNN, on contiguous K and V in 16 bits: what decode takes without pages or formats."""
    rows = []
    for case in (*CASES, SHORT, MANY):
        sets = max(2, 2**30 // (case.slots * case.context * KV_HEADS * HEAD_DIM * 4) + 1)  # more than the L2 holds
        q = torch.randn(case.slots, HEADS, 1, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
        shape = (min(sets, 32), 2, case.slots, KV_HEADS, case.context, HEAD_DIM)
        tensors = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    calls = [partial(F.scaled_dot_product_attention, q, *kv, enable_gqa=True) for kv in tensors]
                    calls[0]()
                    us = time_graph(calls, 3)
            except RuntimeError as error:
                print("no", backend.name, str(error).splitlines()[0][:90])
                continue
            rows.append(row(f"attend, torch {backend.name}", case.slots, case.context, "bf16", 1, us, None))
    return rows


def decode_rows(
    name: str, bandwidth: float, config: AttentionConfig, layers: list[LayerKV], num_heads: int, **more: Any
) -> list[dict[str, Any]]:
    rows = []
    nbytes_of_token = sum(plane[0, 0].nbytes for plane in layers[0].planes)
    for case in (*CASES, SHORT, MANY, *(replace(CASES[0], q_len=q_len) for q_len in NEW_TOKENS[1:])):
        us = time_graph(attend_calls(config, views(layers, case), case, num_heads, torch.bfloat16))
        nbytes = case.slots * case.context * nbytes_of_token
        op = "attend" if case.q_len == 1 else "verify"
        rows.append(row(op, case.slots, case.context, name, case.q_len, us, nbytes / (us * 1e-6) / bandwidth, **more))
    return rows


def other_rows(name: str, bandwidth: float) -> list[dict[str, Any]]:
    num_heads, kv_heads, head_dim = OTHER
    codec = KV_FORMATS[name]
    layers = random_layers(codec, head_dim, kv_heads, CASES[0].slots, CASES[0].context, DEVICE)
    config = attention_config(DEVICE, head_dim, codec.bytes_per_token(head_dim))
    return decode_rows(name, bandwidth, config, layers, num_heads, heads=f"{num_heads}/{kv_heads} x {head_dim}")


def append_row(name: str, layers: list[LayerKV]) -> dict[str, Any]:
    k, v = torch.randn(2, 8, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
    slots, positions = torch.arange(8, device=DEVICE).int(), torch.full((8,), 30000, device=DEVICE)
    us = time_graph([partial(kernels.append, x, k, v, slots, positions) for x in layers] * 8)
    return row("append", 8, 30000, name, 1, us, None)


def prefill_rows(name: str, layers: list[LayerKV]) -> list[dict[str, Any]]:
    """One chunk of one long slot: by our kernel, and, where the engine would, by the library over decoded K and V."""
    kv, rows = layers[0], []
    first = kv.block_table.flatten()[: (CACHED + NEW) // PAGE]
    kv = replace(kv, block_table=torch.stack((first, torch.full_like(first, kv.planes[0].shape[0] - 1))))
    for new in (NEW, 512):
        q = torch.randn(new, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
        slots, lens = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.tensor([CACHED + new], device=DEVICE)
        bounds = torch.tensor([0, new], dtype=torch.int32, device=DEVICE)
        ours = partial(kernels.prefill, kv, q, slots, bounds, lens, HEAD_DIM**-0.5, AttentionMask())
        rows.append(row("prefill", 1, CACHED, name, new, time_graph([ours], 3), None))
        if new >= LONG:
            library = partial(ours, [PrefillPart(0, new, CACHED + new)])
            error = ((library().float() - ours().float()).norm() / ours().float().norm()).item()
            print(f"{name} library against our kernel: {error:.1e}")
            rows.append(row("prefill, library", 1, CACHED, name, new, time_graph([library], 3), None))
    return rows


# -- variants of decode and verify ---------------------------------------------------------------------------------------

RAGGED = (1, 64, 3001, 65, 130, 4096, 777, 513)  # lengths for the checks
VERIFIED = 4  # tokens


Variant = tuple[AttendConfig, AttendConfig]  # of decode and of verify


def variants(name: str) -> list[Variant]:
    """Sizes worth a try, the most promising first."""
    firsts = {"first_split": 128, "first_tokens": 2048}
    if name in ("fp16", "bf16"):
        two = AttendConfig(512, 64, 2, 4, 2)
        small, first = AttendConfig(512, 32, 2, 2, 3), replace(two, **firsts)
        return [(two, two), (first, first), (replace(two, split=256), replace(two, split=256)), (small, small)]
    two = AttendConfig(512, 64, 2, 4, 3)
    halves, small = replace(two, halves=True), AttendConfig(512, 32, 4, 2, 3)
    return [
        (two, two),
        (replace(two, **firsts), replace(two, **firsts)),
        (two, halves),
        (halves, replace(halves, stages=2)),
        (replace(two, split=1024), replace(halves, split=1024)),
        (small, replace(small, programs=3)),
        (replace(two, split=256), replace(halves, split=256)),
    ]


def short(config: AttendConfig) -> str:
    sizes = f"n{config.block_n} w{config.warps} s{config.stages} p{config.programs}"
    first = f" first {config.first_split} to {config.first_tokens}" if config.first_tokens else ""
    return sizes + (" halves" if config.halves else "") + first


def config_of(variant: Variant) -> AttentionConfig:
    return AttentionConfig(HEAD_DIM, 0, *variant, PrefillConfig(64, 32, 4, 2))


def views(layers: list[LayerKV], case: Case) -> list[LayerKV]:
    """The same storage as layers of the case: each slot's pages cut into slots of the case's context."""
    found, pages = [], case.context // PAGE
    for kv in layers:
        rows = kv.block_table[:-1].reshape(-1, pages)
        for first in range(0, len(rows) - case.slots + 1, case.slots):
            table = torch.cat((rows[first : first + case.slots], kv.block_table[-1:, :pages]))
            found.append(replace(kv, block_table=table))
    return found


class Checks:
    """Ragged decode and verify of one format, of which the reference is asked once."""

    def __init__(self, kv: LayerKV) -> None:
        self.kv, count = kv, len(RAGGED)
        self.slots = torch.arange(count, device=DEVICE).int()
        self.lens = torch.tensor(RAGGED, device=DEVICE).int().clamp_min(VERIFIED)
        self.q = torch.randn(count, VERIFIED, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
        self.rest = (HEAD_DIM**-0.5, AttentionMask())
        self.wanted = reference.attend(kv, self.q.float(), self.slots, self.lens, *self.rest)

    def report(self, config: AttentionConfig) -> str:
        """Relative error against the reference; and whether bits are as promised."""
        verified = attend_with(config, self.kv, self.q, self.slots, self.lens, *self.rest)
        error, same = ((verified.float() - self.wanted).norm() / self.wanted.norm()).item(), True
        for j in range(VERIFIED):
            past, q = self.lens - VERIFIED + 1 + j, self.q[:, j : j + 1]
            decoded = attend_with(config, self.kv, q, self.slots, past, *self.rest)
            alone = attend_with(config, self.kv, q[2:3], self.slots[2:3], past[2:3], *self.rest)
            same &= torch.equal(decoded, verified[:, j : j + 1]) and torch.equal(alone, decoded[2:3])
        return f"err {error:.1e} bits {'same' if same else 'DIFFER'}"


def compile_in_worker(name: str, config: AttentionConfig, new_tokens: tuple[int, ...]) -> None:
    """Every kernel of a format with these sizes, run over slots without a token."""
    none = torch.zeros(MANY.slots, dtype=torch.int32, device=DEVICE)
    for heads, kv_heads, head_dim in (OTHER, (HEADS, KV_HEADS, HEAD_DIM)):
        codec, rest = KV_FORMATS[name], (head_dim**-0.5, AttentionMask())
        sizes = config if head_dim == HEAD_DIM else attention_config(DEVICE, head_dim, codec.bytes_per_token(head_dim))
        planes = tuple(
            torch.zeros(1, PAGE, kv_heads, p.width, dtype=p.dtype, device=DEVICE) for p in codec.planes(head_dim)
        )
        for case in {*CASES, SHORT, MANY}:
            table = torch.zeros(case.slots + 1, case.context // PAGE, dtype=torch.int32, device=DEVICE)
            kv, slots = LayerKV(planes, table, codec, head_dim), none[: case.slots]
            for q_len in new_tokens:
                q = torch.zeros(case.slots, q_len, heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
                attend_with(sizes, kv, q, slots, slots, *rest)
    k = torch.zeros(8, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
    kernels.append(kv, k, k, none[:8], none[:8].long())
    q = torch.zeros(8, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
    prefill_with(config.prefill, kv, q, none[:1], none[:2], none[:1].long(), *rest)
    torch.cuda.synchronize()


def compile_all(
    wanted: list[tuple[str, AttentionConfig]], new_tokens: tuple[int, ...], workers: int, seconds: float
) -> None:
    """By worker processes, which fill Triton's cache on disk."""
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    asked = {pool.submit(compile_in_worker, name, config, new_tokens): (name, config) for name, config in wanted}
    done = wait(asked, timeout=seconds).done
    for future in done:
        if failure := future.exception():  # compiled where it is used, or fails there again
            print("not compiled:", asked[future][0], short(asked[future][1].attend), str(failure)[:150], flush=True)
    print(f"{len(done)} of {len(asked)} compiled ahead", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)


def compare_variants(names: list[str], seconds: float, workers: int) -> None:
    began = time.time()
    each = {name: variants(name) for name in names}
    turns = [
        (name, each[name][i]) for i in range(max(map(len, each.values()))) for name in names if i < len(each[name])
    ]
    if workers:
        compile_all([(name, config_of(variant)) for name, variant in turns], (1, VERIFIED), workers, seconds * 0.4)
    layers = {name: random_layers(KV_FORMATS[name], HEAD_DIM, KV_HEADS, 8, 32768, DEVICE) for name in names}
    checks: dict[str, Checks] = {}
    print(
        f"({time.time() - began:.0f} s) split, sizes of decode / of verify | decode 8x32768, 1x32768, 8x4096", end=" "
    )
    print("| verify 4 tokens at 8x32768 | its share of decode")
    for name, variant in turns:
        if time.time() - began > seconds:
            print("out of time at", name, short(variant[0]))
            return
        line = f"{name[:6]:6} {variant[0].split:4} {short(variant[0])} / {short(variant[1])}"
        try:
            config, kv = config_of(variant), {case: views(layers[name], case) for case in CASES}
            if name not in checks:
                checks[name] = Checks(kv[CASES[2]][0])
            line = f"{line:80} {checks[name].report(config)}"
            times = [time_graph(attend_calls(config, kv[case], case, HEADS, torch.bfloat16), 5) for case in CASES]
            line += " us " + " ".join(f"{us:6.1f}" for us in times)
            verify = Case(CASES[0].slots, CASES[0].context, VERIFIED)
            us = time_graph(attend_calls(config, kv[CASES[0]], verify, HEADS, torch.bfloat16), 5)
            line += f" | {us:6.1f} | {us / times[0]:.2f}"
        except Exception as failure:  # does not fit, or does not compile
            line += f" FAILED {type(failure).__name__}: {str(failure)[:120]!r}"
        print(f"{line}  ({time.time() - began:.0f} s)", flush=True)


def row(
    op: str, slots: int, context: int, kv: str, q_len: int, us: float, share: float | None, **more: Any
) -> dict[str, Any]:
    entry = {"op": op, "slots": slots, "context": context, "kv": kv, "q_len": q_len, "us": round(us, 2)}
    entry |= {"share": None if share is None else round(share, 3), **more}
    print(entry, flush=True)
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "h200-attention.json")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--seconds", type=float, default=70)
    parser.add_argument("--workers", type=int, default=14, help="processes that compile ahead (default: 14)")
    options = parser.parse_args()
    set_cache_aside(DEVICE)  # as an engine does
    if options.variants:
        names = [name for name in reversed(options.formats) if name != "bf16"]
        compare_variants(names, options.seconds, options.workers)
        return
    began = time.time()
    configs = {n: attention_config(DEVICE, HEAD_DIM, KV_FORMATS[n].bytes_per_token(HEAD_DIM)) for n in options.formats}
    if options.workers:
        compile_all(list(configs.items()), NEW_TOKENS, options.workers, options.seconds * 0.5)
    bandwidth = copy_bandwidth()
    print(f"({time.time() - began:.0f} s) copy {bandwidth / 1e12:.3f} TB/s", flush=True)
    rows: list[dict[str, Any]] = []
    for name, config in configs.items():
        layers = random_layers(KV_FORMATS[name], HEAD_DIM, KV_HEADS, CASES[0].slots, CASES[0].context, DEVICE)
        checked = Checks(views(layers, CASES[2])[0]).report(config)
        print(f"({time.time() - began:.0f} s) {name}: {checked}", flush=True)
        rows += decode_rows(name, bandwidth, config, layers, HEADS)
        rows += [append_row(name, layers), *prefill_rows(name, layers)]
        del layers
        rows += other_rows(name, bandwidth)
        torch.cuda.empty_cache()
    for backend, us in sdpa_prefill().items():
        rows.append(row(f"prefill, torch {backend}", 1, CACHED, "bf16", NEW, us, None))
    rows += library_decode()
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
