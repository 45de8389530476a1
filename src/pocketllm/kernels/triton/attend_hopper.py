"""Decode and verify by `attend_hopper_kernels`: where that fits, and its launch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from pocketllm.kernels.triton.attend_hopper_queries import query_pairs_kernel
from pocketllm.kernels.triton.pieces import HopperPieces, TritonPieces
from pocketllm.kernels.triton.tuning import AttendConfig, is_hopper, multiprocessors
from pocketllm.kernels.types import AttentionMask, LayerKV

HEAD_DIMS = (128, 256)
TILE = 64  # tokens
CHUNK = 32  # tokens whose V is decoded at a time
MOST_ROWS = 32  # query rows of a piece of work
REGISTERS = 168  # of a thread: twelve warps are set up, of whose registers the eight that compute get most
ROOM = 227 * 1024  # bytes of shared memory a program may take: a multiprocessor has one
MOST_PLACES = 12
# Slots up to which programs make pairs of queries themselves, up to 8 rows of a KV head, for every piece of work anew: one
# kernel less to wait for, the same bits.
OWN_SLOTS = 4
# Of a row that is merged: warps, rounds at once, and how many times those are on their way; for up to so many rows for each
# multiprocessor, and for more. Few rows are waiting for memory, and what many need is registers for all to run at once.
FEW_ROWS, MERGE_FEW, MERGE_MANY = 3, (8, 2, 2), (4, 1, 2)


def suits(kv: LayerKV, mask: AttentionMask) -> bool:
    """Whether Hopper's kernels of decode and verify can read a layer's cache, of whatever format: on a Hopper GPU, pages
    of whole tiles, no window, no key bias to add to the scores."""
    on_hopper = is_hopper(kv.block_table.device)
    return on_hopper and kv.page_size % TILE == 0 and kv.key_bias is None and mask.window == 0


def fits(kv: LayerKV, pieces: TritonPieces, mask: AttentionMask) -> bool:
    """Whether a layer's cache is read by this one: where `suits` says so, heads of 128 or 256 and a format that offers
    `HopperPieces`."""
    return pieces.hopper is not None and kv.head_dim in HEAD_DIMS and suits(kv, mask)


def of_both_groups(config: AttendConfig) -> AttendConfig:
    """With the splits of this kernel, of which a group of warps has half: twice those of the table, but for the first ones
    where those would not come out even."""
    first, until, split = config.splits
    return replace(config, split=2 * split, first_split=first if until % (2 * first) else 2 * first)


def places(rows: int, head_dim: int, width: int, own: bool) -> int:
    """How many tiles, whose tokens take `width` bytes of K and V and two scales, fit a program's shared memory beside all
    else: an even number, as each place has the tiles of one group."""
    # Pairs of queries in two buffers (in two of each group, if these make them), with their factors; both groups' weights
    # [64] fp16 and rooms; what one group gives the other.
    each_row = (4 if own else 2) * (2 * head_dim + 4) + 2 * 2 * TILE + (4 * head_dim + 8) + 64
    fixed = rows * each_row + 3072  # and notes, barriers and what alignment takes
    return min((ROOM - fixed) // (TILE * (width + 8)) // 2 * 2, MOST_PLACES)


@cache
def _pieces(pieces: TritonPieces) -> HopperPieces:
    assert pieces.hopper is not None
    return pieces.hopper()


def tiles_of(plane: Tensor) -> Any:
    """A descriptor of a plane [pages, page, HK, width] for tiles of one head, up to 128 bytes of a row at a time."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    rows, width = plane.shape[0] * plane.shape[1], plane.shape[2] * plane.shape[3]
    row = NVMMASharedLayout(min(plane.shape[3] * plane.itemsize, 128), 8 * plane.itemsize, 2)
    return TensorDescriptor(plane, [rows, width], [width, 1], [TILE, plane.shape[3]], row)


