"""Finds the tile sizes of `tuning` on the device at hand: times real calls, in a graph, over caches that no L2 can hold.

A candidate's figure is the geometric mean of its times over the cases, so that neither one long slot nor many short ones
rules alone.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pocketllm.kernels.triton import attend_hopper, attend_hopper_plain
from pocketllm.kernels.triton.attention import attend_with, pieces_of, prefill_with
from pocketllm.kernels.triton.tuning import AttendConfig, AttentionConfig, PrefillConfig, attention_config
from pocketllm.kernels.types import AttentionMask, LayerKV, PlaneSpec

PAGE = 256
AWAKE = 0.05  # seconds of replays before any is timed
COLD = 2 * 2**30  # bytes of distinct storage a timed graph walks through, far more than an L2
SPLITS = (256, 512, 1024)
# Of decode and verify, for their sums to be the same to the last bit:
SAME = ("split", "block_n", "warps", "first_split", "first_tokens")


@dataclass(frozen=True)
class Case:
    """One decode batch: slots of `context` tokens each, q_len queries a slot."""

    slots: int
    context: int
    q_len: int = 1


CASES = (Case(8, 32768), Case(1, 32768), Case(8, 4096))
VERIFY = Case(8, 32768, 4)
CHUNK = 4096  # tokens of a prefill


def random_layers(
    codec: Any, head_dim: int, kv_heads: int, slots: int, context: int, device: torch.device
) -> list[LayerKV]:
    """Caches of as many layers as COLD needs, pages in random order, filled with rows encoded from Gaussian K and V."""
    planes: tuple[PlaneSpec, ...] = codec.planes(head_dim)
    pages = slots * -(-context // PAGE)
    nbytes = pages * PAGE * kv_heads * sum(p.nbytes for p in planes)
    gaussian = torch.randn(2, 4 * PAGE, kv_heads, head_dim, device=device)
    rows = codec.encode(gaussian[0], gaussian[1])
    table = torch.full((slots + 1, pages // slots), pages, dtype=torch.int32, device=device)
    layers = []
    for _ in range(min(max(-(-COLD // nbytes), 3), 64)):
        storage = []
        for spec, data in zip(planes, rows, strict=True):
            plane = torch.empty(pages + 1, PAGE, kv_heads, spec.width, dtype=spec.dtype, device=device)
            for first in range(0, pages + 1, 4):
                count = min(4, pages + 1 - first)
                plane[first : first + count].view(torch.uint8).copy_(
                    data.to(spec.dtype).contiguous().view(torch.uint8)[: count * PAGE].unflatten(0, (count, PAGE))
                )
            storage.append(plane)
        order = torch.randperm(pages, device=device).int().view(slots, -1)
        layers.append(LayerKV(tuple(storage), torch.cat((order, table[-1:])), codec, head_dim))
    return layers


def time_graph(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Median microseconds of one of `calls`, run one after another in a CUDA graph, after AWAKE seconds of the same:
    a device that has paused is a tenth slower at first, and one under load gets slower at its power's limit."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # what calls read may still be on its way
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin = time.monotonic()
    while time.monotonic() - begin < AWAKE:
        graph.replay()
        torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[repeats // 2]


def attend_calls(
    config: AttentionConfig, layers: Sequence[LayerKV], case: Case, num_heads: int, dtype: torch.dtype
) -> list[Callable[[], Tensor]]:
    head_dim, device = layers[0].head_dim, layers[0].block_table.device
    q = torch.randn(case.slots, case.q_len, num_heads, head_dim, dtype=dtype, device=device)
    slots = torch.arange(case.slots, dtype=torch.int32, device=device)
    lens = torch.full((case.slots,), case.context, dtype=torch.int32, device=device)
    scale, mask = head_dim**-0.5, AttentionMask()
    return [partial(attend_with, config, kv, q, slots, lens, scale, mask) for kv in layers]


def attend_candidates(packed: bool) -> Iterable[AttendConfig]:
    """For formats that are unpacked, or not."""
    for split, (block_n, warps), stages in itertools.product(SPLITS, ((64, 4), (32, 2)), (2, 3, 4, 5)):
        for programs in (1, 2, 3) if warps == 4 else (2, 3, 4):
            for halves in {False, packed}:
                yield AttendConfig(split, block_n, programs, warps, stages, halves)


def prefill_candidates() -> Iterable[PrefillConfig]:
    for block_m, block_n, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        if block_m * 2 >= warps * 16:
            yield PrefillConfig(block_m, block_n, warps, stages)


def geometric_mean(times: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, times)) / len(times))


def tune_attend(
    layers: dict[Case, list[LayerKV]],
    num_heads: int,
    dtype: torch.dtype,
    candidates: Iterable[AttendConfig],
    note: Callable[[AttendConfig, list[float]], None],
) -> AttendConfig:
    """The candidate with the least mean time over the cases; `note` hears of each. Those that do not fit are passed over."""
    best: tuple[float, AttendConfig] | None = None
    for candidate in candidates:
        config = AttentionConfig(0, 0, candidate, candidate, PrefillConfig(128, 64, 8, 2))
        try:
            times = [time_graph(attend_calls(config, kv, case, num_heads, dtype), 3) for case, kv in layers.items()]
        except _too_large():
            continue
        note(candidate, times)
        if best is None or geometric_mean(times) < best[0]:
            best = geometric_mean(times), candidate
    if best is None:
        raise RuntimeError("no candidate fits this device")
    return best[1]


def tune_prefill(
    kv: LayerKV,
    q: Tensor,
    kv_len: int,
    candidates: Iterable[PrefillConfig],
    note: Callable[[PrefillConfig, float], None],
) -> PrefillConfig:
    """q [T, Hq, D]: the last T of kv_len tokens of slot 0."""
    device, scale = q.device, q.shape[-1] ** -0.5
    slots, lens = torch.zeros(1, dtype=torch.int32, device=device), torch.tensor([kv_len], device=device)
    bounds = torch.tensor([0, len(q)], dtype=torch.int32, device=device)
    best: tuple[float, PrefillConfig] | None = None
    for candidate in candidates:
        try:
            call = partial(prefill_with, candidate, kv, q, slots, bounds, lens, scale, AttentionMask())
            time = time_graph([call], 3)
        except _too_large():
            continue
        note(candidate, time)
        if best is None or time < best[0]:
            best = time, candidate
    if best is None:
        raise RuntimeError("no candidate fits this device")
    return best[1]


def _too_large() -> tuple[type[Exception], ...]:
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, PTXASError


def tune_format(
    codec: Any,
    head_dim: int,
    num_heads: int,
    kv_heads: int,
    device: torch.device,
    note: Callable[[AttendConfig | PrefillConfig, list[float]], None],
) -> AttentionConfig:
    """The best sizes for a KV format at a model's heads; `note` hears of each candidate and its microseconds."""
    cases = {case: random_layers(codec, head_dim, kv_heads, case.slots, case.context, device) for case in CASES}
    cases[VERIFY] = cases[CASES[0]]
    nbytes = codec.bytes_per_token(head_dim)
    now = attention_config(device, head_dim, nbytes).attend
    kv = cases[CASES[0]][0]
    sizes: Iterable[AttendConfig] = attend_candidates(nbytes < 4 * head_dim)
    on_hopper = any(k.fits(kv, pieces_of(kv), AttentionMask()) for k in (attend_hopper, attend_hopper_plain))
    if on_hopper:  # there, nothing but splits matters
        sizes = (replace(now, split=split) for split in SPLITS)
    candidates = (replace(size, first_split=now.first_split, first_tokens=now.first_tokens) for size in sizes)
    attend = tune_attend(cases, num_heads, torch.bfloat16, candidates, note)
    kv = cases[CASES[1]][0]
    kv_len = kv.block_table.shape[1] * kv.page_size
    q = torch.randn(min(CHUNK, kv_len), num_heads, head_dim, dtype=torch.bfloat16, device=device)
    prefill = tune_prefill(kv, q, kv_len, prefill_candidates(), lambda config, time: note(config, [time]))
    return AttentionConfig(head_dim, nbytes, attend, attend, prefill)


def write_table(folder: Path, device: str, entries_before: list[Any], found: Sequence[AttentionConfig]) -> Path:
    """The attention entries with what was found in the place of those for the same sizes, as the folder's file of that
    device. Nothing else stands in it: the rest of a table stays the package's, also of later versions."""
    entries = {(entry["head_dim"], entry["token_bytes"]): entry for entry in entries_before}
    entries |= {(config.head_dim, config.token_bytes): as_entry(config) for config in found}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json")
    path.write_text(json.dumps({"device": device, "attention": list(entries.values())}, indent=1) + "\n")
    return path


def as_entry(config: AttentionConfig) -> dict[str, Any]:
    """The JSON form that `tuning.parse` reads."""
    entry = asdict(config)
    entry["verify"] = {k: v for k, v in entry["verify"].items() if k not in SAME}
    return entry
