"""Compiles products of few rows ahead in worker processes, for benchmarks that try many sizes."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from gpu_linear import DEVICE, inputs
from pocketllm.kernels.triton.linear import few_rows_with
from pocketllm.kernels.triton.linear_tuning import LinearTable, ProductConfig
from pocketllm.kernels.types import LinearWeight
from pocketllm.weights.formats import FORMATS

Case = tuple[str, int, int, bool]  # format, N, K, gated


@cache
def _hollow(case: Case) -> LinearWeight:
    """A weight of which only the shape matters."""
    fmt, n, k, _ = case
    planes = tuple(torch.empty(s.shape, dtype=s.dtype, device=DEVICE) for s in FORMATS[fmt].specs(n, k))
    return LinearWeight(FORMATS[fmt], (n, k), planes)


def compile_in_worker(config: ProductConfig, table: LinearTable, case: Case, rows: int) -> None:
    few_rows_with(config, table, inputs(rows, case[2]), _hollow(case), case[3])


class Compiler:
    """Worker processes that fill Triton's cache on disk."""

    def __init__(self, workers: int) -> None:
        self.pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) if workers else None
        self.asked: dict[tuple[Any, ...], Future[None]] = {}

    def ask(self, config: ProductConfig, table: LinearTable, case: Case, rows: int) -> None:
        """Once for all that make the same kernel."""
        fmt, _, _, gated = case
        whole = config.splits == 1
        sized = config.for_rows(rows // 8, 2 if gated and whole else 1, 8, 2)
        key = replace(sized, splits=1, more=()), whole, whole and gated, rows, fmt, table.early
        if self.pool is not None and key not in self.asked:
            self.asked[key] = self.pool.submit(compile_in_worker, config, table, case, rows)

    def wait(self, seconds: float) -> None:
        end, failed = time.perf_counter() + seconds, 0
        for key, future in self.asked.items():
            try:
                future.result(max(end - time.perf_counter(), 0.01))
            except Exception as failure:  # its kernel is compiled where it is used, or fails there again
                failed += 1
                if failed <= 5:
                    print(f"not compiled: {key[0]} {type(failure).__name__} {str(failure)[:120]}", flush=True)
        print(f"-- {len(self.asked)} kernels asked for, {failed} failed", flush=True)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
