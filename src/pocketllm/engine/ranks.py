"""`ProcessRanks`: starts the other ranks of an engine as processes of this machine, watches over them and ends them.

Each worker has two ties to rank 0. Its socket carries the conversation of `engine.worker`. Its stdin carries nothing: it is
open as long as rank 0's process lives, so a worker ends even if it waits in a collective when rank 0 is killed. In the
other direction a thread listens to the sockets: an end that nobody asked for takes the whole group down.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from pocketllm.engine.collectives import ProcessGroupRanks, file_store
from pocketllm.engine.lead import Ranks
from pocketllm.engine.worker import STOP, Job, error_of
from pocketllm.errors import LostRank, PocketLLMError, RankError
from pocketllm.models.registry import Checkpoint
from pocketllm.options import EngineOptions
from pocketllm.parallel import TensorParallel

# Not multiprocessing's spawn, which would run the caller's main module again, guarded by __name__ or not.
_MAIN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from pocketllm.engine.worker import main; main(int(sys.argv[1]), sys.argv[2])"
)
_GRACE = 5.0  # seconds a worker gets to end in order
_MOMENT = 0.5  # seconds in which a failed worker's report arrives


class Worker:
    """Another rank, at the far end of `channel`."""

    def __init__(self, rank: int, channel: Connection[Any, Any]) -> None:
        self.rank, self.channel = rank, channel

    def receive(self) -> dict[str, Any]:
        """The next answer; the error that came instead of one."""
        try:
            answer: dict[str, Any] = json.loads(self.channel.recv_bytes())
        except (EOFError, OSError):
            raise RankError(f"rank {self.rank} {self.end_in_words()}") from None
        if "error" in answer:
            raise error_of(answer, self.rank)
        return answer

    def end_in_words(self) -> str:
        return "is gone"

    def cut_loose(self) -> None:
        """Without rank 0 it ends."""

    def reap(self) -> None:
        """It has been told or cut loose: waits for its end."""


class ProcessWorker(Worker):
    """A process of our own."""

    def __init__(self, job: Job, store: Path) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(store), json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # ctrl-C is for rank 0, which then ends its workers
            )
        super().__init__(job.rank, Connection(ours.detach()))
        self.channel.send_bytes(job.encode())

    def end_in_words(self) -> str:
        try:
            status = self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with exit status {status}"

    def cut_loose(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def reap(self) -> None:
        try:
            self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.cut_loose()


class RankGroup:
    """See `engine.lead.Ranks`: the part that does not depend on who started the workers."""

    def __init__(self, workers: list[Worker], join: Callable[[], ProcessGroupRanks]) -> None:
        """join: makes rank 0 one of the process group, while the workers do the same."""
        self._workers, self._join = workers, join
        self._lock = threading.RLock()
        self._closed = False
        self._before_the_end: list[Callable[[], None]] = []
        self.failure: RankError | None = None
        self._tp: ProcessGroupRanks | None = None

    def meet(self, budget: int | None) -> int | None:
        budgets = [budget, *(answer["budget"] for answer in self._receive())]
        return min((b for b in budgets if b is not None), default=None)

    def build(self, budget: int | None) -> TensorParallel:
        self.send(json.dumps({"budget": budget}).encode())
        try:
            self._tp = self._join()
        except Exception as error:
            raise self.fail(error) from error
        return self._tp

    def wait_ready(self) -> None:
        self._receive()
        threading.Thread(target=self._watch, name="pocketllm-watch", daemon=True).start()

    def _receive(self) -> list[dict[str, Any]]:
        """An answer of each. Whoever has one is heard first, so that an error is not held up by a slow rank."""
        answers: dict[int, dict[str, Any]] = {}
        silent: dict[Any, Worker] = {worker.channel: worker for worker in self._workers}
        while silent:
            for channel in wait(list(silent)):
                worker = silent.pop(channel)
                answers[worker.rank] = worker.receive()
        return [answers[rank] for rank in sorted(answers)]

    def at_end(self, call: Callable[[], None]) -> None:
        self._before_the_end.append(call)

    def send(self, message: bytes) -> None:
        if self.failure is not None:
            raise self.failure
        if self._closed:
            raise RankError("the engine is closed")
        try:
            for worker in self._workers:
                worker.channel.send_bytes(message)
        except OSError as error:
            raise self.fail(error) from error

    def fail(self, error: BaseException) -> RankError:
        with self._lock:  # the engine's thread and a watching one may come here at the same time
            if self.failure is None and self._closed:
                return RankError("the engine is closed")
            if self.failure is None:
                self.failure = RankError(f"{self._cause(error)}. The engine is down: build a new one")
                self._end()
            return self.failure

    def _cause(self, error: BaseException) -> str:
        """What began it: a worker's own error or sudden end, rather than that others missed it; else rank 0's error."""
        consequences: list[str] = []
        silent: dict[Any, Worker] = {worker.channel: worker for worker in self._workers}
        while channels := wait(list(silent), timeout=_MOMENT):
            for channel in channels:
                try:
                    silent.pop(channel).receive()
                except LostRank as lost:
                    consequences.append(str(lost))
                except PocketLLMError as cause:
                    return str(cause)
        own = f"rank 0: {type(error).__name__}: {error}"
        return consequences[0] if consequences and isinstance(error, LostRank) else own

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):
                    for worker in self._workers:
                        worker.channel.send_bytes(STOP)
                self._end()
            for worker in self._workers:
                worker.channel.close()

    def _end(self) -> None:
        self._closed = True
        if self._tp is not None:
            self._tp.let_go()
        for call in self._before_the_end:
            call()
        if self._tp is not None:
            self._tp.leave()
        if self.failure is not None:
            for worker in self._workers:
                worker.cut_loose()
        for worker in self._workers:
            worker.reap()

    def _watch(self) -> None:
        """In a thread: workers that are ready say nothing more. One that does, or ends, takes the group down."""
        wait([worker.channel for worker in self._workers])
        if not self._closed:
            self.fail(RankError("a rank is gone"))


class ProcessRanks(RankGroup):
    """The ranks 1 ... N-1 as processes of our own."""

    def __init__(self, checkpoint: Checkpoint, options: EngineOptions, device: torch.device) -> None:
        size = options.tensor_parallel
        self._folder = Path(tempfile.mkdtemp(prefix="pocketllm-"))  # private: where the ranks meet
        store = self._folder / "store"
        super().__init__([], lambda: ProcessGroupRanks.connect(0, size, file_store(str(store), size), device))
        try:
            for rank in range(1, size):
                self._workers.append(ProcessWorker(Job.of(checkpoint, options, rank), store))
        except BaseException:
            self.close()
            raise

    def _end(self) -> None:
        super()._end()
        shutil.rmtree(self._folder, ignore_errors=True)


def start_ranks(checkpoint: Checkpoint, options: EngineOptions, device: torch.device) -> Ranks:
    """The other ranks of an engine on `device` (rank 0's): those that torchrun started, else processes of our own.

    In a process that torchrun started as another rank this does not return: it works for rank 0, and then exits.
    """
    if torch.distributed.is_torchelastic_launched():
        from pocketllm.engine.torchrun import join_torchrun

        return join_torchrun(checkpoint, options, device)
    return ProcessRanks(checkpoint, options, device)
