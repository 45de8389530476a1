"""The network: a stack of blocks, each attention or Gated DeltaNet followed by a dense or sparse feed-forward part.

One implementation serves Qwen2, 2.5, 3, 3-MoE, 3-Next, 3.5, 3.6, 3.8 and the Llama family; the config picks the parts.
"""

from __future__ import annotations

import itertools
from typing import cast

import torch
from torch import Tensor

from pocketllm.cache.kv import KVCache
from pocketllm.cache.state import StateCache
from pocketllm.kernels.protocol import Cross, Kernels
from pocketllm.kernels.types import Activations, AttentionMask, KeyBias, Readers
from pocketllm.layers.attention import Attention
from pocketllm.layers.batch import ForwardBatch
from pocketllm.layers.embedding import Vocabulary
from pocketllm.layers.norm import RMSNorm
from pocketllm.layers.rope import RotaryEmbedding
from pocketllm.models.block import Block
from pocketllm.models.config import ModelConfig
from pocketllm.models.mtp import MultiTokenPrediction
from pocketllm.parallel import FEED_FORWARD, MIXER, Summands, TensorParallel
from pocketllm.weights.source import WeightSource


class QwenModel:
    """Weights of one rank and the forward pass. Holds no cache: those are arguments."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        kernels: Kernels,
        source: WeightSource,
        *,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
        drop_key_bias: bool = False,
        mask: AttentionMask | None = None,
        predicts_more: bool = False,
    ) -> None:
        """drop_key_bias: leave the K bias out of K (the cache's format stores it so); see `kernels.types.KeyBias`.
        predicts_more: with the layer for drafts, which has the last layer of the KV cache. ModelError if there is none."""
        self.config, self._kernels, self._tp = config, kernels, tp
        self.rope = RotaryEmbedding(config.rope, max_context, device)
        self._mask = mask or AttentionMask()
        self.vocabulary = Vocabulary(config, tp, kernels, source, dtype)
        self.blocks = [
            Block(
                config,
                tp,
                kernels,
                source.scope(f"model.layers.{i}"),
                self.rope,
                layer_type,
                sparse=config.is_sparse(i),
                drop_key_bias=drop_key_bias,
            )
            for i, layer_type in enumerate(config.layer_types)
        ]
        for block, following in itertools.zip_longest(self.blocks, self.blocks[1:]):
            block.lead_to(following)
        self.norm = RMSNorm(config, kernels, source, "model.norm", config.hidden_size)
        self.mtp: MultiTokenPrediction | None = None
        if predicts_more:
            self.mtp = MultiTokenPrediction(config, tp, kernels, source, self.rope, self.vocabulary, self._mask)
        source.finish()

    def key_biases(self) -> list[KeyBias | None]:
        """Per attention layer, what `KVCache` needs to give K its bias back."""
        of_draft_layer = [] if self.mtp is None else [None]  # no model that has one has such biases
        return [*(b.mixer.key_bias for b in self.blocks if isinstance(b.mixer, Attention)), *of_draft_layer]

    def _way_on(self, block: Block, residual: Tensor) -> tuple[Readers, Cross | None]:
        """Who reads what the block's mixer gives, and what takes it to the next mixer in one, if anything does."""
        ops, tp, rows = self._kernels, self._tp, len(residual)
        places = [tp.place(index, rows) if ops.meets_ranks else None for index in (MIXER, FEED_FORWARD)]
        found = [place for place in places if place is not None]
        if block.bridge is not None and len(found) == (0 if tp.size == 1 else 2):
            cross = ops.bridge(block.bridge, rows, residual.dtype, found)
            if cross is not None:
                return block.bridge, cross
        return [block.mixer.out_proj.weight], None

    def last_states(self, batch: ForwardBatch, kv: KVCache, state: StateCache) -> Tensor:
        """All of a pass but its last product: what the logits of `batch.logits_rows` are made of, [m, H]."""
        out, residual = self._pass(batch, kv, state)
        if batch.logits_rows is not None:
            out = Summands.of(self._kernels.add_up(out, residual.dtype)[batch.logits_rows])
            residual = residual[batch.logits_rows]
        return cast(Tensor, self.norm.add(out, residual))  # as no readers were named

    def states(self, batch: ForwardBatch, kv: KVCache, state: StateCache) -> Tensor:
        """As `last_states`, of all tokens: [T, H]."""
        return cast(Tensor, self.norm.add(*self._pass(batch, kv, state)))

    def _pass(self, batch: ForwardBatch, kv: KVCache, state: StateCache) -> tuple[Summands, Tensor]:
        """What the last block adds [T, H], and what it is to be added to."""
        residual = self.vocabulary.embed(batch.token_ids)  # [T, H]: the running sum of all blocks
        kv_layers, state_layers = iter(kv.layers), iter(state.layers)
        out: Summands | None = None  # of the block before
        inputs: list[Tensor] | None = None  # of the mixer, if the block before has made them
        for block in self.blocks:
            mixer = block.mixer
            if inputs is None:
                x: Activations
                x = block.input_norm(residual) if out is None else block.input_norm.add(out, residual, mixer.readers)
                inputs = mixer.projection.outputs(x)
            readers, cross = self._way_on(block, residual)
            if isinstance(mixer, Attention):
                mixed = mixer.mix(inputs, batch, next(kv_layers), self._mask, readers)
            else:
                mixed = mixer.mix(inputs, batch, next(state_layers), readers)
            if cross is not None:
                inputs = cross(mixed, residual)  # of the last block, its summands
                out = Summands(inputs[0], self._tp.place(FEED_FORWARD, len(residual)))
            else:
                inputs, out = None, mixer.out_proj(mixed)
                out = block.feed_forward(block.post_norm.add(out, residual, block.feed_forward.readers))
        return cast(Summands, out), residual
