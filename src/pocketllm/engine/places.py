"""`open_places`: memory of several GPUs that kernels of all of them read and write (see `parallel.Place`), through torch's
symmetric memory. Multicast is not used.

A kernel that waits there for a rank that has died would wait for ever, and the host with it: `Places.let_go` ends that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from pocketllm.parallel import MOST_MEETINGS, NUM_PLACES, Place, inbox_nbytes, place_nbytes

_c10d: Any = torch.distributed.distributed_c10d
_library: Any = torch._C._distributed_c10d
_MOMENT = 0.002  # seconds between two attempts to let waiting kernels go
_ALIGNMENT = 256
_STOP = 8  # numbers after the flags of all places: the first is `Place.stop`


@dataclass(frozen=True, eq=False)
class Places:
    """What one rank holds of it. `places`: one per kind of sum."""

    places: tuple[Place, ...]
    name: str  # of the group, as torch's symmetric memory knows it
    own_flags: Tensor  # and `stop`
    their_flags: tuple[Tensor, ...]  # of the other ranks, mapped here; not their `stop`
    said: Tensor  # ones for `own_flags`, in pinned memory of the host
    unsaid: Tensor  # zeros for one of `their_flags`
    handles: tuple[Any, ...]  # keep the mappings alive

    def let_go(self, seconds: float = 5.0) -> None:
        """Says to every kernel of this rank that waits what it waits to hear, and that nobody waits for words any more. Its
        results mean nothing then. Until the device is idle, at most so long. From any thread.

        By copies from the host: a kernel that fills could not start while one that waits has all registers of all
        multiprocessors, as a bridge of 33 rows or more has.
        """
        device = self.own_flags.device
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            end = time.monotonic() + seconds
            while not torch.cuda.default_stream(device).query() and time.monotonic() < end:
                self.own_flags.copy_(self.said, non_blocking=True)
                for flags in self.their_flags:
                    flags.copy_(self.unsaid, non_blocking=True)
                time.sleep(_MOMENT)


class RankStore(_library.Store):  # type: ignore[misc]  # torch says no types of its own module in C++
    """A store for one meeting of symmetric memory, over one that all ranks share.

    torch numbers such meetings per process, and puts the number into its keys. Rank 0's process may have had other engines
    before, a worker has not: so each number is replaced by how many there were before it in this store.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        parts = key.split("/")
        return "/".join(
            str(self._numbers.setdefault(p, len(self._numbers))) if p.isdigit() and i < len(parts) - 1 else p
            for i, p in enumerate(parts)
        )

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> Any:
        return self._store.get(self._key(key))

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(self._key(key), value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([self._key(key) for key in keys]))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)


def _sizes(hidden_size: int, size: int) -> tuple[int, int]:
    """Bytes of a place's memory and of its inbox."""
    first, second = (
        -(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in (place_nbytes(hidden_size), inbox_nbytes(hidden_size, size))
    )
    return first, second


def cut_places(
    memory: Tensor, flags: Tensor, memory_at: Sequence[int], flags_at: Sequence[int], rank: int, hidden_size: int
) -> tuple[Place, ...]:
    """One rank's places. memory [NUM_PLACES * (memory, inbox)] uint8, flags [NUM_PLACES * flags, stop] int32: its own;
    *_at: addresses of each rank's."""
    size = len(memory_at)
    in_memory, in_inbox = _sizes(hidden_size, size)
    each, num_flags = in_memory + in_inbox, MOST_MEETINGS * size
    stop = flags[NUM_PLACES * num_flags :][:1]

    def addresses(of_ranks: Sequence[int], offset: int) -> Tensor:
        return torch.tensor([at + offset for at in of_ranks], dtype=torch.int64, device=memory.device)

    return tuple(
        Place(
            memory[i * each : i * each + in_memory],
            addresses(memory_at, i * each),
            addresses(flags_at, i * num_flags * 4),
            addresses(memory_at, i * each + in_memory),
            stop,
            rank,
            size,
        )
        for i in range(NUM_PLACES)
    )


def open_places(rank: int, size: int, store: Any, device: torch.device, hidden_size: int) -> Places:
    """Called by all ranks alike; returns once all have. RuntimeError if the GPUs can't read each other's memory."""
    meeting = RankStore(_c10d.PrefixStore("places", store))
    name = f"pocketllm-places-{id(store)}-{time.monotonic_ns()}"  # of this process's own register of groups
    group: Any = _c10d.ProcessGroup(meeting, rank, size)
    _library._register_process_group(name, group)
    nbytes, num_flags = NUM_PLACES * sum(_sizes(hidden_size, size)), NUM_PLACES * MOST_MEETINGS * size

    def shared(count: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
        tensor = _library._SymmetricMemory.empty_strided_p2p((count,), (1,), dtype, device)
        tensor.zero_()
        torch.cuda.synchronize(device)
        return tensor, _library._SymmetricMemory.rendezvous(tensor, name)

    memory, memory_handle = shared(nbytes, torch.uint8)
    flags, flags_handle = shared(num_flags + _STOP, torch.int32)
    flags_handle.barrier(0, int(60e3))  # nobody's flags are written before they are zero
    torch.cuda.synchronize(device)

    places = cut_places(memory, flags, memory_handle.buffer_ptrs, flags_handle.buffer_ptrs, rank, hidden_size)
    theirs = tuple(flags_handle.get_buffer(peer, (num_flags,), torch.int32) for peer in range(size) if peer != rank)
    said = torch.ones(len(flags), dtype=torch.int32).pin_memory()  # now: pinning waits for the device
    unsaid = torch.zeros(num_flags, dtype=torch.int32).pin_memory()
    return Places(places, name, flags, theirs, said, unsaid, (memory_handle, flags_handle, group, meeting))
