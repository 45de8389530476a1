"""The store through which ranks meet for their symmetric memory, and which ranks do."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed

from pocketllm.engine.places import RankStore, cut_places
from pocketllm.engine.rank import RankBuilder
from pocketllm.kernels import reference
from pocketllm.options import EngineOptions
from pocketllm.parallel import MOST_MEETINGS, NUM_PLACES, SMALL_BATCH, inbox_nbytes, place_nbytes


def test_ranks_meet_whatever_their_processes_did_before(tmp_path: Path) -> None:
    """torch counts meetings per process: here one had seven before, the other none."""
    shared = [torch.distributed.FileStore(str(tmp_path / "store"), 2) for _ in range(2)]  # type: ignore[attr-defined]
    stores = [RankStore(store) for store in shared]
    # through a store of torch's own, so that its compiled code calls ours as symmetric memory does
    old, fresh = (torch.distributed.PrefixStore("meeting", store) for store in stores)  # type: ignore[attr-defined]
    for meeting in range(3):
        old.set(f"memory/{7 + meeting}/0", f"from 0, {meeting}")
        fresh.set(f"memory/{meeting}/1", f"from 1, {meeting}")
        old.wait([f"memory/{7 + meeting}/1"])
        fresh.wait([f"memory/{meeting}/0"])
        assert old.get(f"memory/{7 + meeting}/1") == f"from 1, {meeting}".encode()
        assert fresh.get(f"memory/{meeting}/0") == f"from 0, {meeting}".encode()


@pytest.mark.parametrize(
    ("gpus", "opened"),
    [
        ([("A", 132), ("A", 132)], [True, True]),
        ([("A", 132), ("B", 132)], [False, False]),
        ([("A", 132), ("A", 114), ("A", 132)], [False, False, False]),
    ],
)
def test_places_are_for_gpus_of_one_kind(
    gpus: list[tuple[str, int]], opened: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ranks decide alike, and rank 0 says if sums will be slower. The engine's first GPU need not be the machine's."""
    kinds = [SimpleNamespace(name=name, multi_processor_count=count) for name, count in [("other", 1), *gpus]]
    monkeypatch.setattr(torch.cuda, "get_device_properties", kinds.__getitem__)
    checkpoint = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
    for rank, wanted in enumerate(opened):
        asked: list[int] = []
        tp = SimpleNamespace(rank=rank, size=len(gpus), open_places=asked.append)
        builder = RankBuilder(checkpoint, EngineOptions(), reference, torch.device("cuda", rank + 1))  # type: ignore[arg-type]
        builder._open_places(tp)  # type: ignore[arg-type]
        assert asked == ([64] if wanted else [])
        assert ("GPUs differ" in capsys.readouterr().err) == (rank == 0 and not wanted)


@pytest.mark.parametrize("size", [2, 4])
def test_places_do_not_overlap_and_share_one_stop(size: int) -> None:
    """What each address points to, on every rank alike; `stop` is no flag."""
    hidden, num_flags = 96, NUM_PLACES * MOST_MEETINGS * size
    memory = torch.zeros(NUM_PLACES * (place_nbytes(hidden) + inbox_nbytes(hidden, size) + 512), dtype=torch.uint8)
    flags = torch.arange(num_flags + 8, dtype=torch.int32)
    starts, flag_starts = [10**6 * (i + 1) for i in range(size)], [10**9 * (i + 1) for i in range(size)]
    places = cut_places(memory, flags, starts, flag_starts, 1, hidden)
    assert len(places) == NUM_PLACES
    spans = []
    for i, place in enumerate(places):
        assert (place.rank, place.size) == (1, size)
        begin = place.memory.data_ptr() - memory.data_ptr()
        assert place.addresses.tolist() == [start + begin for start in starts]
        inboxes = [int(at) - start for at, start in zip(place.inboxes, starts, strict=True)]
        assert len(set(inboxes)) == 1
        spans += [(begin, place.memory.nbytes), (inboxes[0], size * SMALL_BATCH * hidden * 8)]
        assert place.flags.tolist() == [start + i * MOST_MEETINGS * size * 4 for start in flag_starts]
        assert place.stop.tolist() == [num_flags]
    spans.sort()
    assert all(begin + length <= after for (begin, length), (after, _) in pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= memory.nbytes
