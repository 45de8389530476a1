"""The memory plan: every byte an engine will allocate, known before the first one is.

`plan_memory` builds the model on a source that only counts, adds the caches' shapes, and decides how many pages fit. The
engine allocates from the same shapes, so plan and reality agree to the byte; `pocketllm plan` prints it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pocketllm.cache.formats import KVFormat, kv_format
from pocketllm.cache.kv import KVCacheShape
from pocketllm.cache.state import StateShape
from pocketllm.engine.graphs import padded_sizes, prefill_sizes
from pocketllm.engine.mtp import drafted_slots, states_spec
from pocketllm.engine.sampler import Sampler
from pocketllm.errors import OptionError
from pocketllm.kernels import select_kernels
from pocketllm.kernels.types import TensorSpec
from pocketllm.layers.rope import RotaryEmbedding
from pocketllm.models.config import ModelConfig
from pocketllm.models.qwen import QwenModel
from pocketllm.models.registry import ConfigStorage
from pocketllm.options import EngineOptions
from pocketllm.parallel import MOST_PARTS, NUM_PLACES, SMALL_BATCH, TensorParallel, inbox_nbytes, place_nbytes
from pocketllm.weights.base import Policy
from pocketllm.weights.dummy import PlannedSource
from pocketllm.weights.reader import Storage

# What a CUDA process takes before the first tensor: context, library handles, graphs. An assumption until it is measured.
CUDA_RUNTIME = 1536 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank, and the sizes they come from."""

    kv: KVCacheShape
    state: StateShape
    max_context: int  # tokens one slot may hold
    longest_prefill: int  # tokens of a prefill pass
    weights: int  # and copies of the K biases, where the KV format leaves them to attention
    tables: int  # cos and sin of the rotary embedding
    sampler: int
    logits: int  # [rows, vocabulary] float32 of the largest pass
    graphs: int  # intermediates of recorded passes, kept once each size of batch has been run
    workspace: int  # largest sum of a pass's intermediate tensors; taken and given back during a pass
    runtime: int  # of the device's libraries; not allocated by the engine
    budget: int | None  # bytes the engine may take; None: not limited
    draft_states: TensorSpec | None = None  # what the model's own drafts are made of
    notes: tuple[str, ...] = ()  # what was chosen for the user, in words

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name, in the order in which they are shown. Their sum is the total."""
        return {
            "weights": self.weights,
            "kv": self.kv.nbytes,
            "state": self.state.nbytes,
            "tables": self.tables,
            "sampler": self.sampler,
            "drafts": self._drafts,
            "logits": self.logits,
            "graphs": self.graphs,
            "workspace": self.workspace,
            "runtime": self.runtime,
        }

    @property
    def resident(self) -> int:
        """Bytes the engine allocates at construction and keeps."""
        return self.weights + self.tables + self.kv.nbytes + self.state.nbytes + self.sampler + self._drafts

    @property
    def _drafts(self) -> int:
        return 0 if self.draft_states is None else self.draft_states.nbytes + 8 * self.draft_states.shape[0]

    @property
    def total(self) -> int:
        return self.resident + self.logits + self.graphs + self.workspace + self.runtime

    @property
    def left(self) -> int | None:
        return None if self.budget is None else self.budget - self.total

    @property
    def fits(self) -> bool:
        return self.budget is None or self.total <= self.budget

    @property
    def kv_tokens(self) -> int:
        return self.kv.num_pages * self.kv.page_size


def compute_dtype(options: EngineOptions, device_type: str) -> torch.dtype:
    """auto: float32 on a CPU (its 16-bit float units are slow or missing), bfloat16 on a GPU."""
    if options.dtype == "auto":
        return torch.bfloat16 if device_type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, options.dtype)
    return dtype


def kv_format_of(options: EngineOptions, dtype: torch.dtype) -> KVFormat:
    """The format chosen; auto is the plain format of the compute type."""
    plain = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    return kv_format(plain if options.kv_cache_dtype == "auto" else options.kv_cache_dtype)


class Planner:
    """Everything about a model on a device that does not depend on slots, context and KV format, computed once."""

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        budget: int | None,
        device_type: str,
        storage: Storage | None,
    ) -> None:
        self.config, self.options, self.budget, self.device_type = config, options, budget, device_type
        self.dtype = compute_dtype(options, device_type)
        self.kernels = select_kernels(options.kernels, device_type)
        self.tp = TensorParallel(0, options.tensor_parallel)
        self._storage = storage or ConfigStorage(config)
        try:
            model, self.weights = self._model(self.tp)
        except ValueError as error:
            sizes = ", ".join(map(str, self._valid_sizes()))
            raise OptionError(
                f"tensor_parallel = {options.tensor_parallel}: {error}. This model can use {sizes}"
            ) from error
        self.key_biases = sum(bias.bias.nbytes for bias in model.key_biases() if bias is not None)
        self.runtime = CUDA_RUNTIME if device_type == "cuda" else 0

    def _model(self, tp: TensorParallel) -> tuple[QwenModel, int]:
        """One rank's model without memory, and the bytes of its weights. ValueError if it can't be sharded so."""
        policy = Policy.of(self.options, self.dtype, self.kernels)
        source = PlannedSource(self._storage, policy, tied_head=self.config.tie_word_embeddings)
        model = QwenModel(
            self.config,
            tp,
            self.kernels,
            source,
            max_context=1,
            dtype=self.dtype,
            device=torch.device("meta"),
            drop_key_bias=True,
            predicts_more=self.options.drafter == "mtp",
        )
        return model, source.nbytes

    def _valid_sizes(self) -> Iterator[int]:
        """Numbers of ranks that this model can be sharded over."""
        heads = self.config.num_heads
        for size in (n for n in range(1, heads + 1) if heads % n == 0):
            try:
                self._model(TensorParallel(0, size))
            except ValueError:
                continue
            yield size

    def with_options(self, **changes: Any) -> Planner:
        """The same with other slots, context, KV format or chunk: what is known of the model stays."""
        other = copy.copy(self)
        other.options = dataclasses.replace(self.options, **changes)
        return other

    def choose(self) -> MemoryPlan:
        """The plan for the options, with what they leave open (see `plan_memory`). OptionError for impossible ones."""
        config, options = self.config, self.options
        fmt = kv_format_of(options, self.dtype)
        try:
            fmt.planes(config.head_dim)
        except ValueError as error:
            raise OptionError(f"kv_cache_dtype = {fmt.name!r} does not suit this model: {error}") from error
        slots, page = options.max_batch_size, options.page_size
        notes: list[str] = []
        limit = config.max_position_embeddings
        if options.max_context is not None and options.max_context > limit:
            raise OptionError(f"max_context = {options.max_context}: this model's limit is {limit} tokens")
        wanted = options.max_context or limit
        max_pages = -(-wanted // page)
        if options.kv_layout == "slots":
            if options.max_context is None:
                context = self.largest_context(slots, fmt)
                if context and context < limit:
                    max_pages = context // page
                    notes.append(f"max_context = {context}: the most that {slots} slots can own")
            return self.plan(slots, slots * max_pages, max_pages, fmt, tuple(notes))
        if options.kv_tokens is not None:
            pages = -(-options.kv_tokens // page)
            if options.max_context is not None and pages < max_pages:
                raise OptionError(
                    f"kv_tokens = {options.kv_tokens}: a pool that can't hold one slot of max_context = {wanted}: use "
                    f"kv_tokens >= {wanted}, or a smaller max_context"
                )
            if pages < slots:
                notes.append(f"pool of {slots * page} tokens: a page for each of {slots} slots is the least")
        else:
            pages = self.pages_that_fit(slots, max_pages, fmt)
            if pages < slots * max_pages:
                notes.append(f"pool of {pages * page} tokens: {slots} slots of {wanted} would be {slots * wanted}")
        if pages < max_pages and options.max_context is None and pages > 0:
            max_pages = pages
            notes.append(f"max_context = {pages * page}: one slot can't hold more than the pool")
        # A pool that can't hold one full slot, or one page a slot, is no plan: ask for what is needed, let `fits` say no.
        return self.plan(slots, max(pages, max_pages, slots), max_pages, fmt, tuple(notes))

    def plan(self, slots: int, pages: int, max_pages: int, fmt: KVFormat, notes: tuple[str, ...] = ()) -> MemoryPlan:
        """The plan for given sizes, whether it fits or not."""
        config, options = self.config, self.options
        context = min(max_pages * options.page_size, config.max_position_embeddings)
        if options.max_context is not None:
            context = min(context, options.max_context)
        rows = slots * (options.max_draft_tokens + 1)
        chunk = options.chunk_tokens(self.device_type)
        states = (
            states_spec(slots, options.max_draft_tokens, config.hidden_size, self.dtype)
            if options.drafter == "mtp"
            else None
        )
        return MemoryPlan(
            kv=KVCacheShape(
                kv_format=fmt,
                layout=options.kv_layout,
                num_layers=len(config.attention_layers) + (states is not None),
                num_slots=slots,
                num_pages=pages,
                max_pages=max_pages,
                page_size=options.page_size,
                num_kv_heads=self.tp.replicate_or_shard(config.num_kv_heads, "num_key_value_heads").size,
                head_dim=config.head_dim,
            ),
            state=self._state_shape(slots),
            max_context=context,
            longest_prefill=min(chunk, context),
            weights=self.weights + (self.key_biases if fmt.drops_key_bias else 0),
            tables=RotaryEmbedding.planned_nbytes(config.rope, context),
            sampler=sum(s.nbytes for s in Sampler.specs(slots, config.vocab_size)),
            logits=self._logits(max(rows, 1)),
            graphs=self._graphs(slots, min(chunk, context), context),
            workspace=self._workspace(chunk, rows, context),
            runtime=self.runtime,
            budget=self.budget,
            draft_states=states,
            notes=notes,
        )

    def _state_shape(self, slots: int) -> StateShape:
        gdn, tp, options = self.config.gated_delta, self.tp, self.options
        journal = options.max_draft_tokens + 1 if options.max_draft_tokens else 0
        dtype = (
            self.dtype if self.kernels.keeps_dtype else torch.float32
        )  # of the convolution's inputs, as kernels read it
        if gdn is None:
            return StateShape(0, slots, 0, 0, 0, 0, 0, 0, journal, options.num_snapshots, dtype)
        key_heads = tp.shard(gdn.num_key_heads, "linear_num_key_heads").size
        return StateShape(
            num_layers=len(self.config.state_layers),
            num_slots=slots,
            conv_dim=gdn.conv_dim // gdn.num_key_heads * key_heads,
            conv_taps=gdn.conv_kernel - 1,
            num_key_heads=key_heads,
            num_value_heads=gdn.num_value_heads // gdn.num_key_heads * key_heads,
            key_head_dim=gdn.key_head_dim,
            value_head_dim=gdn.value_head_dim,
            journal_len=journal,
            num_snapshots=options.num_snapshots,
            dtype=dtype,
        )

    def _graphs(self, slots: int, longest_prefill: int, context: int) -> int:
        """Bound of what recorded passes keep, for batches of every padded size: logits, and every block's intermediates.

        On a GPU all recordings share one pool, where a block's intermediates make room for the next one's.
        """
        if not self.kernels.captures:
            return 0
        sizes = padded_sizes(slots)
        if self.options.max_draft_tokens:  # verify passes too
            sizes += [size * (self.options.max_draft_tokens + 1) for size in sizes]
        vocab = self.tp.shard(self.config.vocab_size, "vocab_size").size
        drafting = padded_sizes(drafted_slots(slots, self.options.max_draft_tokens))
        of_drafts = sum(drafting) * (self.options.max_draft_tokens + 2) if self.options.drafter == "mtp" else 0  # rows
        if self.device_type == "cuda":
            of_drafts *= self.config.hidden_size * self.dtype.itemsize
            passes = [self._intermediates(max(sizes), context, prefill=False)]
            passes += [
                self._intermediates(n, context, prefill=True) for n in prefill_sizes(self.kernels, longest_prefill)
            ]
            return sum(sizes) * 4 * vocab + of_drafts + max(passes)
        rows = sum(-(-size // 8) * 8 for size in sizes)  # a product's input is prepared in tiles of 8 rows
        of_drafts *= 8 * self._row_bytes()
        return rows * (self.config.num_layers * self._row_bytes() + 4 * vocab) + of_drafts

    def _logits(self, rows: int) -> int:
        """Rank 0's: its own columns, those of all ranks as they arrive, and side by side."""
        vocab, size = self.config.vocab_size, self.tp.size
        return rows * 4 * (vocab if size == 1 else vocab // size + 2 * vocab)

    def _row_bytes(self) -> int:
        """Bound of the intermediates of one token in the widest block."""
        config, size = self.config, self.tp.size
        heads = config.num_heads // size * (2 if config.attn_output_gate else 1)
        kv_heads = self.tp.replicate_or_shard(config.num_kv_heads, "num_key_value_heads").size
        attention = (heads + 2 * kv_heads) * config.head_dim
        inner, widths = config.intermediate_size, [3 * attention]
        if (moe := config.moe) is not None:
            inner = max(inner, moe.expert_intermediate_size * moe.top_k + moe.shared_intermediate_size)
            if self.kernels.keeps_dtype:  # and computes all pairs of a token and an expert at once
                of_pairs = moe.top_k * (moe.expert_intermediate_size // size + config.hidden_size)
                widths.append(of_pairs + 3 * moe.shared_intermediate_size // size + 6 * moe.num_experts)
        widths.append(3 * inner // size)
        if config.gated_delta is not None:
            widths.append(4 * (config.gated_delta.conv_dim + config.gated_delta.value_dim) // size)
        return (4 * config.hidden_size + max(widths)) * (self.dtype.itemsize if self.kernels.keeps_dtype else 4)

    def _bridge(self, tokens: int) -> int:
        """Bound of what one bridge of so many tokens takes on a GPU (see `kernels.triton.bridge`): parts of its products'
        sums, in float32, and rows in other forms. Longer passes take none."""
        if self.device_type != "cuda":
            return 0
        parts = 2 * MOST_PARTS * self.config.hidden_size + 5 * 2 * self.config.intermediate_size // self.tp.size
        return min(tokens, SMALL_BATCH) * 4 * parts

    def _intermediates(self, tokens: int, context: int, *, prefill: bool) -> int:
        """Bound of what is live at a time in a pass of so many tokens: the widest block's tensors, and one attention call's
        own."""
        rowwise = max(tokens * self._row_bytes(), self._bridge(tokens))
        heads, head_dim = self.tp.shard(self.config.num_heads, "num_attention_heads").size, self.config.head_dim
        return rowwise + self.kernels.attention_workspace(heads, head_dim, tokens, context, prefill=prefill)

    def _workspace(self, chunk: int, rows: int, context: int) -> int:
        """Bound of any pass's live intermediates, and what ranks share: chunks of a prefill, rows of decode or verify."""
        size, hidden, shared = self.tp.size, self.config.hidden_size, 0
        if size > 2:  # the summands of all ranks (see `engine.collectives`)
            shared += (size + 1) * min(max(chunk, rows), SMALL_BATCH) * hidden * 4
        if size > 1 and self.device_type == "cuda":
            shared += NUM_PLACES * (place_nbytes(hidden) + inbox_nbytes(hidden, size))
        passes = self._intermediates(chunk, context, prefill=True), self._intermediates(rows, context, prefill=False)
        return max(shared + max(passes), Sampler.workspace(rows, self.config.vocab_size))

    def pages_that_fit(self, slots: int, max_pages: int, fmt: KVFormat) -> int:
        """Most pool pages (0 if not even an empty pool fits), each slot using at most max_pages."""
        if self.budget is None:
            return slots * max_pages
        empty = self.plan(slots, 0, max_pages, fmt)
        return min(max((self.budget - empty.total) // max(empty.kv.page_nbytes, 1), 0), slots * max_pages)

    def largest_context(self, slots: int, fmt: KVFormat) -> int:
        """Most tokens each of `slots` slots can hold at once, a multiple of the page size (0: none)."""
        page = self.options.page_size
        low, high = 0, -(-self.config.max_position_embeddings // page)
        while low < high:
            middle = (low + high + 1) // 2
            if self.plan(slots, slots * middle, middle, fmt).fits:
                low = middle
            else:
                high = middle - 1
        return min(low * page, self.config.max_position_embeddings)


def plan_memory(
    config: ModelConfig,
    options: EngineOptions,
    device_memory: int | None,
    device_type: str = "cpu",
    storage: Storage | None = None,
) -> MemoryPlan:
    """The plan for one rank with at most device_memory bytes (None: unlimited). storage: how the checkpoint keeps its
    weights (`Checkpoint.storage`); None: as its config says.

    Sizes that the options leave open are chosen here and named in `notes`. The plan may not fit (`fits`): a caller that
    wants to allocate calls `memory_advice.check_fits`.
    """
    return Planner(config, options, device_memory, device_type, storage).choose()


def gib(nbytes: int) -> str:
    """Bytes in words: GiB, or MiB below one GiB."""
    return f"{nbytes / 2**30:.2f} GiB" if abs(nbytes) >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
