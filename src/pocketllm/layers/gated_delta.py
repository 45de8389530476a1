"""Gated DeltaNet, the linear attention of Qwen3-Next, 3.5 and later: its memory is one state per slot, of fixed size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import Activations, GatedDeltaWeights, LayerState, Readers
from pocketllm.layers.batch import ForwardBatch
from pocketllm.layers.linear import Linear, RowParallelLinear, cut
from pocketllm.models.config import GatedDeltaConfig, ModelConfig
from pocketllm.parallel import MIXER, TensorParallel, blocks
from pocketllm.weights.source import WeightSource


class GatedDeltaNet:
    def __init__(self, config: ModelConfig, tp: TensorParallel, kernels: Kernels, source: WeightSource) -> None:
        gdn = config.gated_delta
        if gdn is None:
            raise ValueError("a linear_attention layer needs config.gated_delta")
        self._kernels = kernels
        # A rank takes whole key heads, each with the value heads that share it.
        key_heads = tp.shard(gdn.num_key_heads, "linear_num_key_heads")
        value_heads = key_heads.times(gdn.num_value_heads // gdn.num_key_heads)
        keys, values = key_heads.times(gdn.key_head_dim), value_heads.times(gdn.value_head_dim)
        conv = blocks(keys, keys, values)  # channels q | k | v
        self._conv_dim, self._value_dim, self._value_heads = conv.size, values.size, value_heads.size
        hidden = config.hidden_size
        if gdn.fused_projections:
            qkvz = key_heads.times((conv.total + values.total) // key_heads.total)
            ba = key_heads.times(2 * value_heads.total // key_heads.total)
            big = source.linear(["in_proj_qkvz"], [qkvz], hidden, rows=_split_qkvz(gdn, key_heads.size))
            small = source.linear(["in_proj_ba"], [ba], hidden, rows=_split_ba(gdn, key_heads.size), role="small")
        else:
            big = source.linear(["in_proj_qkv", "in_proj_z"], [conv, values], hidden)
            small = source.linear(["in_proj_b", "in_proj_a"], [value_heads] * 2, hidden, role="small")
        self.projection = Linear(kernels, [*big, *small])
        self.readers = self.projection.parts
        self.out_proj = RowParallelLinear(tp, kernels, source, "out_proj", hidden, values, place=MIXER)
        self.weights = GatedDeltaWeights(
            conv=source.tensor("conv1d.weight", (conv, 1, gdn.conv_kernel)).squeeze(1),
            a_log=source.tensor("A_log", (value_heads,)),
            dt_bias=source.tensor("dt_bias", (value_heads,)),
            norm=source.tensor("norm.weight", (gdn.value_head_dim,)),  # plain w, also where other norms use 1 + w
            eps=config.rms_norm_eps,
            num_key_heads=key_heads.size,
            num_value_heads=value_heads.size,
            key_head_dim=gdn.key_head_dim,
            value_head_dim=gdn.value_head_dim,
        )

    def mix(self, inputs: Sequence[Tensor], batch: ForwardBatch, state: LayerState, readers: Readers) -> Activations:
        """What lies between the two projections: results of the first, as `Kernels.bridge` may give them too -> [T, Hv dv],
        for `readers`."""
        sizes = [self._conv_dim, self._value_dim, self._value_heads, self._value_heads]
        qkv, z, b, a = cut(inputs, sizes)
        ops, weights = self._kernels, self.weights
        if batch.kind == "prefill":
            if b.dim() == 3:  # few tokens: b and a may be summands
                b, a = b.sum(0), a.sum(0)
            return ops.gated_delta_prefill(
                qkv, z, b, a, weights, state, batch.slot_ids, batch.cu_seqlens_q, batch.kv_lens
            )
        if batch.kind == "decode":
            return ops.gated_delta_decode(qkv, z, b, a, weights, state, batch.slot_ids, readers)
        return ops.gated_delta_verify(qkv, z, b, a, weights, state, batch.slot_ids, batch.q_len, readers)


def _split_qkvz(gdn: GatedDeltaConfig, key_heads: int) -> Tensor:
    """Row order that turns Qwen3-Next's per-key-head groups [q | k | v.. | z..] into q | k | v | z."""
    values = gdn.num_value_heads // gdn.num_key_heads * gdn.value_head_dim
    sizes = [gdn.key_head_dim, gdn.key_head_dim, values, values]
    groups = torch.arange(key_heads * sum(sizes)).view(key_heads, sum(sizes))
    return torch.cat([part.flatten() for part in torch.split(groups, sizes, dim=1)])


def _split_ba(gdn: GatedDeltaConfig, key_heads: int) -> Tensor:
    """Row order that turns per-key-head groups [b.. | a..] into b | a."""
    per_head = gdn.num_value_heads // gdn.num_key_heads
    groups = torch.arange(key_heads * 2 * per_head).view(key_heads, 2 * per_head)
    return torch.cat([part.flatten() for part in torch.split(groups, per_head, dim=1)])
