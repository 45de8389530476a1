"""Launches `delta_hopper_kernels` where it fits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from pocketllm.kernels.triton.tuning import is_hopper, multiprocessors
from pocketllm.kernels.types import GatedDeltaWeights, LayerState
from pocketllm.parallel import SMALL_BATCH

DIM = 128  # of heads: keys and values
TAPS = 4  # of the convolution: as many as there are registers for


@dataclass(frozen=True)
class HopperStep:
    """How `hopper_step_kernel` works. warps: of the delta rule. stages: states in the ring. bringers: groups of warps that
    bring what else a token needs, 1 or 2. registers: of a thread that brings something."""

    warps: int
    stages: int
    bringers: int
    registers: int


def fits(w: GatedDeltaWeights, state: LayerState) -> bool:
    """It must not depend on how many rows there are: a row's bits would."""
    return (
        is_hopper(state.recurrent.device)
        and (w.key_head_dim, w.value_head_dim) == (DIM, DIM)
        and w.num_value_heads % w.num_key_heads == 0
        and w.conv.shape[1] == TAPS
    )


@cache
def _counters(device: torch.device, sequences: int, key_heads: int) -> Tensor:
    """Of the value heads of a key head that have read its tail; all 0 between kernels. Steps on two streams at a time would
    count on the same: there must be one stream."""
    return torch.zeros(sequences, key_heads, dtype=torch.int64, device=device)


def _tiles_of(states: Tensor, warps: int) -> Any:
    """A descriptor of states [S, HV, DIM, DIM] for one at a time, the rows of each of `warps` warps by themselves."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    count, rows = states.shape[0] * states.shape[1] * warps, DIM // warps
    return TensorDescriptor(
        states, [count, rows, DIM], [rows * DIM, DIM, 1], [warps, rows, DIM], NVMMASharedLayout(0, 32, 3)
    )


def step(
    qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, w: GatedDeltaWeights, state: LayerState, slot_ids: Tensor, q_len: int,
    out: Tensor, scales: Tensor | None, padded_rows: int, config: HopperStep, early: int, *, verify: bool,
) -> None:  # fmt: skip
    """As `gated_delta_kernels.conv_step_kernel` and `delta_step_kernel`; b and a [PARTS, n * q_len, HV]."""
    # Gluon is not loaded where it is not used
    from pocketllm.kernels.triton.delta_hopper_kernels import hopper_step_kernel

    num_seqs, key_heads, heads, device = len(slot_ids), w.num_key_heads, w.num_value_heads, qkv.device
    counters = _counters(device, max(triton.next_power_of_2(num_seqs), SMALL_BATCH), key_heads)
    hopper_step_kernel[(min(num_seqs * heads, multiprocessors(device)),)](
        qkv, qkv.stride(0), z, z.stride(0), b, b.stride(0), b.stride(1), a, a.stride(0), a.stride(1), w.a_log, w.dt_bias,
        w.norm, w.eps, _tiles_of(state.recurrent, config.warps), state.journal_d, state.journal_g, slot_ids, num_seqs,
        q_len, state.journal_x.shape[1], int(verify), out, scales, padded_rows, w.conv, state.conv, state.journal_x,
        state.journal_k, counters, HK=key_heads, HV=heads, PARTS=len(b), WARPS=config.warps, STAGES=config.stages,
        BRINGERS=config.bringers, REGISTERS=config.registers, EARLY=early, num_warps=config.warps, launch_pdl=early > 0,
    )  # fmt: skip
