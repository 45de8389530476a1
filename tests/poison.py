"""Memory that nobody wrote to, made to be noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` gives is NaN (or -1) from now on."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        out = empty(*args, **kwargs)
        out.view(torch.uint8).fill_(0xFF)
        return out

    monkeypatch.setattr(torch, "empty", poisoned)
