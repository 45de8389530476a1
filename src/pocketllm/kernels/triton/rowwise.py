# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
"""Operations on single rows, each one kernel: norms, rotary embedding, gates.

A program has a whole row (or a part of one whose elements do not meet), in blocks whose size depends on the row's width
alone; so a row's result does not depend on how many there are. Arithmetic is in float32, and rounded once at the end.

These kernels are short: where the device can start one while the one before ends (EARLY, see `linear_tuning`), they do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pocketllm.kernels.triton.linear_kernels import wait_for_inputs
from pocketllm.kernels.triton.linear_tuning import linear_table
from pocketllm.kernels.triton.pairs import takes_pairs, to_pairs
from pocketllm.kernels.triton.quantize import GROUP, all_take_codes, quantize, silu_times, times_sigmoid
from pocketllm.kernels.types import Activations, Readers

_BLOCK = 1024  # elements of a program, where rows can be cut


@triton.jit
def rms_norm_kernel(x, x_stride, weight, out, eps, K: tl.constexpr, KP: tl.constexpr, EARLY: tl.constexpr):
    """One program per row. (`summands` has the one that adds to the residual first.)"""
    wait_for_inputs(EARLY, 1)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, KP)
    mask = i < K
    y = tl.load(x + row * x_stride + i, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(y * y, axis=0) / K + eps)
    y = y * scale * tl.load(weight + i, mask=mask, other=0.0)
    tl.store(out + row * K + i, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def norm_rope_kernel(
    x, token_stride, head_stride, norm, cos, sin, positions, out, eps,
    D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per token and head, x [T, H, D]. Element i turns with i + HALF (or i - HALF) for i < 2 HALF."""
    wait_for_inputs(EARLY, 1)
    token, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    d = tl.arange(0, DP)
    turns = d < 2 * HALF
    pair = tl.where(d < HALF, d + HALF, d - HALF)
    row = x + token * token_stride + head * head_stride
    own = tl.load(row + d, mask=d < D, other=0.0).to(tl.float32)
    other = tl.load(row + pair, mask=turns, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(own * own, axis=0) / D + eps)
        own = own * scale * tl.load(norm + d, mask=d < D, other=0.0)
        other = other * scale * tl.load(norm + pair, mask=turns, other=0.0)
    position = tl.load(positions + token)
    c = tl.load(cos + position * HALF + d % HALF, mask=turns, other=1.0)
    s = tl.load(sin + position * HALF + d % HALF, mask=turns, other=0.0)
    y = own * c + tl.where(d < HALF, -other, other) * s
    tl.store(out + (token * num_heads + head) * D + d, y.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def silu_mul_kernel(gate_up, stride, out, N: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One program per row and BLOCK elements: gate_up [M, 2N] -> out [M, N]."""
    wait_for_inputs(EARLY, 1)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < N
    gate = tl.load(gate_up + row * stride + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + N + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * N + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def sigmoid_mul_kernel(
    x, x_stride, gate, gate_stride, head_stride, out,
    N: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row and BLOCK elements. gate [M, N / HEAD, HEAD], or [M, 1]: HEAD is 1 then."""
    wait_for_inputs(EARLY, 1)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < N
    if HEAD == 1:
        strength = tl.sigmoid(tl.load(gate + row * gate_stride).to(tl.float32))
    else:
        at = gate + row * gate_stride + i // HEAD * head_stride + i % HEAD
        strength = tl.sigmoid(tl.load(at, mask=mask, other=0.0).to(tl.float32))
    y = tl.load(x + row * x_stride + i, mask=mask, other=0.0).to(tl.float32) * strength
    tl.store(out + row * N + i, y.to(out.dtype.element_ty), mask=mask)


def _rows(x: Tensor) -> Tensor:
    """x [M, .., K] with contiguous rows, which may be parts of wider ones."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, (num_rows, width) = _rows(x), x.shape
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    padded, early = triton.next_power_of_2(width), linear_table(x.device).early_for(num_rows)
    rms_norm_kernel[(num_rows,)](
        x, x.stride(0), weight, out, eps, K=width, KP=padded, EARLY=early, num_warps=min(max(padded // 512, 1), 16),
        launch_pdl=early > 0,
    )  # fmt: skip
    return out


def norm_rope(x: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    x, (num_tokens, num_heads, head_dim) = x if x.stride(2) == 1 else x.contiguous(), x.shape
    early = linear_table(x.device).early_for(num_tokens)
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=x.dtype, device=x.device)
    norm_rope_kernel[(num_tokens, num_heads)](
        x, x.stride(0), x.stride(1), norm, cos, sin, positions, out, eps, D=head_dim,
        DP=triton.next_power_of_2(head_dim), HALF=cos.shape[1], NORM=norm is not None, EARLY=early, num_warps=1,
        launch_pdl=early > 0,
    )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor, readers: Readers = ()) -> Activations:
    gate_up, (num_rows, width) = _rows(gate_up), gate_up.shape
    if all_take_codes(readers, gate_up):
        return quantize(gate_up[:, : width // 2], gate_up[:, width // 2 :], silu_times)
    early = linear_table(gate_up.device).early_for(num_rows)
    out = torch.empty(num_rows, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    silu_mul_kernel[(num_rows, triton.cdiv(width // 2, _BLOCK))](
        gate_up, gate_up.stride(0), out, N=width // 2, BLOCK=_BLOCK, EARLY=early, num_warps=4, launch_pdl=early > 0
    )
    return out


def sigmoid_mul(x: Tensor, gate: Tensor, readers: Readers = ()) -> Activations:
    x, gate, (num_rows, width), head = _rows(x), _rows(gate), x.shape, gate.shape[-1]
    if head % GROUP == 0 and takes_pairs(readers):
        return to_pairs(x, gate, times_sigmoid)
    if head % GROUP == 0 and all_take_codes(readers, x):
        return quantize(x, gate, times_sigmoid)
    early = linear_table(x.device).early_for(num_rows)
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    sigmoid_mul_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        x, x.stride(0), gate, gate.stride(0), gate.stride(-2), out, N=width, HEAD=head, BLOCK=_BLOCK, EARLY=early,
        num_warps=4, launch_pdl=early > 0,
    )  # fmt: skip
    return out
