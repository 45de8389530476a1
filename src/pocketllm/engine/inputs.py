"""A pass's inputs as one block of memory: packed on the host, sent to the device in one copy, read there as views.

Eight small tensors made from Python lists would be eight copies that each wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pocketllm.layers.batch import ForwardBatch, Kind

_ALIGNMENT = 16  # bytes; kernels are compiled for what they may assume about an address


@dataclass(frozen=True)
class SlotTokens:
    """One slot's part of a pass: its next tokens, the first of them at position `start`."""

    slot: int
    start: int
    token_ids: Sequence[int]
    wants_logits: bool = True  # prefill: only a prompt's last chunk does


@dataclass(frozen=True)
class BatchLayout:
    """Sizes of a `ForwardBatch`, and where in the block its tensors are."""

    kind: Kind
    q_len: int  # see `ForwardBatch`
    num_tokens: int
    num_slots: int
    num_rows: int | None  # of logits; None: one for every token

    def _fields(self) -> dict[str, tuple[int, torch.dtype]]:
        return {
            "token_ids": (self.num_tokens, torch.int64),
            "positions": (self.num_tokens, torch.int64),
            "token_slots": (self.num_tokens, torch.int32),
            "slot_ids": (self.num_slots, torch.int32),
            "cu_seqlens_q": (self.num_slots + 1, torch.int32),
            "kv_lens": (self.num_slots, torch.int32),
            "logits_rows": (self.num_rows or 0, torch.int64),
        }

    @property
    def nbytes(self) -> int:
        return sum(_aligned(count * dtype.itemsize) for count, dtype in self._fields().values())

    def batch(self, block: Tensor) -> ForwardBatch:
        """The batch whose tensors are views of `block` [nbytes] uint8."""
        views, start = {}, 0
        for name, (count, dtype) in self._fields().items():
            size = count * dtype.itemsize
            views[name] = block[start : start + size].view(dtype)
            start += _aligned(size)
        rows = views.pop("logits_rows")
        logits_rows = None if self.num_rows is None else rows
        return ForwardBatch(self.kind, self.q_len, **views, logits_rows=logits_rows, parts=None)


def pack(kind: Kind, items: Sequence[SlotTokens], *, all_logits: bool, pinned: bool) -> tuple[BatchLayout, Tensor]:
    """The items' layout and block [nbytes] uint8, in host memory (pinned: a GPU copies from it while the host goes on)."""
    lengths = [len(item.token_ids) for item in items]
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    values = {
        "token_ids": [token for item in items for token in item.token_ids],
        "positions": [p for item in items for p in range(item.start, item.start + len(item.token_ids))],
        "token_slots": [item.slot for item in items for _ in item.token_ids],
        "slot_ids": [item.slot for item in items],
        "cu_seqlens_q": bounds,
        "kv_lens": [item.start + len(item.token_ids) for item in items],
    }
    num_rows = None
    if kind == "prefill" and not all_logits:
        values["logits_rows"] = [end - 1 for end, item in zip(bounds[1:], items, strict=True) if item.wants_logits]
        num_rows = len(values["logits_rows"])
    layout = BatchLayout(kind, 0 if kind == "prefill" else lengths[0], bounds[-1], len(items), num_rows)
    block = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=pinned)
    batch = layout.batch(block)
    for name, numbers in values.items():
        view: Tensor = getattr(batch, name)
        view.copy_(torch.tensor(numbers, dtype=view.dtype))
    return layout, block


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
