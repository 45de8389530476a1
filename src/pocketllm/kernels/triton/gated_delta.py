"""Gated DeltaNet over slots on a GPU: the operations of `kernels.protocol`, over the kernels of two files.

Nothing here waits for the device: grids come from static shapes, lengths and slots stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pocketllm.kernels.triton import delta_hopper
from pocketllm.kernels.triton.delta_hopper import HopperStep
from pocketllm.kernels.triton.gated_delta_chunks import (
    CHUNK,
    chunk_kernel,
    conv_kernel,
    gated_norm_kernel,
    scan_kernel,
)
from pocketllm.kernels.triton.gated_delta_kernels import commit_kernel, conv_step_kernel, delta_step_kernel
from pocketllm.kernels.triton.linear_tuning import linear_table
from pocketllm.kernels.triton.pairs import GROUP, room_for_pairs, takes_pairs
from pocketllm.kernels.types import Activations, GatedDeltaWeights, LayerState, Readers

NORM_ROWS = 16  # heads of tokens of one program of prefill's norm


@dataclass(frozen=True)
class StateConfig:
    """How the columns of a state are shared out: `columns` to a program of `warps` warps, `stages` chunks in flight."""

    columns: int
    warps: int
    stages: int = 1


@dataclass(frozen=True)
class ConvConfig:
    """What a program of prefill's convolution takes: `runs` runs of `run` tokens of one head, with `warps` warps."""

    runs: int
    run: int
    warps: int


@dataclass(frozen=True)
class ChunkConfig:
    """How a chunk's triangular system is solved: blocks of `base` by substitution, larger ones by products."""

    base: int
    warps: int


# Of a program that moves one head's state on token by token: warps, and registers a thread may have (None: as many as are
# there). With these, two programs share a multiprocessor, and one loads its state while the other computes.
STEP: tuple[int, int | None] = (4, None)
# On Hopper, of a kernel that goes on reading and writing states while it computes (None: there too as above).
HOPPER_STEP: HopperStep | None = HopperStep(warps=4, stages=3, bringers=2, registers=96)
CONV = ConvConfig(8, 8, 4)
SOLVE = ChunkConfig(4, 4)
# Of the scan: a few programs are over soonest if they are small, many if each reads more than once what it loads. Columns
# never meet, so both give the same bits.
SCAN_FEW = StateConfig(64, 4, 3)
SCAN_MANY = StateConfig(128, 8, 3)
FEW = 132  # programs: one to each multiprocessor of an H200
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
    precision = "tf32x3" if exact else "tf32"  # of float32 products; 16-bit activations have none

    def scratch(*shape: int, dtype: torch.dtype = qkv.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=qkv.device)

    mixed, out = scratch(num_tokens, channels), scratch(num_tokens, heads * dv, dtype=z.dtype)
    solves, scores = scratch(heads, num_tokens, CHUNK), scratch(heads, num_tokens, CHUNK)
    decays = scratch(heads, num_tokens, dtype=torch.float32)
    blocks = triton.cdiv(num_tokens, CONV.runs * CONV.run) + num_seqs
    conv_kernel[(2 * key_heads + heads, blocks)](
        qkv, qkv.stride(0), w.conv, state.conv, slot_ids, cu_seqlens_q, num_seqs, mixed, HK=key_heads, DK=dk, DV=dv,
        C=channels, TAPS=w.conv.shape[1], DP=max(dkp, dvp), RUNS=CONV.runs, RUN=CONV.run, NP=padded,
        num_warps=CONV.warps,
    )  # fmt: skip
    chunks = triton.cdiv(num_tokens, CHUNK) + 2 * num_seqs  # a sequence may begin and end amid one
    chunk_kernel[(heads, chunks)](
        mixed, b, b.stride(0), a, a.stride(0), w.a_log, w.dt_bias, cu_seqlens_q, kv_lens, num_seqs, num_tokens,
        solves, scores, decays, HK=key_heads, HV=heads, DK=dk, C=channels, DKP=dkp, CHUNK=CHUNK, BASE=SOLVE.base,
        NP=padded, PRECISION=precision, num_warps=SOLVE.warps,
    )  # fmt: skip
    scan = SCAN_FEW if triton.cdiv(dv, SCAN_FEW.columns) * heads * num_seqs <= FEW else SCAN_MANY
    columns = min(scan.columns, dvp)
    scan_kernel[(triton.cdiv(dv, columns), heads, num_seqs)](
        mixed, solves, scores, decays, state.recurrent, slot_ids, cu_seqlens_q, kv_lens, num_tokens, out, HK=key_heads,
        HV=heads, DK=dk, DV=dv, C=channels, DKP=dkp, BLOCK_V=columns, CHUNK=CHUNK, PRECISION=precision,
        num_warps=scan.warps, num_stages=1 if exact else scan.stages,
    )  # fmt: skip
    _gated_norm(out, z, w)
    return out


