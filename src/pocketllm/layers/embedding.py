"""Token embedding and output head, which share one matrix in models that tie them. A rank has some rows of it."""

from __future__ import annotations

import torch
from torch import Tensor

from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import Activations, LinearWeight
from pocketllm.layers.linear import sum_over_ranks
from pocketllm.models.config import ModelConfig
from pocketllm.parallel import EMBEDDING, Part, TensorParallel
from pocketllm.weights.source import Role, WeightSource


class Vocabulary:
    """embed: token ids -> rows; logits: hidden rows -> scores of every token."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, kernels: Kernels, source: WeightSource, dtype: torch.dtype
    ) -> None:
        rows, hidden = tp.shard(config.vocab_size, "vocab_size"), config.hidden_size
        self._tp, self._kernels, self._dtype = tp, kernels, dtype
        self._num_rows, self._first = rows.size, tp.rank * rows.size
        self.table = self._take(source, "model.embed_tokens", rows, hidden, "embedding")
        self.head = self.table if config.tie_word_embeddings else self._take(source, "lm_head", rows, hidden, "head")

    def _take(self, source: WeightSource, name: str, rows: Part, hidden: int, role: Role) -> LinearWeight:
        (weight,) = source.linear([name], [rows], hidden, role=role)
        return weight

    def embed(self, token_ids: Tensor, place: int = EMBEDDING) -> Tensor:
        """[T] int64 -> [T, H] in the compute type. place: see `TensorParallel.place`."""
        if self._tp.size == 1:
            return self._kernels.embedding(token_ids, self.table, self._dtype)
        local = token_ids - self._first
        elsewhere = (local < 0) | (local >= self._num_rows)
        x = self._kernels.embedding(local.clamp(0, self._num_rows - 1), self.table, self._dtype)
        x = x.masked_fill(elsewhere[:, None], 0)
        return self._kernels.add_up(sum_over_ranks(x, self._tp, self._kernels, place), self._dtype)

    def logits(self, hidden: Activations) -> Tensor:
        """[m, H] -> [m, V] float32, with several ranks the columns of this one (`TensorParallel.gather` joins them)."""
        return self._kernels.linear(hidden, self.head).float()
