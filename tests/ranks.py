"""Ranks as threads of this process: the whole protocol of tensor parallelism without its processes.

Each thread runs `worker.serve` on one end of a pipe, as a worker process does on a socket; collectives meet at a barrier.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import Any

import torch
from torch import Tensor

from pocketllm.engine.worker import STOP, Job, error_of, serve
from pocketllm.errors import RankError
from pocketllm.models.registry import Checkpoint
from pocketllm.options import EngineOptions
from pocketllm.parallel import TensorParallel, sum_in_rank_order


class Meeting:
    """Where the threads of one engine exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=120)
        self._parts: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self._parts[rank] = x.clone()
        self.barrier.wait()
        parts = [part for part in self._parts if part is not None]
        self.barrier.wait()
        return parts


@dataclass(frozen=True, eq=False)
class ThreadRank(TensorParallel):
    meeting: Meeting = field(kw_only=True)

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum_in_rank_order(self.meeting.exchange(self.rank, x))

    def broadcast(self, x: Tensor) -> Tensor:
        return self.meeting.exchange(self.rank, x)[0].clone()

    def gather(self, x: Tensor) -> Tensor:
        parts = self.meeting.exchange(self.rank, x)
        return torch.cat(parts, dim=-1) if self.rank == 0 else x


class ThreadRanks:
    """An `engine.lead.Ranks`; also a `Launch` when called as a class. `sent`: every message to the ranks."""

    def __init__(self, checkpoint: Checkpoint, options: EngineOptions, device: torch.device) -> None:
        self._size = size = options.tensor_parallel
        self._meeting = Meeting(size)
        self.failure: RankError | None = None
        self.sent: list[Any] = []
        self._channels, self._threads = [], []
        for rank in range(1, size):
            ours, theirs = Pipe()
            thread = threading.Thread(target=self._serve, args=(theirs,), daemon=True)
            thread.start()
            ours.send_bytes(Job.of(checkpoint, options, rank).encode())
            self._channels.append(ours)
            self._threads.append(thread)

    def _serve(self, channel: Any) -> None:
        def connect(rank: int, size: int, device: torch.device) -> TensorParallel:
            return ThreadRank(rank, size, meeting=self._meeting)

        with contextlib.suppress(Exception):  # reported through the channel
            serve(channel, connect)
        self._meeting.barrier.abort()

    def meet(self, budget: int | None) -> int | None:
        budgets = [budget, *(answer["budget"] for answer in self._receive())]
        return min((b for b in budgets if b is not None), default=None)

    def build(self, budget: int | None) -> TensorParallel:
        self.send(json.dumps({"budget": budget}).encode())
        return ThreadRank(0, self._size, meeting=self._meeting)

    def wait_ready(self) -> None:
        self._receive()
        self.sent.clear()

    def _receive(self) -> list[dict[str, Any]]:
        answers = [json.loads(channel.recv_bytes()) for channel in self._channels]
        for rank, answer in enumerate(answers, 1):
            if "error" in answer:
                raise error_of(answer, rank)
        return answers

    def send(self, message: bytes) -> None:
        if self.failure is not None:
            raise self.failure
        self.sent.append(json.loads(message))
        for channel in self._channels:
            channel.send_bytes(message)

    def fail(self, error: BaseException) -> RankError:
        self.failure = self.failure or RankError(f"rank 0: {type(error).__name__}: {error}")
        self._meeting.barrier.abort()
        return self.failure

    def at_end(self, call: Callable[[], None]) -> None:
        """These ranks leave no group."""

    def close(self) -> None:
        for channel, thread in zip(self._channels, self._threads, strict=True):
            with contextlib.suppress(OSError):
                channel.send_bytes(STOP)
            thread.join(10)
