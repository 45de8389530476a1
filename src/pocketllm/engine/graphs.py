"""`DecodeGraphs`: decode and verify passes recorded once per shape and replayed.

A decode step is some hundred kernels on inputs of fixed shape; on small models the Python code between them costs as much
as they do. A backend that can `capture` records the kernels of a pass with their addresses (a CUDA graph on a GPU, a list of
launches on a CPU); a replay then needs only new values in the pass's input tensors, which stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pocketllm.kernels.protocol import Kernels
from pocketllm.layers.batch import ForwardBatch, Kind


def padded_size(num_slots: int) -> int:
    """The next power of two."""
    return 1 << max(num_slots - 1, 0).bit_length()


@dataclass(frozen=True)
class _Graph:
    batch: ForwardBatch  # its tensors are the inputs of every replay
    replay: Callable[[], Tensor]


class DecodeGraphs:
    def __init__(self, forward: Callable[[ForwardBatch], Tensor], kernels: Kernels) -> None:
        self._forward, self._kernels = forward, kernels
        self._graphs: dict[tuple[Kind, int, int], _Graph | None] = {}  # None: this pass can't be captured

    def padded_size(self, num_slots: int) -> int:
        """Slots a batch is filled up to (with the spare one): a power of two, so that few graphs serve all batches."""
        return padded_size(num_slots) if self._kernels.captures else num_slots

    def run(self, batch: ForwardBatch) -> Tensor:
        """The logits [T, V] of a decode or verify batch. They are overwritten by the next pass of the same shape."""
        key = batch.kind, len(batch.slot_ids), batch.q_len
        if key not in self._graphs:
            logits, replay = self._kernels.capture(lambda: self._forward(batch))
            self._graphs[key] = _Graph(batch, replay) if replay is not None else None
            return logits
        graph = self._graphs[key]
        if graph is None:
            return self._forward(batch)
        for name in ("token_ids", "positions", "token_slots", "slot_ids", "cu_seqlens_q", "kv_lens"):
            getattr(graph.batch, name).copy_(getattr(batch, name))
        return graph.replay()
