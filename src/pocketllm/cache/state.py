"""`StateCache`: recurrent state of the Gated DeltaNet layers, per slot, allocated once from a `StateShape`.

KV can be cut at any token; recurrent state can only be moved forward or restored. So it has snapshots (a pool of whole
states, taken where a conversation will branch) and, for speculation, a journal of what drafted tokens would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """Rows of all layers lie one after the other: what is done to a slot is done in all layers at once."""

    def __init__(self, shape: StateShape, device: torch.device, kernels: Kernels) -> None:
        self.shape = shape
        self._kernels = kernels
        self._rows = shape.num_slots + 1  # of a layer

        def room(spec: TensorSpec) -> Tensor:
            return torch.zeros(shape.num_layers * spec.shape[0], *spec.shape[1:], dtype=spec.dtype, device=device)

        self._all = LayerState(*map(room, shape.layer_specs()))
        self._snapshots = list(map(room, shape.snapshot_specs()))
        starts = range(0, shape.num_layers * self._rows, self._rows)
        self.layers = [LayerState(*(t[i : i + self._rows] for t in vars(self._all).values())) for i in starts]

    @property
    def nbytes(self) -> int:
        tensors: list[Tensor] = [*vars(self._all).values(), *self._snapshots]
        return sum(t.nbytes for t in tensors)

    def _states(self) -> list[Tensor]:
        """conv and recurrent, [layers, num_slots + 1, ...]."""
        return [t.unflatten(0, (self.shape.num_layers, self._rows)) for t in (self._all.conv, self._all.recurrent)]

    def _saved(self) -> list[Tensor]:
        """Those of the snapshots, [layers, num_snapshots, ...]."""
        return [t.unflatten(0, (self.shape.num_layers, self.shape.num_snapshots)) for t in self._snapshots]

    def reset(self, slot: int) -> None:
        """Make the slot a fresh sequence."""
        for state in self._states():
            state[:, slot] = 0

    def fork(self, parent: int, child: int) -> None:
        for state in self._states():
            state[:, child] = state[:, parent]

    def commit(self, slots: Sequence[int], num_tokens: Sequence[int]) -> None:
        """Move each slot's state forward by the first num_tokens of its last verify pass (0: roll all of it back)."""
        if not self.layers:
            return
        rows = [layer * self._rows + slot for layer in range(self.shape.num_layers) for slot in slots]
        numbers = torch.tensor([rows, [*num_tokens] * self.shape.num_layers], dtype=torch.int32)
        row_ids, counts = numbers.to(self._all.recurrent.device)
        self._kernels.gated_delta_commit(self._all, row_ids, counts)

    def save_snapshot(self, slot: int, index: int) -> None:
        """Copy the slot's state to snapshot `index`."""
        for state, saved in zip(self._states(), self._saved(), strict=True):
            saved[:, index] = state[:, slot]

    def restore_snapshot(self, slot: int, index: int) -> None:
        """Copy snapshot `index` to the slot's state."""
        for state, saved in zip(self._states(), self._saved(), strict=True):
            state[:, slot] = saved[:, index]
