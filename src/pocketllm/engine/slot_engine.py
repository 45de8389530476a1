"""`SlotEngine`: a model, its caches and explicit slots. The caller holds slots and decides what runs in each."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pocketllm.engine.inputs import SlotTokens
from pocketllm.engine.lead import AnyRunner, Ranks
from pocketllm.engine.memory_plan import MemoryPlan
from pocketllm.engine.passes import PassRunner
from pocketllm.engine.rank import Launch, RankBuilder, build_group
from pocketllm.engine.ranks import start_ranks
from pocketllm.engine.slots import SlotTable, SlotUse
from pocketllm.errors import OptionError, RankError, RequestError, SlotError
from pocketllm.kernels.protocol import Kernels
from pocketllm.layers.batch import Kind
from pocketllm.models.registry import Checkpoint, read_model
from pocketllm.options import EngineOptions
from pocketllm.parallel import TensorParallel


@dataclass(frozen=True)
class SlotRequest:
    """Tokens to append to a slot: any number for prefill, one for decode, drafts after the last token for verify."""

    slot: int
    token_ids: Sequence[int]


@dataclass(frozen=True)
class SlotResult:
    """logits float32 after the last token [V], or of every token [Q, V] for verify; or why there are none."""

    slot: int
    logits: Tensor | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Snapshot:
    """A point of a slot's sequence that it can return to."""

    slot: int
    index: int
    kv_len: int


