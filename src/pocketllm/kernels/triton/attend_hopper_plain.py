"""Decode and verify by `attend_hopper_plain_kernels`: where that fits, and its launch."""

from __future__ import annotations

import triton
from torch import Tensor

from pocketllm.kernels.triton.attend_hopper import TILE, suits, tiles_of
from pocketllm.kernels.triton.pieces import TritonPieces
from pocketllm.kernels.triton.tuning import AttendConfig, multiprocessors
from pocketllm.kernels.types import AttentionMask, LayerKV

HEAD_DIMS = (128, 256)
MOST_ROWS = 32  # query rows of a piece of work
PROGRAMS = 1  # of a multiprocessor
REGISTERS = 128  # of a thread: eight warps are set up, of whose registers the four that compute get most
ROOM = 227 * 1024  # bytes of shared memory a program may take
MOST_PLACES = 12


def fits(kv: LayerKV, pieces: TritonPieces, mask: AttentionMask) -> bool:
    """Whether a layer's cache is read by it: where `attend_hopper.suits` says so, heads of 128 or 256 and a format that
    stores K and V as they are, in 16 bits."""
    return (
        len(kv.planes) == 2
        and not pieces.scaled
        and pieces.dtype.itemsize == 2
        and all(plane.dtype == pieces.dtype for plane in kv.planes)
        and kv.head_dim in HEAD_DIMS
        and suits(kv, mask)
    )


def split(
    kv: LayerKV, q: Tensor, slot_ids: Tensor, kv_lens: Tensor, part_out: Tensor, part_sums: Tensor,
    scale: float, config: AttendConfig, early: int,
) -> None:  # fmt: skip
    """Writes the splits of q [n, Q, HQ, D] to part_out [n * Q * HQ, splits, D] float32 and part_sums [n * Q * HQ, splits, 2]
    float32, as `attend_kernels.split_kernel` does. scale includes log2(e)."""
    # Gluon is not loaded where it is not used
    from pocketllm.kernels.triton.attend_hopper_plain_kernels import hopper_plain_split_kernel

    assert all(tokens % TILE == 0 for tokens in config.splits)
    (n, q_len, num_heads, head_dim), (k, v) = q.shape, kv.planes
    kv_heads = k.shape[2]
    group_rows = num_heads // kv_heads * q_len
    rows = min(max(triton.next_power_of_2(group_rows), 8), MOST_ROWS)
    fixed = rows * (2 * head_dim + 2 * TILE + 32) + 1024
    hopper_plain_split_kernel[(PROGRAMS * multiprocessors(q.device),)](
        q, tiles_of(k), tiles_of(v), kv.block_table, kv.block_table.shape[1], slot_ids, kv_lens, n,
        part_out, part_sums, part_out.shape[1], scale,
        Q=q_len, HQ=num_heads, HK=kv_heads, D=head_dim, PAGE=kv.page_size, SPLITS=config.splits, N=rows,
        NP=max(triton.next_power_of_2(n), 32), PLACES=min((ROOM - fixed) // (TILE * head_dim * 2), MOST_PLACES), EARLY=early,
        num_warps=4, maxnreg=REGISTERS, enable_fp_fusion=False, launch_pdl=early > 0,
    )  # fmt: skip
