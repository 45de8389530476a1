# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""Long chunks of prompts by the library's attention (cuDNN), which on Hopper runs at twice the rate of our kernel.

The library wants K and V in 16 bits, side by side: they are decoded block by block of cached tokens, in the basis they are
stored in, into a buffer of fixed size. A query sees all of the tokens before the chunk, and of the chunk those up to its
own: two kinds of attention that the library knows ("no mask", "causal"), of which the softmaxes are then joined by their
sums, kept as logarithms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from pocketllm.kernels.triton import attention
from pocketllm.kernels.triton.attention import BUFFER, LONG
from pocketllm.kernels.triton.storage import tile_rows
from pocketllm.kernels.types import AttentionMask, LayerKV, PrefillPart

_TILE = 64
_ROWS = 4

Attention = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]


@triton.jit
def gather_kernel(
    k_out, v_out, planes, block_table, max_pages, slot, first, kv_len,
    HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr,
    SCALED: tl.constexpr, LOAD_K: tl.constexpr, LOAD_V: tl.constexpr,
):  # fmt: skip
    """Tokens first .. kv_len - 1 of a slot -> k_out, v_out [kv_len - first, HK, D], in the basis of the storage.

    Programs: (tiles of N tokens, which share a page, KV heads). first is a multiple of N.
    """
    start, head = first + tl.program_id(0) * N, tl.program_id(1)
    rows = tile_rows(block_table, max_pages, slot, start, kv_len, N, PAGE) * HK + head
    key, k_scale = LOAD_K(planes, rows, D, DP)
    value, v_scale = LOAD_V(planes, rows, D, DP)
    if SCALED:
        key = key.to(tl.float32) * k_scale[:, None]
        value = value.to(tl.float32) * v_scale[:, None]
    token, d = start + tl.arange(0, N), tl.arange(0, DP)
    at = ((token - first).to(tl.int64) * HK + head)[:, None] * D + d[None, :]
    mask = (token < kv_len)[:, None] & (d < D)[None, :]
    tl.store(k_out + at, key.to(k_out.dtype.element_ty), mask=mask)
    tl.store(v_out + at, value.to(v_out.dtype.element_ty), mask=mask)


@triton.jit
def join_kernel(
    out,
    sums,
    more,
    more_sums,
    num_rows,
    num_tokens,
    HQ: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """out [T, HQ, D] with logarithms of the softmax's sums [HQ, T], joined with those over more tokens, in place."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    mask = (row < num_rows)[:, None] & (d < D)[None, :]
    of_row = row % HQ * num_tokens + row // HQ
    a = tl.load(sums + of_row, mask=row < num_rows, other=0.0)
    b = tl.load(more_sums + of_row, mask=row < num_rows, other=0.0)
    largest = tl.maximum(a, b)
    total = largest + tl.log(tl.exp(a - largest) + tl.exp(b - largest))
    at = row.to(tl.int64)[:, None] * D + d[None, :]
    x = tl.load(out + at, mask=mask, other=0.0).to(tl.float32) * tl.exp(a - total)[:, None]
    x += tl.load(more + at, mask=mask, other=0.0).to(tl.float32) * tl.exp(b - total)[:, None]
    tl.store(out + at, x.to(out.dtype.element_ty), mask=mask)
    tl.store(sums + of_row, total, mask=row < num_rows)


def library_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q [T, HQ, D], k, v [S, HK, D] -> [T, HQ, D], and the logarithms [HQ, T] float32 of the softmax's sums."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, T, D], nothing is copied
    out, sums = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )[:2]
    return out[0].transpose(0, 1).contiguous(), sums.reshape(q.shape[1], q.shape[2])


@cache
def _has_library(device: torch.device) -> bool:
    """On Hopper, where it was measured: with heads of 256 it knows no other generation of cards for sure."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] == 9
        and torch.backends.cudnn.is_available()
    )


