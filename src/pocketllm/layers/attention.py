"""Grouped-query attention over slots, with the variants of the Qwen family chosen by config.

Variants: biases on q, k, v (Qwen2, 2.5), per-head RMS norm of q and k (Qwen3 on), an output gate and RoPE on part of the
head (Qwen3-Next, 3.5 on).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import Activations, AttentionMask, KeyBias, LayerKV, Readers
from pocketllm.layers.batch import ForwardBatch
from pocketllm.layers.linear import Linear, RowParallelLinear, cut
from pocketllm.layers.norm import RMSNorm
from pocketllm.layers.rope import RotaryEmbedding
from pocketllm.models.config import ModelConfig
from pocketllm.parallel import MIXER, TensorParallel
from pocketllm.weights.source import WeightSource


class Attention:
    """One attention layer. `key_bias` is what the cache must know when it stores K without the bias."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        kernels: Kernels,
        source: WeightSource,
        rope: RotaryEmbedding,
        *,
        drop_key_bias: bool,
    ) -> None:
        heads = tp.shard(config.num_heads, "num_attention_heads")
        kv_heads = tp.replicate_or_shard(config.num_kv_heads, "num_key_value_heads")
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size  # of this rank
        self.head_dim = head_dim = config.head_dim
        self.scale = head_dim**-0.5
        self.gated = config.attn_output_gate
        self._kernels, self._rope, self._eps = kernels, rope, config.rms_norm_eps
        q_rows, kv_rows = heads.times(head_dim * (2 if self.gated else 1)), kv_heads.times(head_dim)
        self._q_rows, self._kv_rows = q_rows.size, kv_rows.size
        qkv = [q_rows, kv_rows, kv_rows]
        parts = source.linear(["q_proj", "k_proj", "v_proj"], qkv, config.hidden_size, bias=config.qkv_bias)
        self.key_bias: KeyBias | None = None
        if config.qkv_bias and drop_key_bias and not config.qk_norm:  # a norm after the bias would not let it go
            bias = self._take_key_bias([p.bias for p in parts if p.bias is not None])
            self.key_bias = KeyBias(bias.view(self.num_kv_heads, head_dim), rope.cos, rope.sin)
        self.projection = Linear(kernels, parts)
        self.readers = self.projection.parts
        self.out_proj = RowParallelLinear(
            tp, kernels, source, "o_proj", config.hidden_size, heads.times(head_dim), place=MIXER, bias=config.o_bias
        )
        self.q_norm = RMSNorm(config, kernels, source, "q_norm", head_dim).weight if config.qk_norm else None
        self.k_norm = RMSNorm(config, kernels, source, "k_norm", head_dim).weight if config.qk_norm else None

    def _take_key_bias(self, biases: list[Tensor]) -> Tensor:
        """Cuts the k rows out of the stacked q|k|v bias (zeros stay) and returns them, [Hk * D] float32."""
        kept = biases[0].new_zeros(self._kv_rows)
        start = 0
        for bias in biases:  # one per part of the stack
            first = max(self._q_rows - start, 0)
            last = min(self._q_rows + self._kv_rows - start, len(bias))
            if first < last:
                offset = start + first - self._q_rows
                kept[offset : offset + last - first] = bias[first:last]
                bias[first:last] = 0
            start += len(bias)
        return kept

    def mix(
        self, inputs: Sequence[Tensor], batch: ForwardBatch, kv: LayerKV, mask: AttentionMask, readers: Readers
    ) -> Activations:
        """What lies between the two projections: results of the first, as `Kernels.bridge` may give them too -> [T, Hq D],
        for `readers`."""
        q, k, v = self._cut(inputs)
        num_tokens = len(q)
        gate: Tensor | None = None
        if self.gated:
            q, gate = q.view(num_tokens, self.num_heads, 2 * self.head_dim).chunk(2, dim=-1)
        q = q.reshape(num_tokens, self.num_heads, self.head_dim)
        ops, positions = self._kernels, batch.positions
        q = ops.norm_rope(q, self.q_norm, self._eps, self._rope.cos, self._rope.sin, positions)
        self._append(k, v, batch, kv)
        if batch.kind == "prefill":
            out = ops.prefill(kv, q, batch.slot_ids, batch.cu_seqlens_q, batch.kv_lens, self.scale, mask, batch.parts)
        else:
            packed = q.view(len(batch.slot_ids), batch.q_len, self.num_heads, self.head_dim)
            out = ops.attend(kv, packed, batch.slot_ids, batch.kv_lens, self.scale, mask)
        out = out.reshape(num_tokens, self.num_heads * self.head_dim)
        return out if gate is None else ops.sigmoid_mul(out, gate, readers)

    def append(self, inputs: Sequence[Tensor], batch: ForwardBatch, kv: LayerKV) -> None:
        """Only what `mix` leaves in the cache."""
        _, k, v = self._cut(inputs)
        self._append(k, v, batch, kv)

    def _cut(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """q (with its gate), k and v, each [T, heads D]."""
        dtype = inputs[0].dtype
        inputs = [x if x.dim() == 2 else x.sum(0).to(dtype) for x in inputs]  # a narrow V may come as summands
        return cut(inputs, [self._q_rows, self._kv_rows, self._kv_rows])

    def _append(self, k: Tensor, v: Tensor, batch: ForwardBatch, kv: LayerKV) -> None:
        k, v = (x.reshape(len(x), self.num_kv_heads, self.head_dim) for x in (k, v))
        k = self._kernels.norm_rope(k, self.k_norm, self._eps, self._rope.cos, self._rope.sin, batch.positions)
        self._kernels.append(kv, k, v, batch.token_slots, batch.positions)
