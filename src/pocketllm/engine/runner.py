"""`ModelRunner`: one rank's device side. Holds weights and caches, turns token ids into logits; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pocketllm.cache.kv import KVCache
from pocketllm.cache.pages import PageEdits
from pocketllm.cache.state import StateCache
from pocketllm.engine.graphs import DecodeGraphs, PrefillGraphs
from pocketllm.engine.inputs import SlotTokens, pack
from pocketllm.engine.memory_plan import MemoryPlan, compute_dtype
from pocketllm.engine.mtp import MtpDrafts
from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import AttentionMask, PrefillPart
from pocketllm.layers.batch import ForwardBatch, Kind
from pocketllm.models.config import ModelConfig
from pocketllm.models.qwen import QwenModel
from pocketllm.options import EngineOptions
from pocketllm.parallel import SMALL_BATCH, TensorParallel
from pocketllm.weights.source import WeightSource


class ModelRunner:
    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        plan: MemoryPlan,
        source: WeightSource,
        kernels: Kernels,
        device: torch.device,
        tp: TensorParallel | None = None,
    ) -> None:
        """Allocates everything the plan says is resident, caches last: weights are the likeliest to fail."""
        self.device = device
        self._kernels = kernels
        self._tp = tp = tp or TensorParallel()
        self.model = QwenModel(
            config,
            tp,
            kernels,
            source,
            max_context=plan.max_context,
            dtype=compute_dtype(options, device.type),
            device=device,
            drop_key_bias=plan.kv.kv_format.drops_key_bias,
            mask=AttentionMask(options.attention_window, options.attention_sinks),
            predicts_more=plan.draft_states is not None,
        )
        self.kv = KVCache(plan.kv, device, self.model.key_biases())
        self.state = StateCache(plan.state, device, kernels)
        self._drafts: MtpDrafts | None = None
        if plan.draft_states is not None and self.model.mtp is not None:
            self._drafts = MtpDrafts(self.model, self.model.mtp, self.kv, kernels, tp, plan.draft_states, device)
        self._graphs = DecodeGraphs(self._forward, kernels, device, spare_slot=plan.kv.num_slots)
        self._prefills = PrefillGraphs(self._last_states, kernels, device, plan.kv.num_slots, plan.longest_prefill)

    def forget_recordings(self) -> None:
        """Recorded passes are made again when next needed. (A group of ranks can't end while one holds its collectives.)"""
        self._graphs.forget()
        self._prefills.forget()
        if self._drafts is not None:
            self._drafts.forget()

    def apply(self, edits: PageEdits, resets: Sequence[int]) -> None:
        """Bring block tables, shared pages and cleared slots up to date before a pass."""
        self.kv.apply(edits)
        for slot in resets:
            self.state.reset(slot)

    @torch.inference_mode()
    def forward(self, kind: Kind, items: Sequence[SlotTokens], *, all_logits: bool = False) -> Tensor:
        """Appends the items' tokens to their slots; returns logits [m, V] float32.

        prefill: one row for each item with wants_logits, of its last token (all_logits: for every token). decode, verify:
        a row for every token, in order; verify leaves the recurrent state to `commit`. Of several ranks, rank 0 gets them.
        """
        if kind == "prefill":
            logits = self.model.vocabulary.logits(self._prefill(items, all_logits))
        else:
            logits = self._graphs.run(kind, items)
        if self._drafts is not None:
            self._drafts.note(kind, items)
        return self._tp.gather(logits)

    def _prefill(self, items: Sequence[SlotTokens], all_logits: bool) -> Tensor:
        """What the logits are made of, [m, H]."""
        states = None if all_logits else self._prefills.run(items)
        if states is not None:
            wanted = [i for i, item in enumerate(items) if item.wants_logits]
            return states[: len(wanted)] if wanted == list(range(len(wanted))) else states[wanted]
        layout, block = pack("prefill", items, all_logits=all_logits, pinned=self.device.type == "cuda")
        batch = layout.batch(block.to(self.device, non_blocking=True))
        parts = [PrefillPart(i.slot, len(i.token_ids), i.start + len(i.token_ids)) for i in items]
        return self._last_states(replace(batch, parts=tuple(parts)))

    @torch.inference_mode()
    def decode_tokens(self, items: Sequence[SlotTokens], token_ids: Tensor) -> Tensor:
        """A decode pass as `forward` runs it, of tokens [n] int64 that only rank 0's device knows yet."""
        return self._tp.gather(self._graphs.run("decode", items, self._tp.broadcast(token_ids)))

    @torch.inference_mode()
    def propose(self, items: Sequence[SlotTokens]) -> Tensor:
        """The model's own drafts: see `engine.mtp.MtpDrafts.propose`. Only with `drafter="mtp"`."""
        assert self._drafts is not None
        return self._drafts.propose(items)

    def _forward(self, batch: ForwardBatch) -> Tensor:
        return self.model.vocabulary.logits(self._last_states(batch))

    def _last_states(self, batch: ForwardBatch) -> Tensor:
        if self._drafts is None:
            return self.model.last_states(batch, self.kv, self.state)
        states = self.model.states(batch, self.kv, self.state)
        self._drafts.follow(batch, states)
        return states if batch.logits_rows is None else states[batch.logits_rows]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs every kind of pass once, in the spare slot. On a GPU, records passes of all sizes too."""
        spare, journal_len = self.kv.shape.num_slots, self.state.shape.journal_len
        self.forward("prefill", [SlotTokens(spare, 0, [0, 0])])
        self.forward("decode", [SlotTokens(spare, 2, [0])])
        if journal_len:
            self.forward("verify", [SlotTokens(spare, 3, [0] * journal_len)])
            self.commit([spare], [1])
        if self._drafts is not None:
            self._drafts.warm_up()
        if self.device.type == "cuda" and self._kernels.captures:
            long = min(2 * SMALL_BATCH, len(self.model.rope.cos))  # tokens; other kernels serve products of many rows
            self.forward("prefill", [SlotTokens(spare, 0, [0] * long)])
            self._prefills.record_all()  # the longest of which takes the most memory
            self._graphs.record_all("decode", 1, spare)
            if journal_len:
                self._graphs.record_all("verify", journal_len, spare)
            if self._drafts is not None:
                self._drafts.record_all()

    def commit(self, slots: Sequence[int], num_tokens: Sequence[int]) -> None:
        """Move recurrent state forward by the accepted tokens of the last verify pass."""
        self.state.commit(slots, num_tokens)
        if self._drafts is not None:
            self._drafts.commit(slots, num_tokens)

    def fork(self, parent: int, child: int) -> None:
        """Copy the parent's recurrent state to the child. (KV pages are shared or copied by `apply`.)"""
        self.state.fork(parent, child)
        if self._drafts is not None:
            self._drafts.fork(parent, child)

    def save_snapshot(self, slot: int, index: int) -> None:
        self.state.save_snapshot(slot, index)

    def restore_snapshot(self, slot: int, index: int) -> None:
        self.state.restore_snapshot(slot, index)
