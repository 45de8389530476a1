"""The ranks of an engine as torchrun started them: every process runs the caller's program, up to the engine.

    torchrun --nproc-per-node 2 program.py

There rank 0 goes on, and the others become its workers, until the engine is closed or rank 0 ends; then they exit. torchrun
itself watches over the processes, and ends them all if one fails.
"""

from __future__ import annotations

import json
import secrets
from multiprocessing.connection import Client, Listener
from typing import Any

import torch
import torch.distributed

from pocketllm.engine.collectives import ProcessGroupRanks
from pocketllm.engine.ranks import RankGroup, Worker
from pocketllm.engine.worker import Job, become_worker
from pocketllm.errors import OptionError
from pocketllm.models.registry import Checkpoint
from pocketllm.options import EngineOptions
from pocketllm.parallel import TensorParallel

_HOST = "127.0.0.1"
_distributed: Any = torch.distributed  # whose types do not say all that it has


def join_torchrun(checkpoint: Checkpoint, options: EngineOptions, device: torch.device) -> RankGroup:
    """Rank 0: its workers, connected. Other ranks: works, then exits. `device`: rank 0's.

    OptionError if torchrun started another number of ranks, or this is the second engine of the job.
    """
    store, rank, size = next(_distributed.rendezvous("env://"))
    if size != options.tensor_parallel:
        raise OptionError(f"torchrun started {size} processes for tensor_parallel = {options.tensor_parallel}")
    shared = _distributed.PrefixStore("pocketllm", store)

    def connect(rank: int, size: int, device: torch.device) -> TensorParallel:
        return ProcessGroupRanks.connect(rank, size, shared, device)

    if rank > 0:
        address = json.loads(shared.get("address"))
        channel = Client((_HOST, address["port"]), authkey=bytes.fromhex(address["key"]))
        channel.send_bytes(json.dumps(rank).encode())
        become_worker(channel, connect)
    if shared.add("engines", 1) > 1:
        raise OptionError("under torchrun a job has one engine: its workers are those of the first")
    key = secrets.token_bytes(32)
    workers = []
    with Listener((_HOST, 0), authkey=key) as listener:
        shared.set("address", json.dumps({"port": listener.address[1], "key": key.hex()}))
        for _ in range(1, size):
            channel = listener.accept()
            workers.append(Worker(json.loads(channel.recv_bytes()), channel))
    workers.sort(key=lambda worker: worker.rank)
    for worker in workers:
        worker.channel.send_bytes(Job.of(checkpoint, options, worker.rank).encode())
    return RankGroup(workers, lambda: ProcessGroupRanks.connect(0, size, shared, device))
