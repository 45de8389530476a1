"""Attention over slots, one slot at a time: gather the slot's rows tile by tile, decode them, softmax.

Queries attend to what was *stored*, for their own token too, so a quantised cache gives the same result whether a token
came in one chunk or many, by decode or by verify.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pocketllm.kernels.reference.rowwise import rotate_half
from pocketllm.kernels.types import AttentionMask, LayerKV, PrefillPart

TILE = 1024  # cached tokens decoded at a time: bounds the workspace


def storage_rows(kv: LayerKV, token_slots: Tensor, positions: Tensor) -> Tensor:
    """Row of each (slot, position) in the flattened planes [(num_pages + 1) * page_size, Hk, width]. int64 [T]."""
    pages = kv.block_table[token_slots.long(), positions.long() // kv.page_size].long()
    return pages * kv.page_size + positions.long() % kv.page_size


def append(kv: LayerKV, k: Tensor, v: Tensor, token_slots: Tensor, positions: Tensor) -> None:
    rows = storage_rows(kv, token_slots, positions)
    for plane, data in zip(kv.planes, kv.codec.encode(k, v), strict=True):
        flat = plane.flatten(0, 1).view(torch.uint8)  # bytes: index_copy_ knows no 8-bit floats
        flat.index_copy_(0, rows, data.to(plane.dtype).contiguous().view(torch.uint8))


def dequantize(kv: LayerKV, slot_id: int, kv_len: int) -> tuple[Tensor, Tensor]:
    return _load(kv, slot_id, 0, kv_len)


def _load(kv: LayerKV, slot_id: int, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Tokens start..end-1 of a slot as K, V [end - start, Hk, D] float32."""
    positions = torch.arange(start, end, device=kv.block_table.device)
    rows = storage_rows(kv, torch.full_like(positions, slot_id), positions)
    stored = [plane.flatten(0, 1).view(torch.uint8)[rows].view(plane.dtype) for plane in kv.planes]
    k, v = kv.codec.decode(stored, kv.head_dim)
    if kv.key_bias is not None:
        bias = kv.key_bias
        k = k + rotate_half(bias.bias.expand_as(k), bias.cos[positions, None], bias.sin[positions, None])
    return k, v


def attention_workspace(num_heads: int, head_dim: int, q_len: int, kv_len: int, *, prefill: bool) -> int:
    tile = min(TILE, kv_len)
    scores = 3 * num_heads * q_len * tile * 4 + q_len * tile * 32  # product, weights, a copy; positions of the mask
    outputs = 4 * num_heads * q_len * (head_dim + 2) * 4
    return scores + outputs + 8 * num_heads * tile * head_dim * 4  # K and V: stored, decoded, rotated back, per head


def attend(kv: LayerKV, q: Tensor, slot_ids: Tensor, kv_lens: Tensor, scale: float, mask: AttentionMask) -> Tensor:
    out = torch.empty_like(q)
    q_len = q.shape[1]
    for i, (slot, kv_len) in enumerate(zip(slot_ids.tolist(), kv_lens.tolist(), strict=True)):
        for j in range(q_len):  # one query at a time: a verified token is computed exactly like a decoded one
            out[i, j : j + 1] = _attend_slot(kv, q[i, j : j + 1], slot, kv_len - q_len + j + 1, scale, mask)
    return out


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
    out = torch.empty_like(q)
    bounds = cu_seqlens_q.tolist()
    for i, (slot, kv_len) in enumerate(zip(slot_ids.tolist(), kv_lens.tolist(), strict=True)):
        part = slice(bounds[i], bounds[i + 1])
        out[part] = _attend_slot(kv, q[part], slot, kv_len, scale, mask)
    return out


def _attend_slot(kv: LayerKV, q: Tensor, slot: int, kv_len: int, scale: float, mask: AttentionMask) -> Tensor:
    """q [Q, Hq, D], the last Q of the slot's kv_len tokens -> [Q, Hq, D].

    Softmax over tiles of TILE tokens, from the first on: with the largest score so far as reference, each tile adds to a
    running sum of weights and of weighted values, rescaled when the largest score grows (arXiv 2205.14135).
    """
    q_len, num_heads, head_dim = q.shape
    queries = q.float().transpose(0, 1) * scale  # [Hq, Q, D]
    largest = queries.new_full((num_heads, q_len, 1), float("-inf"))
    weight_sum = queries.new_zeros((num_heads, q_len, 1))
    out = queries.new_zeros((num_heads, q_len, head_dim))
    for start in range(0, kv_len, TILE):
        end = min(start + TILE, kv_len)
        k, v = _load(kv, slot, start, end)  # [L, Hk, D]
        group = num_heads // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))  # [Hq, L, D]
        scores = queries @ k.transpose(1, 2)  # [Hq, Q, L]
        scores.masked_fill_(~visible(q_len, kv_len, start, end, mask, q.device), float("-inf"))
        new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        reference = new_largest.masked_fill(new_largest == float("-inf"), 0.0)  # a query that has seen nothing yet
        weights = (scores - reference).exp_()
        shrink = (largest - reference).exp()
        weight_sum = weight_sum * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ v
        largest = new_largest
    return (out / weight_sum).transpose(0, 1).to(q.dtype)


def visible(q_len: int, kv_len: int, start: int, end: int, mask: AttentionMask, device: torch.device) -> Tensor:
    """Which of tokens start..end-1 each of the last q_len of kv_len queries sees: bool [Q, end - start]."""
    query = torch.arange(kv_len - q_len, kv_len, device=device).unsqueeze(1)
    key = torch.arange(start, end, device=device).unsqueeze(0)
    seen = key <= query
    if mask.window:
        seen &= (query - key < mask.window) | (key < mask.sinks)
    return seen