class SlotEngine:
    """Slots on one model. Errors in how a call is made raise and change nothing; an error in one slot's computation is
    that slot's result, the slot is left as it was before the call, and the others are not affected.

    Everything is allocated at construction, from `self.plan`, or nothing is. Not thread-safe.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint | None = None,
        options: EngineOptions | None = None,
        *,
        backend: Kernels | None = None,
        launch: Launch = start_ranks,
        **option_values: Any,
    ) -> None:
        """model: folder, GGUF file, hub id, shape name (dummy weights), or None for the embedded model.

        Options come as an `EngineOptions` or by name. backend: kernels of your own instead of those options.kernels names.
        launch: how the other ranks come to life, if tensor_parallel asks for some. ModelError, OptionError, or
        MemoryPlanError (before anything is allocated) say what to change.
        """
        if options is not None and option_values:
            raise OptionError("give either options or single options by name, not both")
        options = options or EngineOptions.of(**option_values)
        if options.tensor_parallel > 1:
            if backend is not None:
                raise OptionError("kernels of your own run on one rank: tensor_parallel = 1, or one of options.kernels")
            options = replace(options, threads=max(options.num_threads() // options.tensor_parallel, 1))  # of one rank
        self.options = options
        self.checkpoint = model if isinstance(model, Checkpoint) else read_model(model, options.load_format)
        self.config = self.checkpoint.config
        self.has_state = bool(self.config.state_layers)
        builder = RankBuilder.of(self.checkpoint, options, 0, backend)
        self.device, self.kernels = builder.device, builder.kernels
        self.plan: MemoryPlan
        self.runner: AnyRunner
        self._ranks: Ranks | None = None
        if options.tensor_parallel == 1:
            self.plan = builder.plan(builder.budget())
            self.runner = builder.build(self.plan, TensorParallel())
        else:
            self.plan, self.runner, self._ranks = build_group(builder, launch)
            weakref.finalize(self, self._ranks.close)
        self.kernels.warm_up(self.runner.warm_up)
        self.slots = SlotTable(self.plan.kv.num_slots, self.plan.max_context, self.plan.kv.page_table())
        self.passes = PassRunner(self.runner, self.slots, options.chunk_tokens(self.device.type), self.has_state)
        self._pending: dict[int, int] = {}  # slot -> tokens of its verify pass

    @property
    def failure(self) -> RankError | None:
        """Why the engine can't compute any more: a rank has failed, seen also while nothing runs. From any thread."""
        return None if self._ranks is None else self._ranks.failure

    def check_ranks(self) -> None:
        """Raises `failure`, if there is one: what the device has computed since means nothing."""
        if (failure := self.failure) is not None:
            raise failure

    def close(self) -> None:
        """End the other ranks' processes, if there are any; they also end with the engine's last reference, and at exit.
        The engine can't compute any more then."""
        if self._ranks is not None:
            self._ranks.close()

    # -- slots -------------------------------------------------------------------------------------------------------

    def acquire_slot(self, num_tokens: int | None = None) -> int:
        """A fresh slot with num_tokens reserved (None: an equal share of the pool; at most max_context).

        NoFreeSlot or OutOfPages; SlotError for a number below 1."""
        if num_tokens is None:
            num_tokens = self.slots.pages.fair_share(self.slots.num_slots)
        if num_tokens < 1:
            raise SlotError(f"num_tokens = {num_tokens}: reserve at least 1, or None for an equal share of the pool")
        num_tokens = min(num_tokens, self.slots.max_context)
        return self.slots.acquire(num_tokens, SlotUse.ACQUIRED)

    def release_slot(self, slot: int) -> None:
        """Give a slot back with all it holds."""
        self.slots.expect(slot, SlotUse.ACQUIRED, SlotUse.VERIFYING)
        self._pending.pop(slot, None)
        self.slots.release(slot)

    def fork_slot(self, slot: int, num_tokens: int | None = None) -> int:
        """A new slot with the same tokens; full pages are shared until one of the two writes to them.

        num_tokens: reservation of the new slot in all (None: an equal share of the pool, at least what it holds)."""
        self.slots.expect(slot, SlotUse.ACQUIRED)
        if num_tokens is None:
            num_tokens = self.slots.pages.fair_share(self.slots.num_slots)
        held = self.slots.kv_lens[slot]
        child = self.slots.fork(slot, min(max(num_tokens, held), self.slots.max_context), SlotUse.ACQUIRED)
        self._flush()
        self.runner.fork(slot, child)
        return child

    def slot_length(self, slot: int) -> int:
        """Tokens the slot holds."""
        self.slots.use_of(slot)
        return self.slots.kv_lens[slot]

    def truncate_slot(self, slot: int, kv_len: int) -> None:
        """Forget the tokens from kv_len on. Models with recurrent state can only be cut at 0; use snapshots for others."""
        self.slots.expect(slot, SlotUse.ACQUIRED)
        held = self.slots.kv_lens[slot]
        if not 0 <= kv_len <= held:
            raise SlotError(f"slot {slot} holds {held} tokens, it can't be cut at {kv_len}")
        if self.has_state and 0 < kv_len < held:
            raise SlotError("recurrent state can't be cut at a token: save_snapshot() there and restore_snapshot() it")
        if kv_len == 0:
            self.slots.restart(slot)
        else:
            self.slots.truncate(slot, kv_len)

    def save_snapshot(self, slot: int, index: int) -> Snapshot:
        """Remember this point of the slot's sequence in snapshot `index` (0 to num_snapshots - 1)."""
        self.slots.expect(slot, SlotUse.ACQUIRED)
        if not 0 <= index < self.options.num_snapshots:
            raise SlotError(f"snapshot {index}: the engine was built with num_snapshots = {self.options.num_snapshots}")
        self._flush()
        self.runner.save_snapshot(slot, index)
        return Snapshot(slot, index, self.slots.kv_lens[slot])

    def restore_snapshot(self, snapshot: Snapshot) -> None:
        """Return the slot to the point of the snapshot, which must be a prefix of what it holds now."""
        slot = snapshot.slot
        self.slots.expect(slot, SlotUse.ACQUIRED)
        if self.slots.kv_lens[slot] < snapshot.kv_len:
            raise SlotError(f"slot {slot} holds {self.slots.kv_lens[slot]} tokens, the snapshot {snapshot.kv_len}")
        self._flush()
        self.slots.truncate(slot, snapshot.kv_len)
        self.runner.restore_snapshot(slot, snapshot.index)

    # -- passes ------------------------------------------------------------------------------------------------------

    def batch_prefill(self, requests: Sequence[SlotRequest], *, all_logits: bool = False) -> list[SlotResult]:
        """Append any number of tokens to each slot, in passes of `prefill_chunk`; logits after the last one, [V].

        all_logits: after every token, [Q, V], in one pass. That is Q * V floats beyond the memory plan: keep Q small.
        """
        return self._run_explicit("prefill", requests, all_logits=all_logits)

    def batch_decode(self, requests: Sequence[SlotRequest]) -> list[SlotResult]:
        """Append one token to each slot; logits after it, [V]."""
        for request in requests:
            if len(request.token_ids) != 1:
                raise RequestError(f"decode takes one token a slot, slot {request.slot} has {len(request.token_ids)}")
        return self._run_explicit("decode", requests)

    def batch_verify(self, requests: Sequence[SlotRequest]) -> list[SlotResult]:
        """Append the same number of tokens (the last one and its drafts) to each slot; logits of every token, [Q, V].

        The slots then wait for `commit`, which says how many of the tokens stay.
        """
        lengths = {len(request.token_ids) for request in requests}
        if len(lengths) > 1:
            raise RequestError(f"verify takes equally many tokens a slot, not {sorted(lengths)}: pad the drafts")
        if any(n > self.options.max_draft_tokens + 1 for n in lengths):
            raise RequestError(
                f"{max(lengths)} tokens to verify; the engine was built with max_draft_tokens = "
                f"{self.options.max_draft_tokens}, so at most {self.options.max_draft_tokens + 1}"
            )
        return self._run_explicit("verify", requests)

    def commit(self, slots: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Keep the first num_accepted[i] tokens of slot i's last verify pass, in KV and recurrent state alike."""
        if len(slots) != len(num_accepted) or len(set(slots)) != len(slots):
            raise SlotError("commit needs one count for each slot, and each slot once")
        for slot, count in zip(slots, num_accepted, strict=True):
            self.slots.expect(slot, SlotUse.VERIFYING)
            if not 0 <= count <= self._pending[slot]:
                raise SlotError(f"slot {slot} verified {self._pending[slot]} tokens, {count} can't be accepted")
        self.runner.commit(slots, num_accepted)
        for slot, count in zip(slots, num_accepted, strict=True):
            kept = self.slots.kv_lens[slot] - self._pending.pop(slot) + count
            self.slots.truncate(slot, kept)
            self.slots.set_use(slot, SlotUse.ACQUIRED)

    def check_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """The ids as a list of ints; RequestError if there are none or one is out of the vocabulary."""
        if isinstance(token_ids, str) or not isinstance(token_ids, Iterable):
            raise RequestError(f"{token_ids!r}: token ids are a sequence of whole numbers")
        ids = token_ids.tolist() if isinstance(token_ids, Tensor) else list(token_ids)
        if not ids:
            raise RequestError("no tokens: give at least one")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.config.vocab_size:
                raise RequestError(f"token id {token!r}: this model's ids are 0 to {self.config.vocab_size - 1}")
        return ids

    def _run_explicit(
        self, kind: Kind, requests: Sequence[SlotRequest], *, all_logits: bool = False
    ) -> list[SlotResult]:
        seen: set[int] = set()
        for request in requests:
            self.slots.expect(request.slot, SlotUse.ACQUIRED)
            if request.slot in seen:
                raise SlotError(f"slot {request.slot} stands twice in one batch")
            seen.add(request.slot)
        results: dict[int, SlotResult] = {}
        items: list[SlotTokens] = []
        for request in requests:
            try:
                ids = self.check_tokens(request.token_ids)
                items.append(SlotTokens(request.slot, self.slots.prepare_write(request.slot, len(ids)), ids))
            except (RequestError, SlotError) as error:
                results[request.slot] = SlotResult(request.slot, error=error)
        if items:
            histories = [partial(self._held, item.slot) for item in items]
            if kind == "prefill" and not all_logits:
                passed = self.passes.prefill(items, histories)
            else:
                passed = self.passes.run(kind, items, histories, all_logits=all_logits)
            for item, result in zip(items, passed, strict=True):
                results[item.slot] = self._keep(kind, item, result.logits, result.error)
            self.check_ranks()
        return [results[request.slot] for request in requests]

    def _keep(self, kind: Kind, item: SlotTokens, logits: Tensor | None, error: Exception | None) -> SlotResult:
        """Count the item's tokens as held, unless its pass failed or gave numbers that are not finite."""
        slot = item.slot
        if error is None and logits is not None and not bool(torch.isfinite(logits).all()):
            error = RequestError(f"slot {slot}: the model's logits are not finite")
            self.passes.undo(item, partial(self._held, slot))
        if error is not None:
            return SlotResult(slot, error=error)
        self.slots.kv_lens[slot] += len(item.token_ids)
        self.slots.token_ids[slot] += item.token_ids
        if kind == "verify":
            self._pending[slot] = len(item.token_ids)
            self.slots.set_use(slot, SlotUse.VERIFYING)
        return SlotResult(slot, None if logits is None else logits.clone())  # a replay writes over its own

    def _held(self, slot: int) -> Sequence[int]:
        return self.slots.token_ids[slot]

    def _flush(self) -> None:
        """Bring the device up to date with page edits and resets made since the last pass."""
        self.runner.apply(*self.slots.take_changes())
