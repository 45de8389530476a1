"""Attention over slots on a GPU: the operations of `kernels.protocol` over the Triton kernels of this folder.

Nothing here waits for the device or asks for a length: grids come from static shapes, so every call can be captured in a
CUDA graph (after one call has compiled the kernels).
"""

from __future__ import annotations

from functools import cache
from typing import cast

import torch
import triton.language as tl
from torch import Tensor

from pocketllm.kernels.triton import attend_hopper, attend_hopper_plain
from pocketllm.kernels.triton.attend_kernels import merge_kernel, split_kernel
from pocketllm.kernels.triton.linear_tuning import linear_table
from pocketllm.kernels.triton.pieces import TritonCodec, TritonPieces
from pocketllm.kernels.triton.prefill_kernels import prefill_kernel
from pocketllm.kernels.triton.storage import append_kernel, dequantize_kernel, rotate_kernel
from pocketllm.kernels.triton.tuning import (
    AttendConfig,
    AttentionConfig,
    PrefillConfig,
    attention_config,
    multiprocessors,
)
from pocketllm.kernels.types import AttentionMask, LayerKV

ROWS = 8  # query rows of a block: the fewest a product takes
MOST_BLOCKS = 4  # of query rows that share a tile of K and V
MERGED = 16  # splits that a program adds up at a time
FLOAT32_TOKENS = 32  # most of a tile where products run in float32
LOG2E = 1.4426950408889634
LONG = 2048  # tokens of a chunk from which on decoding K and V for the library pays (`prefill_library`)
BUFFER = 64 * 2**20  # bytes of K and V decoded for it
# Whether the compiler may contract a product and a sum to one instruction where it likes. It likes otherwise in kernels
# compiled for other numbers of rows or sequences, and then their results differ in the last bit. Kernels say `tl.fma`.
FUSION = False
PARTIALS = 128 * 2**20  # bytes of unmerged splits held at a time; more slots are taken in several launches


@cache
def _codec_pieces(codec: TritonCodec, head_dim: int) -> TritonPieces:
    return codec.triton_pieces(head_dim)


def pieces_of(kv: LayerKV) -> TritonPieces:
    return _codec_pieces(cast(TritonCodec, kv.codec), kv.head_dim)


@cache
def signs_of(pieces: TritonPieces, device: torch.device) -> Tensor | None:
    return None if pieces.signs is None else pieces.signs.to(device)


