"""Token embedding and output head, which share one matrix in models that tie them."""

from __future__ import annotations

import torch
from torch import Tensor

from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import LinearWeight
from pocketllm.models.config import ModelConfig
from pocketllm.parallel import TensorParallel
from pocketllm.weights.source import Role, WeightSource


class Vocabulary:
    """embed: token ids -> rows; logits: hidden rows -> scores of every token."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, kernels: Kernels, source: WeightSource, dtype: torch.dtype
    ) -> None:
        rows, hidden = tp.shard(config.vocab_size, "vocab_size"), config.hidden_size
        self._kernels, self._dtype = kernels, dtype
        self.table = self._take(source, "model.embed_tokens", rows, hidden, "embedding")
        self.head = self.table if config.tie_word_embeddings else self._take(source, "lm_head", rows, hidden, "head")

    def _take(self, source: WeightSource, name: str, rows: int, hidden: int, role: Role) -> LinearWeight:
        (weight,) = source.linear([name], [rows], hidden, role=role)
        return weight

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H] in the compute type."""
        return self._kernels.embedding(token_ids, self.table, self._dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, H] -> [m, V] float32."""
        return self._kernels.linear(hidden, self.head).float()
