"""`ProcessGroupRanks`: the sums and gathers of tensor parallelism over a process group of torch.distributed.

NCCL between GPUs, gloo between CPU processes. The group is made directly from a store, not by `init_process_group`: that
one is global, and two engines in one process, or an engine beside a caller's own group, must not meet.

A row's sum must not depend on how many rows are summed with it (`kernels.protocol`). Of two ranks any order of adding
gives the same bits. For more, the libraries choose an order by size; so small batches are gathered from all ranks and added
in rank order, which moves more bytes but takes as few steps ("one-shot"). Large ones, of prefill, are the library's.

Where GPUs can read and write each other's memory, kernels exchange small batches themselves: see `engine.places`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from pocketllm.engine.places import Places, open_places
from pocketllm.errors import LostRank
from pocketllm.parallel import SMALL_BATCH, Place, TensorParallel, sum_in_rank_order

_distributed: Any = torch.distributed  # whose types do not say all that it has
_c10d: Any = torch.distributed.distributed_c10d

_MEET = timedelta(seconds=30)  # for the ranks to find each other; all of them are on their way when it begins
_WAIT = timedelta(hours=1)  # for a rank that still compiles kernels; a rank that dies is noticed at once


def file_store(path: str, size: int) -> Any:
    """Where the ranks of one machine meet: a file that need not exist yet, at the same path for all."""
    return _distributed.FileStore(path, size)


@dataclass(frozen=True, eq=False)
class ProcessGroupRanks(TensorParallel):
    """A rank with a process group (a `torch.distributed` backend object) to the others."""

    group: Any = field(kw_only=True)
    store: Any = field(kw_only=True)
    places: Places | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _ranks[id(self)] = self

    @classmethod
    def connect(cls, rank: int, size: int, store: Any, device: torch.device) -> ProcessGroupRanks:
        """Joins the group; returns once all `size` ranks have. `store`: a torch.distributed store that all of them reach.
        The ranks are on one machine: on a CPU they meet on the loopback interface."""
        store.set_timeout(_MEET)
        group: Any
        settings: Any
        if device.type == "cuda":
            settings = _c10d.ProcessGroupNCCL.Options()
            settings._timeout, settings.global_ranks_in_group = _WAIT, list(range(size))
            group = _c10d.ProcessGroupNCCL(store, rank, size, settings)
        else:
            settings = _c10d.ProcessGroupGloo._Options()
            settings._timeout = _MEET
            settings._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            group = _c10d.ProcessGroupGloo(store, rank, size, settings)
            group._set_default_timeout(_WAIT)
        ranks = cls(rank, size, group=group, store=store)
        ranks.all_reduce(torch.zeros(1, 1, device=device))  # NCCL connects at the first use, which a graph can't record
        return ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        """In place. An operation of torch's own, so that a backend which records passes sees it and repeats it."""
        torch.ops.pocketllm.all_reduce_(x, id(self))
        return x

    def open_places(self, hidden_size: int) -> None:
        device, places, problem = torch.device("cuda", torch.cuda.current_device()), None, ""
        try:
            places = open_places(self.rank, self.size, self.store, device, hidden_size)
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        opened = self.all_reduce(torch.tensor([[float(places is not None)]], device=device))
        if int(opened.item()) == self.size:
            object.__setattr__(self, "places", places)
        elif problem:
            print(f"rank {self.rank}: sums over the ranks go through NCCL, which is slower: {problem}", file=sys.stderr)

    def place(self, index: int, rows: int) -> Place | None:
        return None if self.places is None or rows > SMALL_BATCH else self.places.places[index]

    def broadcast(self, x: Tensor) -> Tensor:
        options = _c10d.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, False
        self._finish(self.group.broadcast, [x], options)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """The columns of all ranks go to all of them; only rank 0 puts them side by side."""
        if len(x) == 0:
            return x.new_zeros(0, self.size * x.shape[1])
        parts = self._all_parts(x.contiguous())  # [size, M, K]
        return parts.transpose(0, 1).reshape(len(x), -1) if self.rank == 0 else x

    def let_go(self) -> None:
        """Before `leave`: kernels of this rank that wait for one that is lost end, with results that mean nothing."""
        if self.places is not None:
            self.places.let_go()

    def leave(self) -> None:
        """End the group, from this rank's side: another thread that waits in it for a lost rank gets an error, and the
        group's own threads end while the interpreter is still whole. Nothing if that has been done. Graphs that recorded
        its collectives must be gone: NCCL waits for them."""
        group = self.group
        object.__setattr__(self, "group", None)
        if group is not None and group.name() == "nccl":
            group.abort()  # gloo notices a loss by itself

    def sum_(self, x: Tensor) -> None:
        """What `all_reduce` does."""
        if self.size > 2 and len(x) <= SMALL_BATCH:
            x.copy_(sum_in_rank_order(list(self._all_parts(x))))
            return
        options = _c10d.AllreduceOptions()
        options.asyncOp = False  # on the stream the kernels are on
        self._finish(self.group.allreduce, [x], options)

    def _all_parts(self, x: Tensor) -> Tensor:
        """[M, K] -> the tensors of all ranks [size, M, K]."""
        parts = x.new_empty(self.size * len(x), x.shape[1])
        options = _c10d.AllgatherOptions()
        options.asyncOp = False
        self._finish(self.group._allgather_base, parts, x, options)
        return parts.view(self.size, *x.shape)

    def _finish(self, collective: Callable[..., Any], *arguments: Any) -> None:
        try:
            work = collective(*arguments)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise LostRank(f"another rank has left the group: {error}") from error


_ranks: weakref.WeakValueDictionary[int, ProcessGroupRanks] = weakref.WeakValueDictionary()

_library: Any = torch.library.Library("pocketllm", "DEF")
_library.define("all_reduce_(Tensor(a!) x, int ranks) -> ()")
_library.impl("all_reduce_", lambda x, ranks: _ranks[ranks].sum_(x), "CompositeExplicitAutograd")
