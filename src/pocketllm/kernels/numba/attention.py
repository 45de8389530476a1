"""Attention over slots on a CPU: the operations of `kernels.protocol`, over the kernels of `attention_kernels`.

Decode, verify and prefill agree bit for bit: a query's sums run over the tokens of its own slot in one order, fixed from
the start of the sequence, whatever else the pass contains and however it was cut.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pocketllm.kernels.numba.attention_kernels import PREFILL_ROWS, attend_kernel, prefill_kernel
from pocketllm.kernels.numba.attention_storage import angle_columns, append_kernel, dequantize_kernel
from pocketllm.kernels.numba.attention_tiles import MAX_ROWS, SPLIT
from pocketllm.kernels.numba.format_pieces import Core, NumbaCodec
from pocketllm.kernels.numba.launch import launch
from pocketllm.kernels.numba.threads import pool_handle
from pocketllm.kernels.types import AttentionMask, KVCodec, LayerKV, PrefillPart

_NO_BIAS = (0, 0, 0)
_angles: MutableMapping[Tensor, Any] = WeakIdKeyDictionary()  # by cosine table, which all layers share


@cache
def _core(codec: KVCodec, head_dim: int, rows: int, shared: bool) -> tuple[Core, int]:
    """A core, and the address of the signs of its rotation."""
    if head_dim % 16:
        raise ValueError(f"head_dim = {head_dim}: the Numba kernels need a multiple of 16")
    pieces = cast(NumbaCodec, codec).numba_pieces(head_dim)
    return Core(pieces, rows, shared), pieces.signs.data_ptr() if pieces.signs is not None else 0


def _cache(kv: LayerKV) -> tuple[tuple[int, ...], int, int, int, int]:
    planes, table = kv.planes, kv.block_table
    page_size, kv_heads = planes[0].shape[1:3]
    return tuple(p.data_ptr() for p in planes), table.data_ptr(), table.shape[1], page_size.bit_length() - 1, kv_heads


def _bias(kv: LayerKV) -> tuple[int, int, int]:
    bias = kv.key_bias
    if bias is None:
        return _NO_BIAS
    angles = _angles.get(bias.cos)
    if angles is None:
        angles = _angles[bias.cos] = angle_columns(bias.cos, bias.sin)
    return bias.bias.data_ptr(), angles.ctypes.data, bias.cos.shape[1]


def _floats(x: Tensor) -> Tensor:
    return x.to(torch.float32).contiguous()


def _token_rows(x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """x [T, Hk, D] as float32 whose heads are contiguous, and (address, bytes from token to token)."""
    if x.dtype != torch.float32 or x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        x = _floats(x)
    return x, (x.data_ptr(), x.stride(0) * 4)


def append(kv: LayerKV, k: Tensor, v: Tensor, token_slots: Tensor, positions: Tensor) -> None:
    core, signs = _core(cast(Any, kv.codec), kv.head_dim, 1, False)
    (k, k_at), (v, v_at) = _token_rows(k), _token_rows(v)
    token_slots, positions = token_slots.to(torch.int32).contiguous(), positions.to(torch.int64).contiguous()
    launch(
        append_kernel,
        pool_handle(),
        core,
        _cache(kv),
        k_at,
        v_at,
        token_slots.data_ptr(),
        positions.data_ptr(),
        len(k),
        signs,
    )


def dequantize(kv: LayerKV, slot_id: int, kv_len: int) -> tuple[Tensor, Tensor]:
    core, signs = _core(cast(Any, kv.codec), kv.head_dim, 1, False)
    k = torch.empty(kv_len, kv.planes[0].shape[2], kv.head_dim)
    v = torch.empty_like(k)
    launch(
        dequantize_kernel,
        pool_handle(),
        core,
        _cache(kv),
        _bias(kv),
        slot_id,
        kv_len,
        k.data_ptr(),
        v.data_ptr(),
        signs,
    )
    return k, v


def attend(kv: LayerKV, q: Tensor, slot_ids: Tensor, kv_lens: Tensor, scale: float, mask: AttentionMask) -> Tensor:
    n, q_len, num_heads, head_dim = q.shape
    where = _cache(kv)
    group = num_heads // where[4]
    alone = q_len == 1 and group <= MAX_ROWS  # decode: one block of rows of exactly the group's size
    core, signs = _core(cast(Any, kv.codec), head_dim, group if alone else MAX_ROWS, not alone)
    x = _floats(q)
    out = torch.empty_like(x)
    slot_ids, kv_lens = slot_ids.to(torch.int32).contiguous(), kv_lens.to(torch.int32).contiguous()
    batch = (x.data_ptr(), out.data_ptr(), slot_ids.data_ptr(), 0, kv_lens.data_ptr(), n, q_len, num_heads)
    launch(attend_kernel, pool_handle(), core, where, _bias(kv), batch, (mask.window, mask.sinks), scale, signs)
    return out.to(q.dtype)


def prefill(
    kv: LayerKV,
    q: Tensor,
    slot_ids: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    scale: float,
    mask: AttentionMask,
    parts: Sequence[PrefillPart] | None = None,
) -> Tensor:
    num_heads, head_dim = q.shape[1:]
    core, signs = _core(cast(Any, kv.codec), head_dim, MAX_ROWS, True)
    x = _floats(q)
    out = torch.empty_like(x)
    slot_ids, kv_lens = slot_ids.to(torch.int32).contiguous(), kv_lens.to(torch.int32).contiguous()
    bounds = cu_seqlens_q.to(torch.int32).contiguous()
    batch = (
        x.data_ptr(), out.data_ptr(), slot_ids.data_ptr(), bounds.data_ptr(), kv_lens.data_ptr(), len(slot_ids), 0,
        num_heads,
    )  # fmt: skip
    launch(prefill_kernel, pool_handle(), core, _cache(kv), _bias(kv), batch, (mask.window, mask.sinks), scale, signs)
    return out.to(q.dtype)


def attention_workspace(num_heads: int, head_dim: int, q_len: int, kv_len: int, *, prefill: bool) -> int:
    """Results of a slot's splits, kept until they are merged; scratch memory of 16 threads; and once, whatever the number
    of slots, the angles of all positions in the order of `angle_columns`."""
    splits = -(-kv_len // SPLIT)
    rows = max(num_heads * q_len, PREFILL_ROWS)
    per_thread = 4 * (3 * PREFILL_ROWS * (2 * head_dim + 33) + 64 * (4 * head_dim + 64))
    outputs = 2 * 4 * rows * head_dim
    return outputs + 4 * splits * (rows + MAX_ROWS) * (head_dim + 32) + 16 * per_thread + 4 * kv_len * head_dim