def gated_delta_decode(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: LayerState,
    slot_ids: Tensor,
    readers: Readers = (),
) -> Activations:
    return _steps(qkv, z, b, a, weights, state, slot_ids, 1, readers, verify=False)


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
) -> Activations:
    longest = state.journal_x.shape[1]
    if q_len > longest:
        raise ValueError(f"verify of {q_len} tokens a slot: at most {longest}")
    return _steps(qkv, z, b, a, weights, state, slot_ids, q_len, readers, verify=True)


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
    """x [.., K] with contiguous rows, which may be parts of wider ones."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _steps(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: LayerState,
    slot_ids: Tensor,
    q_len: int,
    readers: Readers,
    *,
    verify: bool,
) -> Activations:
    w, (num_tokens, channels) = weights, qkv.shape
    qkv, z, b, a = map(_rows, (qkv, z, b, a))
    if b.dim() == 2:
        b, a = b[None], a[None]
    key_heads, heads, dk, dv = w.num_key_heads, w.num_value_heads, w.key_head_dim, w.value_head_dim
    journal_len, early = state.journal_x.shape[1], linear_table(qkv.device).early_for(num_tokens)
    result: Activations
    scales: Tensor | None
    if dv == GROUP and takes_pairs(readers):
        paired = room_for_pairs(num_tokens, heads * dv, z.dtype, z.device)
        result, out, scales, padded_rows = paired, paired.codes, paired.scales, len(paired.codes) // 2
    else:
        out = torch.empty(num_tokens, heads * dv, dtype=z.dtype, device=z.device)
        result, scales, padded_rows = out, None, 0
    if HOPPER_STEP is not None and delta_hopper.fits(w, state):
        delta_hopper.step(
            qkv, z, b, a, w, state, slot_ids, q_len, out, scales, padded_rows, HOPPER_STEP, early, verify=verify
        )
        return result
    mixed = torch.empty(num_tokens, channels, dtype=torch.float32, device=qkv.device)
    conv_step_kernel[(num_tokens, 2 * key_heads + heads)](
        qkv, qkv.stride(0), w.conv, state.conv, state.journal_x, state.journal_k, slot_ids, q_len, journal_len,
        int(verify), mixed, HK=key_heads, DK=dk, DV=dv, C=channels, TAPS=w.conv.shape[1],
        DP=_padded(max(dk, dv)), EARLY=early, num_warps=1, launch_pdl=early > 0,
    )  # fmt: skip
    warps, registers = STEP
    delta_step_kernel[(len(slot_ids), heads)](
        mixed, z, z.stride(0), b, b.stride(0), b.stride(1), a, a.stride(0), a.stride(1), w.a_log, w.dt_bias, w.norm,
        w.eps, state.recurrent, state.journal_d, state.journal_g, slot_ids, q_len, journal_len, int(verify), out, scales,
        padded_rows, HK=key_heads, HV=heads, DK=dk, DV=dv, C=channels, PARTS=len(b), DKP=_padded(dk), DVP=_padded(dv),
        WARPS=warps, EARLY=early, num_warps=warps, maxnreg=registers, launch_pdl=early > 0,
    )  # fmt: skip
    return result


def _gated_norm(raw: Tensor, z: Tensor, w: GatedDeltaWeights) -> None:
    """Of raw [T, HV * DV], in place."""
    heads, dv, early = w.num_value_heads, w.value_head_dim, linear_table(z.device).early_for(len(raw))
    num_rows = len(raw) * heads
    gated_norm_kernel[(triton.cdiv(num_rows, NORM_ROWS),)](
        raw, z, z.stride(0), w.norm, raw, num_rows, w.eps, HV=heads, DV=dv, DVP=_padded(dv), ROWS=NORM_ROWS, EARLY=early,
        num_warps=4, launch_pdl=early > 0,
    )  # fmt: skip
