"""The store through which ranks meet for their symmetric memory."""

from __future__ import annotations

from pathlib import Path

import torch.distributed

from pocketllm.engine.places import RankStore


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
