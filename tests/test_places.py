"""The store through which ranks meet for their symmetric memory, and which ranks do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed

from pocketllm.engine.places import RankStore
from pocketllm.engine.rank import RankBuilder
from pocketllm.kernels import reference
from pocketllm.options import EngineOptions


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
