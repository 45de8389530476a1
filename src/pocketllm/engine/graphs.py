"""Passes recorded once per shape and replayed: `DecodeGraphs` for decode and verify, `PrefillGraphs` for short prompts.

A decode step is some hundred kernels on inputs of fixed shape; on small models the Python code between them costs as much
as they do. A backend that can `capture` records the kernels of a pass with their addresses (a CUDA graph on a GPU, a list of
launches on a CPU); a replay then needs only new values in the block of the pass's inputs, which stays where it is.

A GPU computes a few hundred tokens of a prompt faster, too, than Python calls the kernels for them. So prefill passes up to
some size are filled up with tokens of the spare slot to one of few sizes (`Kernels.short_prefills`), and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pocketllm.engine.inputs import BatchLayout, SlotTokens, pack
from pocketllm.kernels.protocol import Kernels
from pocketllm.layers.batch import ForwardBatch, Kind

_TILE = 8  # rows that cost as much as one in the kernels of matrix products
_ITEMS = (2, 5)  # of a recorded prefill: one slot's or up to four slots' tokens, and an item that fills it up

Forward = Callable[[ForwardBatch], Tensor]


def padded_size(num_slots: int) -> int:
    """Slots a batch is filled up to: the next power of two, from 8 on the next multiple of 8."""
    return -(-num_slots // _TILE) * _TILE if num_slots > _TILE else 1 << max(num_slots - 1, 0).bit_length()


def padded_sizes(num_slots: int) -> list[int]:
    """Of all batches of up to num_slots."""
    small = {padded_size(n) for n in range(1, min(num_slots, _TILE) + 1)}
    return [*sorted(small), *range(2 * _TILE, padded_size(num_slots) + 1, _TILE)]


def prefill_sizes(kernels: Kernels, most: int) -> list[int]:
    """Tokens of recorded prefill passes, ascending, where a pass has at most `most`."""
    return [size for size in kernels.short_prefills if size <= most] if kernels.captures else []


@dataclass(frozen=True)
class _Graph:
    inputs: Tensor  # the block of inputs of every replay
    replay: Callable[[], Tensor]


class _Recordings:
    """Recorded passes by shape, each made when it is first asked for."""

    def __init__(self, forward: Forward, kernels: Kernels, device: torch.device, spare_slot: int) -> None:
        """spare_slot: where padding rows, and passes that are only recorded, read and write."""
        self._forward, self._kernels, self._device, self._spare = forward, kernels, device, spare_slot
        self._pinned = device.type == "cuda"
        self._graphs: dict[BatchLayout, _Graph | None] = {}  # None: this pass can't be captured

    def forget(self) -> None:
        self._graphs.clear()

    def _filler(self, num_tokens: int) -> SlotTokens:
        return SlotTokens(self._spare, 0, [0] * num_tokens)

    def _recorded(self, layout: BatchLayout, fillers: Sequence[SlotTokens], *, all_logits: bool) -> _Graph | None:
        """The recording of this shape, made now if there is none: of items in the spare slot, where any number of runs do
        no harm."""
        if layout not in self._graphs:
            _, block = pack(layout.kind, fillers, all_logits=all_logits, pinned=False)
            inputs = block.to(self._device)
            batch = layout.batch(inputs)
            _, replay = self._kernels.capture(lambda: self._forward(batch))
            self._graphs[layout] = _Graph(inputs, replay) if replay is not None else None
        return self._graphs[layout]


class DecodeGraphs(_Recordings):
    """Of passes whose result are logits."""

    def run(self, kind: Kind, items: Sequence[SlotTokens], token_ids: Tensor | None = None) -> Tensor:
        """The logits [T, V] of a decode or verify batch. They are overwritten by the next pass of the same shape.

        token_ids: [T] int64 on the device, in place of the items' own."""
        q_len, num_slots = len(items[0].token_ids), len(items)
        if self._kernels.captures:
            items = [*items, *self._fillers(padded_size(num_slots) - num_slots, q_len)]
        layout, block = pack(kind, items, all_logits=True, pinned=self._pinned)
        graph = self._graph(layout) if self._kernels.captures else None
        if graph is None:
            batch = layout.batch(block.to(self._device, non_blocking=True))
            _put(batch, token_ids)
            logits = self._forward(batch)
        else:
            graph.inputs.copy_(block, non_blocking=True)
            _put(layout.batch(graph.inputs), token_ids)
            logits = graph.replay()
        return logits[: num_slots * q_len]

    def record_all(self, kind: Kind, q_len: int, num_slots: int) -> None:
        """Record what serves batches of 1 to num_slots: then no request waits for it, and its memory is taken."""
        for size in reversed(padded_sizes(num_slots)):  # the largest takes the memory that the others then share
            layout, _ = pack(kind, self._fillers(size, q_len), all_logits=True, pinned=False)
            self._graph(layout)

    def _fillers(self, count: int, q_len: int) -> list[SlotTokens]:
        return [self._filler(q_len)] * count

    def _graph(self, layout: BatchLayout) -> _Graph | None:
        return self._recorded(layout, self._fillers(layout.num_slots, layout.q_len), all_logits=True)


class PrefillGraphs(_Recordings):
    """Of passes whose result are the rows that logits are made of, of each item's last token."""

    def __init__(
        self, forward: Forward, kernels: Kernels, device: torch.device, spare_slot: int, most_tokens: int
    ) -> None:
        """most_tokens: of a pass, and of a slot."""
        super().__init__(forward, kernels, device, spare_slot)
        self._sizes = prefill_sizes(kernels, most_tokens)

    def run(self, items: Sequence[SlotTokens]) -> Tensor | None:
        """The row [n, H] of each item's last token, overwritten by the next pass of the same shape. None: such a pass is
        not recorded."""
        num_tokens = sum(len(item.token_ids) for item in items)
        size = next((size for size in self._sizes if size >= num_tokens), None)
        count = next((count for count in _ITEMS if count > len(items)), None)
        if size is None or count is None:
            return None
        layout, block = pack("prefill", self._filled(items, size, count), all_logits=False, pinned=self._pinned)
        graph = self._graph(layout)
        if graph is None:
            return None
        graph.inputs.copy_(block, non_blocking=True)
        return graph.replay()[: len(items)]

    def record_all(self) -> None:
        """As that of decode passes."""
        for size in reversed(self._sizes):
            for count in _ITEMS:
                layout, _ = pack("prefill", self._filled([], size, count), all_logits=False, pinned=False)
                self._graph(layout)

    def _filled(self, items: Sequence[SlotTokens], size: int, count: int) -> list[SlotTokens]:
        """The items, a row of each wanted, and such of the spare slot that there are `size` tokens and `count` items."""
        wanted = [SlotTokens(item.slot, item.start, item.token_ids) for item in items]
        rest = self._filler(size - sum(len(item.token_ids) for item in items))
        return [*wanted, rest, *[self._filler(0)] * (count - len(items) - 1)]

    def _graph(self, layout: BatchLayout) -> _Graph | None:
        return self._recorded(layout, self._filled([], layout.num_tokens, layout.num_slots), all_logits=False)


def _put(batch: ForwardBatch, token_ids: Tensor | None) -> None:
    if token_ids is not None:
        batch.token_ids[: len(token_ids)].copy_(token_ids)
