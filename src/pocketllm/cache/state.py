"""`StateCache`: recurrent state of the Gated DeltaNet layers, per slot, allocated once from a `StateShape`.

KV can be cut at any token; recurrent state can only be moved forward or restored. So it has snapshots (a pool of whole
states, taken where a conversation will branch) and, for speculation, a journal of what drafted tokens would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import LayerState, TensorSpec


@dataclass(frozen=True)
class StateShape:
    """Sizes of one rank's state cache (heads and channels of this rank)."""

    num_layers: int
    num_slots: int
    conv_dim: int
    conv_taps: int  # inputs remembered: kernel width - 1
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    journal_len: int  # tokens a verify pass may hold: max_draft_tokens + 1, or 0 without drafts
    num_snapshots: int
    dtype: torch.dtype  # of the convolution's inputs; recurrent state is float32

    def _state_specs(self, rows: int) -> tuple[TensorSpec, TensorSpec]:
        heads = (self.num_value_heads, self.key_head_dim, self.value_head_dim)
        return (
            TensorSpec("conv", (rows, self.conv_dim, self.conv_taps), self.dtype),
            TensorSpec("recurrent", (rows, *heads), torch.float32),
        )

    def layer_specs(self) -> tuple[TensorSpec, ...]:
        """The tensors of one layer's `LayerState`, in order; the last row is the spare slot's."""
        rows, q = self.num_slots + 1, self.journal_len
        return (
            *self._state_specs(rows),
            TensorSpec("journal_x", (rows, q, self.conv_dim), self.dtype),
            TensorSpec("journal_k", (rows, q, self.num_key_heads, self.key_head_dim), torch.float32),
            TensorSpec("journal_d", (rows, q, self.num_value_heads, self.value_head_dim), torch.float32),
            TensorSpec("journal_g", (rows, q, self.num_value_heads), torch.float32),
        )

    def snapshot_specs(self) -> tuple[TensorSpec, TensorSpec]:
        return self._state_specs(self.num_snapshots)

    @property
    def nbytes(self) -> int:
        return self.num_layers * sum(s.nbytes for s in (*self.layer_specs(), *self.snapshot_specs()))


class StateCache:
    def __init__(self, shape: StateShape, device: torch.device, kernels: Kernels) -> None:
        self.shape = shape
        self._kernels = kernels
        self.layers: list[LayerState] = []
        self._snapshots: list[list[torch.Tensor]] = []  # per layer: conv, recurrent [num_snapshots, ...]
        for _ in range(shape.num_layers):
            tensors = [torch.zeros(s.shape, dtype=s.dtype, device=device) for s in shape.layer_specs()]
            self.layers.append(LayerState(*tensors))
            self._snapshots.append([torch.zeros(s.shape, dtype=s.dtype, device=device) for s in shape.snapshot_specs()])

    @property
    def nbytes(self) -> int:
        tensors: list[torch.Tensor] = [t for layer in self.layers for t in vars(layer).values()]
        return sum(t.nbytes for t in (*tensors, *(t for pair in self._snapshots for t in pair)))

    def reset(self, slot: int) -> None:
        """Make the slot a fresh sequence."""
        for layer in self.layers:
            layer.conv[slot] = 0
            layer.recurrent[slot] = 0

    def fork(self, parent: int, child: int) -> None:
        for layer in self.layers:
            layer.conv[child] = layer.conv[parent]
            layer.recurrent[child] = layer.recurrent[parent]

    def commit(self, slots: Sequence[int], num_tokens: Sequence[int]) -> None:
        """Move each slot's state forward by the first num_tokens of its last verify pass (0: roll all of it back)."""
        if not self.layers:
            return
        device = self.layers[0].recurrent.device
        slot_ids = torch.tensor(slots, dtype=torch.int32, device=device)
        counts = torch.tensor(num_tokens, dtype=torch.int32, device=device)
        for layer in self.layers:
            self._kernels.gated_delta_commit(layer, slot_ids, counts)

    def save_snapshot(self, slot: int, index: int) -> None:
        """Copy the slot's state to snapshot `index`."""
        for layer, (conv, recurrent) in zip(self.layers, self._snapshots, strict=True):
            conv[index] = layer.conv[slot]
            recurrent[index] = layer.recurrent[slot]

    def restore_snapshot(self, slot: int, index: int) -> None:
        """Copy snapshot `index` to the slot's state."""
        for layer, (conv, recurrent) in zip(self.layers, self._snapshots, strict=True):
            layer.conv[slot] = conv[index]
            layer.recurrent[slot] = recurrent[index]