def _padded(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _config(kv: LayerKV) -> AttentionConfig:
    token_bytes = sum(p.shape[3] * p.element_size() for p in kv.planes)
    if pieces_of(kv).dtype == torch.float32:  # tiles are as large as those of a format stored so
        token_bytes = max(token_bytes, 2 * kv.head_dim * 4)
    return attention_config(kv.planes[0].device, kv.head_dim, token_bytes)


def _half(kv: LayerKV) -> int:
    return 0 if kv.key_bias is None else kv.key_bias.cos.shape[1]


def _bias(kv: LayerKV) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (None, None, None) if kv.key_bias is None else (kv.key_bias.bias, kv.key_bias.cos, kv.key_bias.sin)


def _early(device: torch.device, num_tokens: int) -> int:
    """When kernels of a pass of so many tokens let the next one start (see `linear_tuning`)."""
    return linear_table(device).early_for(num_tokens)


def _heads(x: Tensor) -> Tensor:
    """x [T, Hk, D] with contiguous heads, as the kernels read it."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def append(kv: LayerKV, k: Tensor, v: Tensor, token_slots: Tensor, positions: Tensor) -> None:
    pieces, (num_tokens, kv_heads, head_dim) = pieces_of(kv), k.shape
    signs, k, v, early = signs_of(pieces, k.device), _heads(k), _heads(v), _early(k.device, num_tokens)
    append_kernel[(num_tokens, kv_heads)](
        k, v, k.stride(0), v.stride(0), kv.planes, kv.block_table, kv.block_table.shape[1], token_slots, positions,
        signs, HK=kv_heads, D=head_dim, DP=_padded(head_dim), PAGE=kv.page_size, ROTATED=signs is not None,
        STORE_ROW=pieces.store_row, EARLY=early, num_warps=2, launch_pdl=early > 0,
    )  # fmt: skip


def dequantize(kv: LayerKV, slot_id: int, kv_len: int) -> tuple[Tensor, Tensor]:
    pieces, kv_heads, device = pieces_of(kv), kv.planes[0].shape[2], kv.planes[0].device
    signs = signs_of(pieces, device)
    k = torch.empty(kv_len, kv_heads, kv.head_dim, device=device)
    v = torch.empty_like(k)
    if kv_len:
        dequantize_kernel[(kv_len, kv_heads)](
            k, v, kv.planes, kv.block_table, kv.block_table.shape[1], slot_id, signs,
            *_bias(kv), HK=kv_heads, D=kv.head_dim, DP=_padded(kv.head_dim), PAGE=kv.page_size,
            ROTATED=signs is not None, HALF=_half(kv), SCALED=pieces.scaled, LOAD_K=pieces.load_k,
            LOAD_V=pieces.load_v, num_warps=2,
        )  # fmt: skip
    return k, v


def rotate(x: Tensor, out: Tensor, signs: Tensor, back: bool) -> Tensor:
    """Each row of x [..., D] rotated, or rotated back, into `out`."""
    (rows, head_dim), early = (x.numel() // x.shape[-1], x.shape[-1]), _early(x.device, x.shape[:-2].numel())
    rotate_kernel[(rows,)](
        x, out, signs, D=head_dim, DP=_padded(head_dim), BACK=back, EARLY=early, num_warps=1, launch_pdl=early > 0
    )
    return out


def stored_queries(kv: LayerKV, q: Tensor) -> Tensor:
    """q [..., D] in the storage's basis and, if that is a rotated one, the products' type."""
    signs = signs_of(pieces_of(kv), q.device)
    return q if signs is None else rotate(q, torch.empty_like(q, dtype=pieces_of(kv).dtype), signs, back=False)


def attend(kv: LayerKV, q: Tensor, slot_ids: Tensor, kv_lens: Tensor, scale: float, mask: AttentionMask) -> Tensor:
    return attend_with(_config(kv), kv, q, slot_ids, kv_lens, scale, mask)


def attend_with(
    config: AttentionConfig,
    kv: LayerKV,
    q: Tensor,
    slot_ids: Tensor,
    kv_lens: Tensor,
    scale: float,
    mask: AttentionMask,
) -> Tensor:
    """`attend` with given tile sizes, as the tuner calls it."""
    n, q_len, num_heads, head_dim = q.shape
    chosen = config.attend if num_heads // kv.planes[0].shape[2] * q_len <= ROWS else config.verify
    if attend_hopper.fits(kv, pieces_of(kv), mask):
        chosen = attend_hopper.of_both_groups(chosen)
    max_splits = chosen.num_splits(kv.block_table.shape[1] * kv.page_size)
    at_a_time = max(PARTIALS // (q_len * num_heads * max_splits * (head_dim + 2) * 4), 1)
    q = q.contiguous()
    out = torch.empty_like(q)
    for i in range(0, n, at_a_time):
        part = slice(i, min(i + at_a_time, n))
        _attend(kv, q[part], slot_ids[part], kv_lens[part], scale, mask, out[part], chosen, max_splits)
    return out


def _split(
    pieces: TritonPieces, kv: LayerKV, q: Tensor, slot_ids: Tensor, kv_lens: Tensor, part_out: Tensor, part_sums: Tensor,
    scale: float, mask: AttentionMask, config: AttendConfig, early: int,
) -> None:  # fmt: skip
    n, q_len, num_heads, head_dim = q.shape
    half, kv_heads, padded = _half(kv), kv.planes[0].shape[2], _padded(head_dim)
    block_n = min(config.block_n, kv.page_size, FLOAT32_TOKENS if pieces.dtype == torch.float32 else config.block_n)
    blocks = -(-num_heads // kv_heads * q_len // ROWS)
    # Products in float32 and a key bias's terms leave no registers for a second block.
    most = MOST_BLOCKS if half == 0 and pieces.dtype.itemsize == 2 else 1
    blocks = -(-blocks // -(-blocks // most))  # of a piece of work, all of about one size
    as_stored = all(p.dtype == pieces.dtype for p in kv.planes)
    unpack = not as_stored and pieces.dtype.itemsize == 2
    split_kernel[(config.programs * multiprocessors(q.device),)](
        stored_queries(kv, q), q, kv.planes, kv.block_table, kv.block_table.shape[1], slot_ids, kv_lens, n, *_bias(kv),
        part_out, part_sums, part_out.shape[1], scale * LOG2E,
        Q=q_len, HQ=num_heads, HK=kv_heads, D=head_dim, DP=padded, PAGE=kv.page_size,
        SPLITS=config.splits, M=ROWS, BLOCKS=blocks, BLOCK_N=block_n, NP=max(_padded(n), 8),
        WINDOW=mask.window, SINKS=mask.sinks, HALF=half, HALFP=max(_padded(half), 16),
        DTYPE=getattr(tl, str(pieces.dtype).removeprefix("torch.")), SCALED=pieces.scaled,
        LOAD_K=pieces.load_k, LOAD_V=pieces.load_v, WIDTHS=tuple(p.shape[3] for p in kv.planes),
        UNPACK=unpack, HALVES=config.halves and unpack and padded >= 128, EARLY=early,
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=FUSION, launch_pdl=early > 0,
    )  # fmt: skip


def _merge(
    signs: Tensor | None, kv_lens: Tensor, part_out: Tensor, part_sums: Tensor, out: Tensor, config: AttendConfig, early: int
) -> None:  # fmt: skip
    n, q_len, num_heads, head_dim = out.shape
    padded = _padded(head_dim)
    # A rotation is quickest within a warp; without one, more programs have a part of a row each.
    chunk = min(padded, 64) if signs is None else padded
    merge_kernel[(n * q_len * num_heads, padded // chunk)](
        part_out, part_sums, kv_lens, signs, out, part_out.shape[1], ROWS=q_len * num_heads,
        D=head_dim, DP=padded, CHUNK=chunk, SPLITS=config.splits, BLOCK=MERGED, EARLY=early,
        num_warps=2 if signs is None else 1, num_stages=1, enable_fp_fusion=FUSION, launch_pdl=early > 0,
    )  # fmt: skip


def _attend(
    kv: LayerKV,
    q: Tensor,
    slot_ids: Tensor,
    kv_lens: Tensor,
    scale: float,
    mask: AttentionMask,
    out: Tensor,
    config: AttendConfig,
    max_splits: int,
) -> None:
    n, q_len, num_heads, head_dim = q.shape
    pieces, device = pieces_of(kv), q.device
    signs = signs_of(pieces, device)
    rows = n * q_len * num_heads
    part_dtype = torch.float16 if pieces.scaled else torch.float32
    part_out = torch.empty(rows, max_splits, head_dim, dtype=part_dtype, device=device)
    part_sums = torch.empty(rows, max_splits, 2, dtype=torch.float32, device=device)
    early = _early(device, n * q_len)
    if attend_hopper.fits(kv, pieces, mask):
        attend_hopper.split(pieces, signs, kv, q, slot_ids, kv_lens, part_out, part_sums, scale * LOG2E, config, early)
    elif attend_hopper_plain.fits(kv, pieces, mask):
        attend_hopper_plain.split(kv, q, slot_ids, kv_lens, part_out, part_sums, scale * LOG2E, config, early)
    else:
        _split(pieces, kv, q, slot_ids, kv_lens, part_out, part_sums, scale, mask, config, early)
        _merge(signs, kv_lens, part_out, part_sums, out, config, early)
        return
    attend_hopper.merge(signs, kv_lens, part_out, part_sums, out, config, early)


def prefill(
    kv: LayerKV,
    q: Tensor,
    slot_ids: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    scale: float,
    mask: AttentionMask,
) -> Tensor:
    return prefill_with(_config(kv).prefill, kv, q, slot_ids, cu_seqlens_q, kv_lens, scale, mask)


def prefill_with(
    config: PrefillConfig,
    kv: LayerKV,
    q: Tensor,
    slot_ids: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    scale: float,
    mask: AttentionMask,
) -> Tensor:
    """`prefill` with given tile sizes, as the tuner calls it."""
    num_tokens, num_heads, head_dim = q.shape
    pieces, n = pieces_of(kv), len(slot_ids)
    signs, kv_heads, half = signs_of(pieces, q.device), kv.planes[0].shape[2], _half(kv)
    q = q.contiguous()
    # The kernel must find q in the products' type: converted there, it would pass through registers at every tile.
    stored_q = stored_queries(kv, q).to(pieces.dtype)
    out = torch.empty(q.shape, dtype=q.dtype if signs is None else torch.float32, device=q.device)
    blocks = -(-num_tokens * (num_heads // kv_heads) // config.block_m) + n  # each sequence may leave one part empty
    prefill_kernel[(blocks, kv_heads)](
        stored_q, q, kv.planes, kv.block_table, kv.block_table.shape[1], slot_ids, cu_seqlens_q, kv_lens, n,
        *_bias(kv), out, scale * LOG2E, HQ=num_heads, HK=kv_heads, D=head_dim, DP=_padded(head_dim), PAGE=kv.page_size,
        BLOCK_M=config.block_m, BLOCK_N=min(config.block_n, kv.page_size), NP=max(_padded(n), 8),
        WINDOW=mask.window, SINKS=mask.sinks, HALF=half, HALFP=max(_padded(half), 16),
        SCALED=pieces.scaled, LOAD_K=pieces.load_k, LOAD_V=pieces.load_v,
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=FUSION,
    )  # fmt: skip
    return out if signs is None else rotate(out, torch.empty_like(q), signs, back=True)


def attention_workspace(num_heads: int, head_dim: int, q_len: int, kv_len: int, *, prefill: bool) -> int:
    """Rotated queries and float32 outputs; of `attend` the unmerged splits, of a long chunk what the library is given and a
    second output."""
    rows = num_heads * q_len
    if prefill:
        return rows * head_dim * 10 + (BUFFER + rows * head_dim * 2 if q_len >= LONG else 0)
    splits = -(-kv_len // 256) + 32  # the most of any table
    partials = rows * splits * (head_dim + 2) * 4
    return rows * head_dim * 10 + min(partials, PARTIALS + num_heads * splits * (head_dim + 2) * 4)
