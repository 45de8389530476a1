# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
"""Sums that come in parts (`parallel.Summands`): added up where they are read, over splits of a product and over ranks.

A product over few rows is split over K to keep every multiprocessor busy, and with tensor parallelism each rank has a
summand of its own. The kernel that needs the sum reads all the parts: no launch is spent on adding, none on sending. Ranks
meet inside the kernel, program by program, as in the one-shot all-reduces of TensorRT-LLM and vLLM: each program tells its
counterparts on the other ranks that this rank's memory is ready (everything before this kernel has ended), and waits to be
told the same.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from pocketllm.kernels.triton.linear import few_rows_with, linear, rows_of
from pocketllm.kernels.triton.linear_kernels import sum_of_splits, wait_for_inputs
from pocketllm.kernels.triton.linear_tuning import linear_table, product_config
from pocketllm.kernels.triton.quantize import room, takes_codes, to_e4m3
from pocketllm.kernels.triton.tuning import multiprocessors
from pocketllm.kernels.types import Activations, Bridge, LinearWeight, Quantized, Readers
from pocketllm.parallel import MOST_MEETINGS, SMALL_BATCH, Place, Summands

_BLOCK = 1024  # columns of a program that only adds
_LONG_WARPS = 8  # of a norm's program in passes whose products are in FP8: many rows, none of which is in a hurry
_MOST_SENT = 2**18  # bytes of parts that other ranks read; more are added up first


@triton.jit
def meet(flags, program, rank, RANKS: tl.constexpr):
    """Returns once the counterparts of this program run on all ranks, and what their ranks wrote before can be read (by
    plain loads: what one thread acquires, the barrier passes on to the others of its program).

    flags [RANKS] int64: see `parallel.Place`. program: this one's number, below MOST_MEETINGS. A flag goes from 0 to 1 and
    back, so the next kernel, or this one again in a replayed graph, finds it as it was.
    """
    for peer in tl.static_range(RANKS):
        if peer != rank:
            at = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + program * RANKS + rank
            while tl.atomic_cas(at, 0, 1, sem="release", scope="sys") != 0:
                pass
    own = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + program * RANKS
    for peer in tl.static_range(RANKS):
        if peer != rank:
            while tl.atomic_cas(own + peer, 1, 0, sem="acquire", scope="sys") != 1:
                pass
    tl.debug_barrier()


@triton.jit
def sum_of(parts, addresses, row, num_rows, n, mask, N, SPLITS: tl.constexpr, RANKS: tl.constexpr):
    """Elements n [..] of a row of the sum, float32: each rank's splits in order, then the ranks in order."""
    total = tl.zeros(n.shape, tl.float32)
    for rank in tl.static_range(RANKS):
        base = parts
        if RANKS > 1:
            base = tl.load(addresses + rank).to(tl.pointer_type(parts.dtype.element_ty))
        total += sum_of_splits(base + row * N + n, num_rows.to(tl.int64) * N, mask, SPLITS)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def add_up_kernel(
    parts, addresses, flags, rank, out, num_rows, N,
    SPLITS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """parts [SPLITS, num_rows, N] -> out [num_rows, N]. Programs: (rows, blocks of BLOCK columns)."""
    wait_for_inputs(EARLY, 1)
    row = tl.program_id(0)
    if RANKS > 1:
        meet(flags, row * tl.num_programs(1) + tl.program_id(1), rank, RANKS)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = sum_of(parts, addresses, row.to(tl.int64), num_rows, n, n < N, N, SPLITS, RANKS)
    tl.store(out + row.to(tl.int64) * N + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["num_rows", "padded_rows"])
def add_norm_kernel(
    parts, addresses, flags, rank, residual, residual_stride, weight, out, codes, scales, eps, num_rows, padded_rows,
    N: tl.constexpr, NP: tl.constexpr, SPLITS: tl.constexpr, RANKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row: the sum is added to the row of `residual`; out is the norm of the (rounded) result. It is given
    in e4m3 too if there are codes [.., N] and scales [N / 128, padded_rows], and then out may be None."""
    row = tl.program_id(0)
    i = tl.arange(0, NP)
    mask = i < N
    gain = tl.load(weight + i, mask=mask, other=0.0)
    wait_for_inputs(EARLY, 1)
    at = residual + row.to(tl.int64) * residual_stride + i
    old = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if RANKS > 1:
        meet(flags, row, rank, RANKS)
    y = sum_of(parts, addresses, row.to(tl.int64), num_rows, i, mask, N, SPLITS, RANKS)
    y = (y + old).to(residual.dtype.element_ty)
    tl.store(at, y, mask=mask)
    y = y.to(tl.float32)
    scale = tl.rsqrt(tl.sum(y * y, axis=0) / N + eps)
    y = y * scale * gain
    if out is not None:
        tl.store(out + row.to(tl.int64) * N + i, y.to(out.dtype.element_ty), mask=mask)
    if codes is not None:
        rounded, group_scales = to_e4m3(tl.reshape(y, [NP // 128, 128]))
        # Told of 8 bytes only, Triton has a thread store 8 codes, as it has 8 numbers of each load in 16 bits: else all
        # numbers would change threads through shared memory.
        at_codes = tl.multiple_of(codes + row.to(tl.int64) * N + i, 8)
        tl.store(at_codes, tl.reshape(rounded, [NP]), mask=mask)
        group = tl.arange(0, NP // 128)
        tl.store(scales + group * padded_rows + row, group_scales, mask=group < N // 128)


def _ranks(place: Place | None) -> tuple[Tensor | None, Tensor | None, int, int]:
    return (None, None, 0, 1) if place is None else (place.addresses, place.flags, place.rank, place.size)


def add_up(x: Summands, dtype: object) -> Tensor:
    kind = cast(torch.dtype, dtype)
    if x.single is not None:
        return x.single.to(kind)
    (splits, num_rows, n), device = x.parts.shape, x.parts.device
    blocks = triton.cdiv(n, _BLOCK)
    if x.place is not None and num_rows * blocks > MOST_MEETINGS:
        raise ValueError(f"{num_rows} rows of {n} numbers: ranks meet in at most {MOST_MEETINGS} programs of {_BLOCK}")
    out = torch.empty(num_rows, n, dtype=kind, device=device)
    addresses, flags, rank, ranks = _ranks(x.place)
    early = linear_table(device).early_for(num_rows)
    add_up_kernel[(num_rows, blocks)](
        x.parts, addresses, flags, rank, out, num_rows, n, SPLITS=splits, RANKS=ranks, BLOCK=_BLOCK, EARLY=early,
        num_warps=4, launch_pdl=early > 0,
    )  # fmt: skip
    return out


def add_rms_norm(x: Summands, residual: Tensor, weight: Tensor, eps: float, readers: Readers = ()) -> Activations:
    if residual.stride(1) != 1:  # it is written in place
        raise ValueError(f"residual with strides {residual.stride()}: its rows must be contiguous")
    parts = x.parts if x.parts.is_contiguous() else x.parts.contiguous()
    (splits, num_rows, n), device = parts.shape, parts.device
    weights, dtype = () if isinstance(readers, Bridge) else readers, residual.dtype
    in_fp8 = {takes_codes(weight, num_rows, dtype, device) for weight in weights}
    out = None if in_fp8 == {True} else torch.empty(num_rows, n, dtype=dtype, device=device)
    quantized = room(num_rows, n, dtype, device, out) if True in in_fp8 else None
    codes, scales, padded_rows = (None, None, 0) if quantized is None else (*quantized.planes, len(quantized.codes))
    addresses, flags, rank, ranks = _ranks(x.place)
    padded, early = triton.next_power_of_2(n), linear_table(device).early_for(num_rows)
    warps = min(max(padded // 512, 1), 16 if quantized is None else _LONG_WARPS)
    add_norm_kernel[(num_rows,)](
        parts, addresses, flags, rank, residual, residual.stride(0), weight, out, codes, scales, eps, num_rows,
        padded_rows, N=n, NP=padded, SPLITS=splits, RANKS=ranks, EARLY=early, num_warps=warps, launch_pdl=early > 0,
    )  # fmt: skip
    return cast(Activations, out if quantized is None else quantized)


def linear_summands(x: Activations, weight: LinearWeight, place: Place | None = None) -> Summands:
    """The parts of a product of few rows as they are, unless there is a bias to add or they are much to send."""
    device, (n, k), num_rows = weight.tensors[0].device, weight.shape, len(x)
    table, x = linear_table(device), rows_of(x, weight)
    config = product_config(table, multiprocessors(device), weight.format.name, n, k, 1)
    if isinstance(x, Quantized) or not 0 < num_rows <= SMALL_BATCH or config.splits == 1 or weight.bias is not None:
        return _put(linear(x, weight)[None], place)
    sent = False

    def memory(shape: tuple[int, ...]) -> Tensor:
        nonlocal sent
        sent = place is not None and math.prod(shape) * 4 <= _MOST_SENT
        return torch.empty(shape, device=device) if place is None or not sent else place.room(shape, torch.float32)

    parts = few_rows_with(config, table, x, weight, False, memory)
    if place is None or sent:
        return Summands(parts, place)
    return _put(add_up(Summands(parts), torch.float32)[None], place)  # this rank's sum, not rounded: it changes nothing


def _put(parts: Tensor, place: Place | None) -> Summands:
    if place is None:
        return Summands(parts)
    return Summands(place.room(parts.shape, parts.dtype).copy_(parts), place)
