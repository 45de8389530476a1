"""A rank other than 0: it builds its shard of the model and then does what rank 0 says, until it is told to stop.

It begins as `python -c "... main(fd)"` with a socket to rank 0 at that file descriptor. The conversation, JSON all of it:

    rank 0                                        worker
    a `Job`
                                                  {"budget": bytes or null}
    {"budget": the least of all}
                                                  {"ready": true}
    calls of `LeadRunner` ... until {}

Instead of an answer, or at any later time, a worker may send {"error": class, "text": ...} and end.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from pocketllm import errors
from pocketllm.engine.collectives import ProcessGroupRanks, file_store
from pocketllm.engine.lead import obey
from pocketllm.engine.rank import RankBuilder
from pocketllm.models.registry import Checkpoint, read_model
from pocketllm.options import EngineOptions
from pocketllm.parallel import TensorParallel

STOP = b"{}"


@dataclass(frozen=True)
class Job:
    """What a worker is to become. model: as for `read_model`."""

    rank: int
    model: str
    dummy: bool
    options: EngineOptions

    @classmethod
    def of(cls, checkpoint: Checkpoint, options: EngineOptions, rank: int) -> Job:
        model = str(checkpoint.path) if checkpoint.path is not None else checkpoint.name
        return cls(rank, model, checkpoint.reader is None, options)

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> Job:
        values = json.loads(message)
        return cls(values["rank"], values["model"], values["dummy"], EngineOptions.of(**values["options"]))


Connect = Callable[[int, int, torch.device], TensorParallel]  # rank, size, device


def serve(channel: Connection[Any, Any], connect: Connect) -> None:
    """The conversation above, from the job to the end. An error is reported to rank 0 and raised."""
    try:
        job = Job.decode(channel.recv_bytes())
        model: str | Path = Path(job.model) if Path(job.model).exists() else job.model
        checkpoint = read_model(model, "dummy" if job.dummy else "auto")
        builder = RankBuilder.of(checkpoint, job.options, job.rank)
        if builder.device.type == "cuda":
            torch.cuda.set_device(builder.device)  # Triton launches on the current one
        channel.send_bytes(json.dumps({"budget": builder.budget()}).encode())
        if (message := channel.recv_bytes()) == STOP:
            return
        budget = json.loads(message)["budget"]
        tp = connect(job.rank, job.options.tensor_parallel, builder.device)
        runner = builder.build(builder.plan(budget), tp)
        channel.send_bytes(json.dumps({"ready": True}).encode())
        while (message := channel.recv_bytes()) != STOP:
            obey(runner, message)
    except EOFError:  # rank 0 is gone
        return
    except BaseException as error:
        with contextlib.suppress(OSError):
            channel.send_bytes(json.dumps({"error": type(error).__name__, "text": str(error)}).encode())
        raise


def error_of(report: dict[str, str], rank: int) -> errors.PocketLLMError:
    """What a worker reported, as the error it was if it is one of this package's."""
    text = f"rank {rank}: {report['text']}"
    kind = getattr(errors, report["error"], None)
    if isinstance(kind, type) and issubclass(kind, errors.PocketLLMError):
        return kind(text)
    return errors.RankError(f"rank {rank}: {report['error']}: {report['text']}")


def main(fd: int, store: str) -> None:
    """The process: a socket to rank 0 at `fd`, a file to meet the others through, and stdin open as long as rank 0 lives."""
    threading.Thread(target=_end_with_rank_0, name="pocketllm-lifeline", daemon=True).start()

    def connect(rank: int, size: int, device: torch.device) -> TensorParallel:
        return ProcessGroupRanks.connect(rank, size, file_store(store, size), device)

    become_worker(Connection(fd), connect)


def become_worker(channel: Connection[Any, Any], connect: Connect) -> NoReturn:
    """`serve`, then the end of this process, without the interpreter's own tidying up: it has nothing to keep, and threads
    of libraries may be in its way."""
    status = 0
    try:
        serve(channel, connect)
    except BaseException as error:
        status = 1
        if not isinstance(error, errors.PocketLLMError):  # those explain themselves, and rank 0 has the text
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_with_rank_0() -> None:
    """Blocks until stdin ends, then ends the process, whatever it is doing: waiting in a collective, most likely."""
    os.read(0, 1)  # not sys.stdin: its lock would be held when the process ends in order
    os._exit(1)