def fits(kv: LayerKV, mask: AttentionMask) -> bool:
    """Whether the library can do it: 16-bit products, no window, no key bias to add to the scores."""
    small = kv.head_dim % 8 == 0 and kv.head_dim <= 256
    sixteen = attention.pieces_of(kv).dtype.itemsize == 2
    return small and sixteen and mask.window == 0 and kv.key_bias is None and kv.page_size % _TILE == 0


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
    """As `Kernels.prefill`: each long chunk by the library, the others as `attention.prefill` does it."""
    usable = parts is not None and _has_library(q.device) and fits(kv, mask)
    if parts is None or not usable or all(part.num_tokens < LONG for part in parts):
        return attention.prefill(kv, q, slot_ids, cu_seqlens_q, kv_lens, scale, mask)
    outs, first = [], 0
    for i, part in enumerate(parts):
        some = q[first : first + part.num_tokens]
        if part.num_tokens >= LONG:
            outs.append(long_prefill(kv, some, part, scale, library_attention))
        else:
            bounds = cu_seqlens_q[i : i + 2] - cu_seqlens_q[i]
            outs.append(attention.prefill(kv, some, slot_ids[i : i + 1], bounds, kv_lens[i : i + 1], scale, mask))
        first += part.num_tokens
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def long_prefill(kv: LayerKV, q: Tensor, part: PrefillPart, scale: float, attend: Attention) -> Tensor:
    """q [T, HQ, D], the queries of one slot's chunk -> [T, HQ, D]. attend: as `library_attention`."""
    pieces, (num_tokens, num_heads, head_dim) = attention.pieces_of(kv), q.shape
    kv_heads, padded, device = kv.planes[0].shape[2], triton.next_power_of_2(head_dim), q.device
    most = max(BUFFER // (2 * kv_heads * head_dim * 2) // _TILE, 1) * _TILE
    before = part.kv_len - num_tokens
    if num_tokens > most:  # K and V of the chunk itself must fit the buffer, too
        ends = [*range(most, num_tokens, most), num_tokens]
        shares = zip([0, *ends], ends, strict=False)
        return torch.cat(
            [long_prefill(kv, q[a:b], PrefillPart(part.slot, b - a, before + b), scale, attend) for a, b in shares]
        )
    stored = attention.stored_queries(kv, q).to(pieces.dtype)
    out: Tensor | None = None
    sums = torch.empty(0)
    # the chunk itself in one piece, from the tile it begins in; then what is before it, in pieces that fit the buffer
    spans = [
        (before, part.kv_len, True),
        *((i, min(i + most, before), False) for i in range(0, before, most)),
    ]
    for first, last, causal in spans:
        aligned = first // _TILE * _TILE
        k = torch.empty(last - aligned, kv_heads, head_dim, dtype=pieces.dtype, device=device)
        v = torch.empty_like(k)
        gather_kernel[(triton.cdiv(last - aligned, _TILE), kv_heads)](
            k, v, kv.planes, kv.block_table, kv.block_table.shape[1], part.slot, aligned, last, HK=kv_heads, D=head_dim,
            DP=padded, PAGE=kv.page_size, N=_TILE, SCALED=pieces.scaled, LOAD_K=pieces.load_k, LOAD_V=pieces.load_v,
            num_warps=4,
        )  # fmt: skip
        more, more_sums = attend(stored, k[first - aligned :], v[first - aligned :], causal, scale)
        if out is None:
            out, sums = more, more_sums.contiguous()
            continue
        rows = num_tokens * num_heads
        join_kernel[(triton.cdiv(rows, _ROWS),)](
            out, sums, more, more_sums.contiguous(), rows, num_tokens, HQ=num_heads, D=head_dim, DP=padded, ROWS=_ROWS,
            num_warps=4,
        )  # fmt: skip
    assert out is not None
    signs = attention.signs_of(pieces, device)
    return out.to(q.dtype) if signs is None else attention.rotate(out, torch.empty_like(q), signs, back=True)
