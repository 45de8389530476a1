"""What a sum over the ranks costs: each way there is to add [M, K] tensors of several GPUs, in CUDA graphs.

    python benchmarks/gpu_all_reduce.py [--ranks 2] [--width 5120] [--out FILE]

Each graph holds 64 times what stands between two products of a layer: the sum, the residual, the RMS norm. Ways:

    alone        no other rank: what the norm takes by itself
    nccl         the library's all-reduce before it
    symmetric    torch's one-shot all-reduce over symmetric memory before it (no multicast)
    in kernel    the norm's kernel reads the other ranks' memory (`kernels.triton.summands`)

One line of JSON a case; `off_by`: the largest difference of the residual to the library's, of a sum of bf16 numbers.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pocketllm.engine.collectives import ProcessGroupRanks, file_store
from pocketllm.kernels.triton import add_rms_norm
from pocketllm.parallel import Summands

COUNT = 64
ROWS = (1, 8, 32, 64)


def time_graph(run: Callable[[], None], sync: Callable[[], None], repeats: int = 20) -> float:
    """Median microseconds of a run in a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    times = []
    for i in range(repeats + 3):
        sync()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


class Case:
    """Sums of `rows` rows on this rank."""

    def __init__(self, tp: ProcessGroupRanks, rows: int, width: int, device: torch.device) -> None:
        assert tp.places is not None
        self.tp, self.rows, self.name = tp, rows, tp.places.name
        self.x = torch.randn(rows, width, device=device).bfloat16()
        self.weight = torch.ones(width, device=device)
        self.residual = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
        places = [tp.place(i, rows) for i in range(2)]
        assert places[0] is not None
        assert places[1] is not None
        self.places = [(p, p.memory[: self.x.nbytes].view(torch.bfloat16).view(self.x.shape)) for p in places]

    def norm(self, x: Summands) -> Tensor:
        return add_rms_norm(x, self.residual, self.weight, 1e-6)

    def alone(self) -> None:
        for _ in range(COUNT):
            self.norm(Summands.of(self.x))

    def nccl(self) -> None:
        for _ in range(COUNT):
            y = self.norm(Summands.of(self.x))
            self.tp.sum_(y)

    def symmetric(self) -> None:
        for i in range(COUNT):
            _, memory = self.places[i % 2]
            self.norm(Summands.of(torch.ops.symm_mem.one_shot_all_reduce(memory, "sum", self.name)))

    def in_kernel(self) -> None:
        for i in range(COUNT):
            place, memory = self.places[i % 2]
            self.norm(Summands(memory[None], place))

    def off_by(self) -> float:
        wanted = self.x.clone()
        self.tp.sum_(wanted)
        place, memory = self.places[0]
        memory.copy_(self.x)
        self.residual.zero_()
        self.norm(Summands(memory[None], place))
        return float((self.residual.float() - wanted.float()).abs().max())


def work(rank: int, size: int, store: str, width: int) -> list[dict[str, Any]]:
    faulthandler.dump_traceback_later(90, exit=True)  # a kernel that waits for another rank may wait for ever
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    tp = ProcessGroupRanks.connect(rank, size, file_store(store, size), device)
    tp.open_places(width)
    token = torch.zeros(1, 1, device=device)

    def sync() -> None:
        tp.all_reduce(token)
        torch.cuda.synchronize()

    found: list[dict[str, Any]] = []
    for rows in ROWS:
        case = Case(tp, rows, width, device)
        sync()
        off_by = case.off_by()
        ways = {"alone": case.alone, "nccl": case.nccl, "symmetric": case.symmetric, "in kernel": case.in_kernel}
        for way, run in ways.items():
            try:
                us = time_graph(run, sync) / COUNT
            except Exception:
                traceback.print_exc()
                continue
            found.append({"rows": rows, "way": way, "us": round(us, 2), "off_by": off_by})
            if rank == 0:
                print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rank = int(os.environ.get("POCKETLLM_BENCHMARK_RANK", "0"))
    if rank:
        work(rank, args.ranks, os.environ["POCKETLLM_BENCHMARK_STORE"], args.width)
        os._exit(0)
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        others = [
            subprocess.Popen(
                [sys.executable, *sys.argv],
                env=os.environ | {"POCKETLLM_BENCHMARK_RANK": str(other), "POCKETLLM_BENCHMARK_STORE": store},
            )
            for other in range(1, args.ranks)
        ]
        try:
            found = work(0, args.ranks, store, args.width)
        finally:
            for other in others:
                try:
                    other.wait(10)
                except subprocess.TimeoutExpired:
                    other.kill()
    if args.out is not None:
        facts = {"device": torch.cuda.get_device_name(0), "ranks": args.ranks, "width": args.width, "rows": found}
        args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
