"""Gated DeltaNet over slots on a GPU: the operations of `kernels.protocol`, over the kernels of two files.

Nothing here waits for the device: grids come from static shapes, lengths and slots stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pocketllm.kernels.triton.gated_delta_chunks import (
    CHUNK,
    chunk_kernel,
    conv_kernel,
    gated_norm_kernel,
    scan_kernel,
)
from pocketllm.kernels.triton.gated_delta_kernels import commit_kernel, conv_step_kernel, delta_step_kernel
from pocketllm.kernels.triton.linear_tuning import linear_table
from pocketllm.kernels.types import GatedDeltaWeights, LayerState

CONV_TOKENS = 16  # of one program of the convolution (64 took longer on an H200)
NORM_ROWS = 16  # heads of tokens of one program of prefill's norm


@dataclass(frozen=True)
class StateConfig:
    """How the columns of a state are shared out: `columns` to a program of `warps` warps, `stages` chunks in flight."""

    columns: int
    warps: int
    stages: int = 1


STEP = StateConfig(64, 4)
SCAN = StateConfig(64, 4, 2)
# Columns of a chunk's tiles, at least. With heads of 16 in bfloat16 (no real model's) `chunk_kernel` touched memory it must
# not on an H200 (Triton 3.6); heads of 128 did not.
NARROWEST = 64


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
    w, num_seqs, num_tokens, channels = weights, len(slot_ids), len(qkv), qkv.shape[1]
    qkv, z, b, a = map(_rows, (qkv, z, b, a))
    key_heads, heads, dk, dv = w.num_key_heads, w.num_value_heads, w.key_head_dim, w.value_head_dim
    dkp, dvp, padded = max(_padded(dk), NARROWEST), max(_padded(dv), NARROWEST), _padded(num_seqs)
    exact = qkv.dtype == torch.float32
    precision = "tf32x3" if exact else "tf32"  # of float32 products; of 16-bit activations only the inverse has any

    def scratch(*shape: int, dtype: torch.dtype = qkv.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=qkv.device)

    mixed, out = scratch(num_tokens, channels), scratch(num_tokens, heads * dv, dtype=z.dtype)
    keys, values = scratch(num_tokens, heads, dk), scratch(num_tokens, heads, dv)
    scores, decays = scratch(num_tokens, heads, CHUNK), scratch(num_tokens, heads, dtype=torch.float32)
    blocks = triton.cdiv(num_tokens, CONV_TOKENS) + num_seqs
    conv_kernel[(blocks, 2 * key_heads + heads)](
        qkv, qkv.stride(0), w.conv, state.conv, slot_ids, cu_seqlens_q, num_seqs, mixed, HK=key_heads, DK=dk, DV=dv,
        C=channels, TAPS=w.conv.shape[1], DP=max(dkp, dvp), BLOCK=CONV_TOKENS, NP=padded, num_warps=4,
    )  # fmt: skip
    chunks = triton.cdiv(num_tokens, CHUNK) + 2 * num_seqs  # a sequence may begin and end amid one
    chunk_kernel[(chunks, heads)](
        mixed, b, b.stride(0), a, a.stride(0), w.a_log, w.dt_bias, cu_seqlens_q, kv_lens, num_seqs,
        keys, values, scores, decays, HK=key_heads, HV=heads, DK=dk, DV=dv, C=channels, DKP=dkp, DVP=dvp, CHUNK=CHUNK,
        NP=padded, PRECISION=precision, num_warps=4,
    )  # fmt: skip
    columns = min(SCAN.columns, dvp)
    scan_kernel[(num_seqs, heads, triton.cdiv(dv, columns))](
        mixed, keys, values, scores, decays, state.recurrent, slot_ids, cu_seqlens_q, kv_lens, out, HK=key_heads,
        HV=heads, DK=dk, DV=dv, C=channels, DKP=dkp, BLOCK_V=columns, CHUNK=CHUNK, PRECISION=precision,
        num_warps=SCAN.warps, num_stages=1 if exact else SCAN.stages,
    )  # fmt: skip
    _gated_norm(out, z, w, out, rows=NORM_ROWS, warps=4)
    return out


def gated_delta_decode(
    qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, weights: GatedDeltaWeights, state: LayerState, slot_ids: Tensor
) -> Tensor:
    return _steps(qkv, z, b, a, weights, state, slot_ids, 1, verify=False)


def gated_delta_verify(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: LayerState,
    slot_ids: Tensor,
    q_len: int,
) -> Tensor:
    longest = state.journal_x.shape[1]
    if q_len > longest:
        raise ValueError(f"verify of {q_len} tokens a slot: at most {longest}")
    return _steps(qkv, z, b, a, weights, state, slot_ids, q_len, verify=True)


def gated_delta_commit(state: LayerState, slot_ids: Tensor, num_tokens: Tensor) -> None:
    _, journal_len, channels = state.journal_x.shape
    _, heads, dk, dv = state.recurrent.shape
    commit_kernel[(len(slot_ids), heads)](
        state.recurrent, state.conv, state.journal_x, state.journal_k, state.journal_d, state.journal_g,
        slot_ids, num_tokens, journal_len, HK=state.journal_k.shape[2], HV=heads, DK=dk, DV=dv, C=channels,
        TAPS=state.conv.shape[2] + 1, DKP=_padded(dk), DVP=_padded(dv), num_warps=_warps(dk, dv),
    )  # fmt: skip


def _padded(size: int) -> int:
    return max(1 << (size - 1).bit_length(), 16)


def _warps(dk: int, dv: int) -> int:
    """Such that a thread has at most 32 elements of a state (64 from 8 warps on)."""
    return min(max(_padded(dk) * _padded(dv) // 1024, 1), 8)


def _rows(x: Tensor) -> Tensor:
    """x [T, K] with contiguous rows, which may be parts of wider ones."""
    return x if x.stride(1) == 1 else x.contiguous()


def _steps(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: LayerState,
    slot_ids: Tensor,
    q_len: int,
    *,
    verify: bool,
) -> Tensor:
    w, (num_tokens, channels) = weights, qkv.shape
    qkv, z, b, a = map(_rows, (qkv, z, b, a))
    key_heads, heads, dk, dv = w.num_key_heads, w.num_value_heads, w.key_head_dim, w.value_head_dim
    journal_len, early = state.journal_x.shape[1], linear_table(qkv.device).early_for(num_tokens)
    mixed = torch.empty(num_tokens, channels, dtype=torch.float32, device=qkv.device)
    raw = torch.empty(num_tokens, heads * dv, dtype=torch.float32, device=z.device)
    out = torch.empty(num_tokens, heads * dv, dtype=z.dtype, device=z.device)
    conv_step_kernel[(num_tokens, 2 * key_heads + heads)](
        qkv, qkv.stride(0), w.conv, state.conv, state.journal_x, state.journal_k, slot_ids, q_len, journal_len,
        int(verify), mixed, HK=key_heads, DK=dk, DV=dv, C=channels, TAPS=w.conv.shape[1],
        DP=_padded(max(dk, dv)), EARLY=early, num_warps=1, launch_pdl=early > 0,
    )  # fmt: skip
    columns = min(STEP.columns, _padded(dv))
    delta_step_kernel[(len(slot_ids), heads, triton.cdiv(dv, columns))](
        mixed, b, b.stride(0), a, a.stride(0), w.a_log, w.dt_bias, state.recurrent, state.journal_d, state.journal_g,
        slot_ids, q_len, journal_len, int(verify), raw, HK=key_heads, HV=heads, DK=dk, DV=dv, C=channels,
        DKP=_padded(dk), BLOCK_V=columns, num_warps=STEP.warps, EARLY=early, launch_pdl=early > 0,
    )  # fmt: skip
    _gated_norm(raw, z, w, out, rows=1, warps=1)  # whatever their number: a verified row is a decoded one
    return out


def _gated_norm(raw: Tensor, z: Tensor, w: GatedDeltaWeights, out: Tensor, *, rows: int, warps: int) -> None:
    """raw [T, HV * DV] -> out, which may be the same tensor. rows: heads of tokens that a program takes."""
    heads, dv, early = w.num_value_heads, w.value_head_dim, linear_table(z.device).early_for(len(raw))
    num_rows = len(raw) * heads
    gated_norm_kernel[(triton.cdiv(num_rows, rows),)](
        raw, z, z.stride(0), w.norm, out, num_rows, w.eps, HV=heads, DV=dv, DVP=_padded(dv), ROWS=rows, EARLY=early,
        num_warps=warps, launch_pdl=early > 0,
    )  # fmt: skip
