"""`MtpDrafts`: a rank's side of `drafter="mtp"`. The model's own layer for further tokens drafts for all slots at once.

Every pass leaves the states of its tokens here, and a prompt's passes fill the layer's part of the KV cache. To draft, the
layer first takes the tokens that have been accepted since, each with the state of the one before it; then, one by one, the
tokens it has drafted itself, each with its own result as the state. What stands in the cache for drafted tokens is written
again when the next drafts are made, and stays if none are. Drafts decide how many passes an answer takes, never what it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pocketllm.cache.kv import KVCache
from pocketllm.engine.graphs import DecodeGraphs, padded_size
from pocketllm.engine.inputs import SlotTokens
from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import TensorSpec
from pocketllm.layers.batch import ForwardBatch, Kind
from pocketllm.models.mtp import MultiTokenPrediction
from pocketllm.models.qwen import QwenModel
from pocketllm.parallel import SMALL_BATCH, TensorParallel


def states_spec(num_slots: int, most: int, hidden_size: int, dtype: torch.dtype) -> TensorSpec:
    """For the memory plan."""
    return TensorSpec("mtp.states", (num_slots + 1, most + 1, hidden_size), dtype)


def drafted_slots(num_slots: int, most: int) -> int:
    """Slots that a verify pass may have, whose rows' results must not depend on their number."""
    return max((n for n in range(1, num_slots + 1) if padded_size(n) * (1 + most) <= SMALL_BATCH), default=0)


class MtpDrafts:
    def __init__(
        self,
        model: QwenModel,
        layer: MultiTokenPrediction,
        kv: KVCache,
        kernels: Kernels,
        tp: TensorParallel,
        states: TensorSpec,
        device: torch.device,
    ) -> None:
        """states: see `states_spec`."""
        self._model, self._layer, self._kv, self._tp, self._device = model, layer, kv.layers[-1], tp, device
        self.states = torch.zeros(states.shape, dtype=states.dtype, device=device)  # of each slot's last tokens
        self._spare, self._most = len(self.states) - 1, states.shape[1] - 1
        self._first = [-1] * len(self.states)  # position of the token whose state is a slot's first
        # Which of a slot's states is that of its newest token: not the last one, where drafts were refused.
        self._last = torch.zeros(len(self.states), dtype=torch.int64, device=device)
        self._graphs = DecodeGraphs(self._draft, kernels, device, self._spare)

    def forget(self) -> None:
        self._graphs.forget()

    def follow(self, batch: ForwardBatch, states: Tensor) -> None:
        """Part of every pass, recorded with it. states [T, H] of the batch's tokens."""
        slots = batch.slot_ids.long()
        if batch.kind == "decode":  # of no drafts: else the layer would have had these tokens
            self._layer.append(self.states[slots, self._last[slots]], batch, self._kv)
        if batch.kind != "prefill":
            self._last.index_fill_(0, slots, 0)
            self.states[slots, : batch.q_len] = states.unflatten(0, (len(slots), batch.q_len))
            return
        of_token = batch.token_slots.long()
        goes_on = of_token == of_token.roll(1)  # no slot is there twice
        goes_on[:1].zero_()  # not an assignment, which a recording would take for a copy from the host
        before = torch.where(goes_on[:, None], states.roll(1, 0), self.states[of_token, self._last[of_token]])
        self._layer.append(before.masked_fill((batch.positions == 0)[:, None], 0.0), batch, self._kv)
        self._last.index_fill_(0, slots, 0)
        self.states[slots, 0] = states[(batch.cu_seqlens_q[1:].long() - 1).clamp(min=0)]

    def note(self, kind: Kind, items: Sequence[SlotTokens]) -> None:
        """Such a pass has been computed."""
        for item in items:
            self._first[item.slot] = item.start + (len(item.token_ids) - 1 if kind == "prefill" else 0)

    def commit(self, slots: Sequence[int], num_tokens: Sequence[int]) -> None:
        """So many tokens of each slot's verify pass stay."""
        index, last = torch.tensor([[*slots], [max(n - 1, 0) for n in num_tokens]]).to(self._device)
        self._last[index] = last

    def fork(self, parent: int, child: int) -> None:
        self.states[child] = self.states[parent]
        self._last[child] = self._last[parent]
        self._first[child] = self._first[parent]

    def propose(self, items: Sequence[SlotTokens]) -> Tensor:
        """Drafted tokens [n, most] int64; of several ranks, all have rank 0's.

        items: the newest tokens of each slot, most + 1 or fewer, up to the one that is in its sequence and not in the cache;
        pages for it and `most` more must be there."""
        items = [self._since(item) for item in items]
        width = self._most + 1
        ends = [i * width + len(item.token_ids) - 1 for i, item in enumerate(items)]
        rows, slots = torch.tensor([ends, [item.slot for item in items]]).to(self._device)
        filled = [SlotTokens(i.slot, i.start, [*i.token_ids, *[0] * (width - len(i.token_ids))]) for i in items]
        states = self._graphs.run("verify", filled)[rows]
        drafted = [self._best(states)]
        for step in range(1, self._most):
            self.states[slots, 0] = states
            following = [SlotTokens(i.slot, i.start + len(i.token_ids) - 1 + step, [0]) for i in items]
            states = self._graphs.run("decode", following, drafted[-1])
            drafted.append(self._best(states))
        return torch.stack(drafted, dim=1)

    def warm_up(self) -> None:
        self.propose([SlotTokens(self._spare, 0, [0])])

    def record_all(self) -> None:
        slots = drafted_slots(self._spare, self._most)
        self._graphs.record_all("verify", self._most + 1, slots)
        self._graphs.record_all("decode", 1, slots)

    def _since(self, item: SlotTokens) -> SlotTokens:
        """Those of the tokens that follow the one whose state is the slot's first. If that is another sequence's (after a
        snapshot was restored), the last one: its draft will be a poor one."""
        skipped = self._first[item.slot] + 1 - item.start
        if not 0 <= skipped < len(item.token_ids):
            skipped = len(item.token_ids) - 1
        return SlotTokens(item.slot, item.start + skipped, item.token_ids[skipped:])

    def _draft(self, batch: ForwardBatch) -> Tensor:
        states = self.states[batch.slot_ids.long(), : batch.q_len].flatten(0, 1)
        return self._layer(states, batch, self._kv)

    def _best(self, states: Tensor) -> Tensor:
        """[n, H] -> [n] int64."""
        return self._tp.broadcast(self._tp.gather(self._model.vocabulary.logits(states)).argmax(dim=-1))