def split(
    pieces: TritonPieces, signs: Tensor | None, kv: LayerKV, q: Tensor, slot_ids: Tensor, kv_lens: Tensor,
    part_out: Tensor, part_sums: Tensor, scale: float, config: AttendConfig, early: int,
) -> None:  # fmt: skip
    """Writes the splits of q [n, Q, HQ, D], which it rotates itself (signs [D] float32 or None), to part_out [n * Q * HQ,
    splits, D] fp16 and part_sums [n * Q * HQ, splits, 2] float32, as `attend_kernels.split_kernel` does. scale includes
    log2(e)."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # Gluon is not loaded where it is not used
    from pocketllm.kernels.triton.attend_hopper_kernels import hopper_split_kernel

    assert all(tokens % TILE == 0 for tokens in config.splits)
    (n, q_len, num_heads, head_dim), hopper, device = q.shape, _pieces(pieces), q.device
    k, v, k_scales, v_scales = kv.planes
    kv_heads = k.shape[2]
    group_rows = num_heads // kv_heads * q_len
    rows = min(max(triton.next_power_of_2(group_rows), 8), MOST_ROWS)
    per_head = -(-group_rows // rows)
    heads = {"Q": q_len, "HQ": num_heads, "HK": kv_heads, "D": head_dim, "N": rows, "EARLY": early}
    queries = factors = None
    if rows > 8 or n > OWN_SLOTS:
        codes = torch.empty(n * kv_heads * per_head * 2 * rows, head_dim, dtype=k.dtype, device=device)
        factors = torch.empty(n * kv_heads * per_head * rows, dtype=torch.float32, device=device)
        query_pairs_kernel[(n * q_len, num_heads)](
            q, signs, codes, factors, PIECES=per_head, PAIR=hopper.pair, **heads,
            num_warps=1, enable_fp_fusion=False, launch_pdl=early > 0,
        )  # fmt: skip
        queries = TensorDescriptor.from_tensor(codes, [2 * rows, head_dim], NVMMASharedLayout(128, 8, 2))
    own = (q, signs) if queries is None else (None, None)
    hopper_split_kernel[(multiprocessors(device),)](
        tiles_of(k), tiles_of(v), k_scales, v_scales, *own, queries, factors, kv.block_table, kv.block_table.shape[1],
        slot_ids, kv_lens, n, part_out, part_sums, part_out.shape[1], scale,
        PAGE=kv.page_size, SPLITS=config.splits, NP=max(triton.next_power_of_2(n), 32),
        PLACES=places(rows, head_dim, k.shape[3] + v.shape[3], queries is None), CHUNK=CHUNK, PAIR=hopper.pair,
        JOIN=hopper.join, LOAD_V=hopper.load_v, IN_ORDER=hopper.in_order, V_FACTOR=hopper.v_factor, **heads,
        num_warps=4, maxnreg=REGISTERS, enable_fp_fusion=False, launch_pdl=early > 0,
    )  # fmt: skip


def merge(
    signs: Tensor | None,
    kv_lens: Tensor,
    part_out: Tensor,
    part_sums: Tensor,
    out: Tensor,
    config: AttendConfig,
    early: int,
) -> None:
    """Merges what `split`, or that of `attend_hopper_plain`, has written, into out [n, Q, HQ, D]."""
    from pocketllm.kernels.triton.attend_hopper_merge import hopper_merge_kernel

    n, q_len, num_heads, head_dim = out.shape
    rows = n * q_len * num_heads
    warps, rounds, ahead = MERGE_FEW if rows <= FEW_ROWS * multiprocessors(out.device) else MERGE_MANY
    hopper_merge_kernel[(rows,)](
        part_out, part_sums, kv_lens, signs, out, part_out.shape[1], ROWS=q_len * num_heads, D=head_dim,
        SPLITS=config.splits, WARPS=warps, ROUNDS=rounds, AHEAD=ahead, EARLY=early,
        num_warps=warps, enable_fp_fusion=False, launch_pdl=early > 0,
    )  # fmt: skip
