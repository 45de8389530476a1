"""Multi-token prediction: a block that says, from a token's last state and the token after it, what comes after that one.

Qwen3-Next and later were trained with one such layer (`mtp.*` in their checkpoints), after DeepSeek-V3 (arXiv 2412.19437,
2.2). Embedding and output head are the model's own, and so are the places of keys and values: token p's lie where its other
layers' lie. They come from token p and the state of token p - 1, which is zero for the first token.

Given its own result in place of a state, and the token it stands for, the block goes on to the token after.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from pocketllm.errors import ModelError
from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import AttentionMask, LayerKV
from pocketllm.layers.attention import Attention
from pocketllm.layers.batch import ForwardBatch
from pocketllm.layers.embedding import Vocabulary
from pocketllm.layers.linear import Linear
from pocketllm.layers.norm import RMSNorm
from pocketllm.layers.rope import RotaryEmbedding
from pocketllm.models.block import Block
from pocketllm.models.config import ModelConfig
from pocketllm.parallel import EMBEDDING, MIXER, TensorParallel
from pocketllm.weights.source import WeightSource


class MultiTokenPrediction:
    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        kernels: Kernels,
        source: WeightSource,
        rope: RotaryEmbedding,
        vocabulary: Vocabulary,
        mask: AttentionMask,
    ) -> None:
        """ModelError if the model has no such layer."""
        if not source.has("mtp.fc.weight"):
            raise ModelError(
                "drafter = 'mtp': no layer for multi-token prediction (mtp.*) is among the model's weights, or named by its "
                "config if they are dummies (Qwen3-Next, 3.5 and later have one, not as GGUF): use drafter = 'ngram'"
            )
        scope, hidden = source.scope("mtp"), config.hidden_size
        self._vocabulary, self._mask = vocabulary, mask
        self._embedding_norm = RMSNorm(config, kernels, scope, "pre_fc_norm_embedding", hidden)
        self._state_norm = RMSNorm(config, kernels, scope, "pre_fc_norm_hidden", hidden)
        self._joined = Linear(kernels, scope.linear(["fc"], [hidden], 2 * hidden))
        self._block = Block(
            config,
            tp,
            kernels,
            scope.scope("layers.0"),
            rope,
            "full_attention",
            sparse=config.moe is not None,
            drop_key_bias=False,
        )
        self._mixer = cast(Attention, self._block.mixer)
        self._norm = RMSNorm(config, kernels, scope, "norm", hidden)

    def __call__(self, states: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """states [T, H], of the tokens before the batch's (normed, as logits are made of them) -> [T, H], of which logits
        are made for the tokens after the batch's. Appends to kv."""
        block, residual = self._block, self._join(batch.token_ids, states, EMBEDDING)
        inputs = self._mixer.projection.outputs(block.input_norm(residual))
        mixed = self._mixer.mix(inputs, batch, kv, self._mask, [self._mixer.out_proj.weight])
        out = block.post_norm.add(self._mixer.out_proj(mixed), residual, block.feed_forward.readers)
        return cast(Tensor, self._norm.add(block.feed_forward(out), residual))  # as no readers were named

    def append(self, states: Tensor, batch: ForwardBatch, kv: LayerKV) -> None:
        """Only what a call leaves in the cache: all that is wanted of a prompt's tokens."""
        residual = self._join(batch.token_ids, states, MIXER)  # a pass begins with the other place, and may come next
        self._mixer.append(self._mixer.projection.outputs(self._block.input_norm(residual)), batch, kv)

    def _join(self, token_ids: Tensor, states: Tensor, place: int) -> Tensor:
        """[T, H], the embedding first."""
        embedded = self._embedding_norm(self._vocabulary.embed(token_ids, place))
        return self._joined(torch.cat((embedded, self._state_norm(states)), dim=-1))
