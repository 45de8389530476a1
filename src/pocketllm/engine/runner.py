"""`ModelRunner`: one rank's device side. Holds weights and caches, turns token ids into logits; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pocketllm.cache.kv import KVCache
from pocketllm.cache.pages import PageEdits
from pocketllm.cache.state import StateCache
from pocketllm.engine.graphs import DecodeGraphs
from pocketllm.engine.memory_plan import MemoryPlan, compute_dtype
from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import AttentionMask
from pocketllm.layers.batch import ForwardBatch, Kind
from pocketllm.models.config import ModelConfig
from pocketllm.models.qwen import QwenModel
from pocketllm.options import EngineOptions
from pocketllm.parallel import TensorParallel
from pocketllm.weights.source import WeightSource


@dataclass(frozen=True)
class SlotTokens:
    """One slot's part of a pass: its next tokens, the first of them at position `start`."""

    slot: int
    start: int
    token_ids: Sequence[int]
    wants_logits: bool = True  # prefill: only a prompt's last chunk does


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
        self.model = QwenModel(
            config,
            tp or TensorParallel(),
            kernels,
            source,
            max_context=plan.max_context,
            dtype=compute_dtype(options, device.type),
            device=device,
            drop_key_bias=plan.kv.kv_format.drops_key_bias,
            mask=AttentionMask(options.attention_window, options.attention_sinks),
        )
        self.kv = KVCache(plan.kv, device, self.model.key_biases())
        self.state = StateCache(plan.state, device, kernels)
        self._graphs = DecodeGraphs(self._forward, kernels)

    def apply(self, edits: PageEdits, resets: Sequence[int]) -> None:
        """Bring block tables, shared pages and cleared slots up to date before a pass."""
        self.kv.apply(edits)
        for slot in resets:
            self.state.reset(slot)

    @torch.inference_mode()
    def forward(self, kind: Kind, items: Sequence[SlotTokens], *, all_logits: bool = False) -> Tensor:
        """Appends the items' tokens to their slots; returns logits [m, V] float32.

        prefill: one row for each item with wants_logits, of its last token (all_logits: for every token). decode, verify:
        a row for every token, in order; verify leaves the recurrent state to `commit`.
        """
        if kind == "prefill":
            return self._forward(self._batch(kind, items, all_logits))
        q_len = len(items[0].token_ids)
        filler = SlotTokens(self.kv.shape.num_slots, 0, [0] * q_len)  # writes to the spare slot
        padding = [filler] * (self._graphs.padded_size(len(items)) - len(items))
        return self._graphs.run(self._batch(kind, [*items, *padding], all_logits))[: len(items) * q_len]

    def _forward(self, batch: ForwardBatch) -> Tensor:
        return self.model(batch, self.kv, self.state)

    def warm_up(self) -> None:
        """Runs every kind of pass once, in the spare slot."""
        spare = self.kv.shape.num_slots
        self.forward("prefill", [SlotTokens(spare, 0, [0, 0])])
        self.forward("decode", [SlotTokens(spare, 2, [0])])
        if self.state.shape.journal_len:
            self.forward("verify", [SlotTokens(spare, 3, [0] * self.state.shape.journal_len)])
            self.commit([spare], [1])

    def commit(self, slots: Sequence[int], num_tokens: Sequence[int]) -> None:
        """Move recurrent state forward by the accepted tokens of the last verify pass."""
        self.state.commit(slots, num_tokens)

    def _batch(self, kind: Kind, items: Sequence[SlotTokens], all_logits: bool) -> ForwardBatch:
        lengths = [len(item.token_ids) for item in items]
        bounds = [0]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        rows: list[int] | None = None
        if kind == "prefill" and not all_logits:
            rows = [end - 1 for end, item in zip(bounds[1:], items, strict=True) if item.wants_logits]
        positions = [p for item in items for p in range(item.start, item.start + len(item.token_ids))]

        def tensor(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        return ForwardBatch(
            kind=kind,
            q_len=max(lengths),
            token_ids=tensor([t for item in items for t in item.token_ids], torch.int64),
            positions=tensor(positions, torch.int64),
            token_slots=tensor([item.slot for item in items for _ in item.token_ids]),
            slot_ids=tensor([item.slot for item in items]),
            cu_seqlens_q=tensor(bounds),
            kv_lens=tensor([item.start + len(item.token_ids) for item in items]),
            logits_rows=None if rows is None else tensor(rows, torch.int64),
        )
