"""Gated DeltaNet over slots on a CPU: the operations of `kernels.protocol`, over one kernel (`gated_delta_kernels`)."""

from __future__ import annotations

import torch
from torch import Tensor

from pocketllm.kernels.numba.gated_delta_kernels import BLOCK, commit_kernel, sequences_kernel
from pocketllm.kernels.numba.launch import launch
from pocketllm.kernels.numba.threads import pool_handle
from pocketllm.kernels.reference.gated_delta import whole
from pocketllm.kernels.types import GatedDeltaWeights, LayerState, Readers


def gated_delta_prefill(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: LayerState,
    slot_ids: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
) -> Tensor:
    bounds = cu_seqlens_q.to(torch.int32).contiguous()
    return _run(qkv, z, b, a, weights, state, slot_ids, bounds, 0, False)


def gated_delta_decode(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: LayerState,
    slot_ids: Tensor,
    readers: Readers = (),
) -> Tensor:
    return _run(qkv, z, b, a, weights, state, slot_ids, None, 1, False)


def gated_delta_verify(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: LayerState,
    slot_ids: Tensor,
    q_len: int,
    readers: Readers = (),
) -> Tensor:
    longest = min(BLOCK, state.journal_x.shape[1])
    if q_len > longest:
        raise ValueError(f"verify of {q_len} tokens a slot: at most {longest}")
    return _run(qkv, z, b, a, weights, state, slot_ids, None, q_len, True)


def gated_delta_commit(state: LayerState, slot_ids: Tensor, num_tokens: Tensor) -> None:
    slot_ids, counts = slot_ids.to(torch.int32).contiguous(), num_tokens.to(torch.int32).contiguous()
    _, value_heads, dk, dv = state.recurrent.shape
    shape = (state.journal_k.shape[2], value_heads, dk, dv)
    taps = state.conv.shape[2] + 1
    launch(
        commit_kernel,
        pool_handle(),
        shape,
        _addresses(state),
        taps,
        slot_ids.data_ptr(),
        counts.data_ptr(),
        len(slot_ids),
    )


def _addresses(state: LayerState) -> tuple[int, ...]:
    return (
        state.conv.data_ptr(),
        state.recurrent.data_ptr(),
        state.journal_x.data_ptr(),
        state.journal_k.data_ptr(),
        state.journal_d.data_ptr(),
        state.journal_g.data_ptr(),
        state.journal_x.shape[1],
    )


def _rows(x: Tensor) -> Tensor:
    """x [T, K] as float32 with contiguous rows, which may be parts of wider ones."""
    return x if x.dtype == torch.float32 and x.stride(1) == 1 else x.to(torch.float32).contiguous()


def _run(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: LayerState,
    slot_ids: Tensor,
    bounds: Tensor | None,
    q_len: int,
    verify: bool,
) -> Tensor:
    w = weights
    shape = (w.num_key_heads, w.num_value_heads, w.key_head_dim, w.value_head_dim)
    if w.key_head_dim % 16 or w.value_head_dim % 16:
        raise ValueError(f"head dims {w.key_head_dim}, {w.value_head_dim}: the Numba kernels need multiples of 16")
    rows = [_rows(x) for x in (qkv, z, whole(b), whole(a))]
    inputs = tuple(number for x in rows for number in (x.data_ptr(), x.stride(0) * 4))
    slot_ids = slot_ids.to(torch.int32).contiguous()
    out = torch.empty(z.shape, dtype=torch.float32)
    constants = (
        w.conv.data_ptr(), w.conv.shape[1], w.a_log.data_ptr(), w.dt_bias.data_ptr(), w.norm.data_ptr(), w.eps
    )  # fmt: skip
    launch(
        sequences_kernel,
        pool_handle(),
        inputs,
        constants,
        shape,
        _addresses(state),
        slot_ids.data_ptr(),
        bounds.data_ptr() if bounds is not None else 0,
        len(slot_ids),
        q_len,
        verify,
        out.data_ptr(),
    )
    return out.to(z.dtype)
