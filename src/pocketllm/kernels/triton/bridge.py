"""`bridge`: from one mixer to the next in one persistent kernel (`bridge_kernels`), where the device's table says so."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from pocketllm.kernels.protocol import Cross
from pocketllm.kernels.triton.linear_tuning import linear_table
from pocketllm.kernels.triton.pairs import room_for_pairs, to_pairs
from pocketllm.kernels.triton.tuning import multiprocessors
from pocketllm.kernels.types import Activations, Bridge, Paired
from pocketllm.parallel import SMALL_BATCH

TILE = 128  # outputs of a product's tiles
UNIT = 256  # columns that a program takes at a time
MOST_HIDDEN = 16384
SIZES = {8: (4, 4), 16: (4, 4), 32: (4, 3), 64: (8, 3)}  # rows: (warps, units in flight)


def bridge(weights: Bridge, num_rows: int, dtype: object) -> Cross | None:
    device = weights.out.tensors[0].device
    if (
        not 0 < num_rows <= SMALL_BATCH
        or dtype != torch.bfloat16
        or not linear_table(device).bridge
        or not _fits(weights)
    ):
        return None
    return partial(_cross, weights)


def _fits(weights: Bridge) -> bool:
    """FP8 weights of whole tiles and units, without bias; of the next mixer's, the second may be a narrow one."""
    big = [weights.out, weights.gate_up, weights.down, *weights.next_in[:1]]
    if any(w.format.name != "fp8_block" or w.shape[0] % TILE or w.shape[1] % UNIT for w in big):
        return False
    if len(weights.next_in) > 2 or any(not w.pairs for w in weights.next_in[1:]):
        return False
    return weights.out.shape[0] <= MOST_HIDDEN and all(w.bias is None for w in (*big, *weights.next_in))


@cache
def num_parts(tiles: int, units: int, programs: int) -> int:
    """Most programs that one tile of `units` units has, if `programs` programs share all tiles' evenly."""
    total, most = tiles * units, 1
    for tile in range(tiles):
        first = ((tile * units + 1) * programs - 1) // total
        last = ((tile + 1) * units * programs - 1) // total
        most = max(most, last - first + 1)
    return most


@cache
def _counter(device: torch.device, programs: int) -> Tensor:
    """Where so many programs meet, one kernel after the other."""
    return torch.zeros((), dtype=torch.int64, device=device)


def _tiles_of(x: Tensor, rows: int) -> Any:
    """A descriptor of x [N, K] e4m3 for two tiles at a time, side by side, of `rows` rows and 128 columns."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    n, k = x.shape
    return TensorDescriptor(x, [k // TILE, n, TILE], [TILE, k, 1], [2, rows, TILE], NVMMASharedLayout(128, 8, 3))


def _scales_of(x: Paired) -> Any:
    """A descriptor of its scales for two groups at a time."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(x.scales, [2, x.scales.shape[1]], NVMMASharedLayout(0, 32, 2))


def _cross(weights: Bridge, x: Activations, residual: Tensor) -> list[Tensor]:
    from pocketllm.kernels.triton.bridge_kernels import bridge_kernel  # Gluon is not loaded where no bridge is

    x = x if isinstance(x, Paired) else to_pairs(cast(Tensor, x))
    (num_rows, width), hidden, device, dtype = x.shape, residual.shape[1], residual.device, residual.dtype
    inner, pairs = weights.down.shape[1], len(x.codes)
    warps, stages = SIZES[pairs // 2]
    cuts = [(w.shape[0] // TILE, w.shape[1] // UNIT) for w in (weights.out, weights.gate_up, weights.down)]
    programs = min(multiprocessors(device), *(tiles * units for tiles, units in cuts))  # so that none is without units
    parts = [num_parts(tiles, units, programs) for tiles, units in cuts]
    normed, product = room_for_pairs(num_rows, hidden, dtype, device), room_for_pairs(num_rows, inner, dtype, device)

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    outs, gated, downs = (
        scratch(parts[0], num_rows, hidden),
        scratch(parts[1], num_rows, 2 * inner),
        scratch(parts[2], num_rows, hidden),
    )
    last, small = weights.next_norm is None, len(weights.next_in) == 2
    following = weights.down if last else weights.next_in[0]  # anything, after the last block
    narrow = weights.next_in[1].pairs if small else following.tensors
    out = torch.empty(num_rows, following.shape[0], dtype=dtype, device=device)
    out_small = scratch(2, num_rows, TILE)
    planes: list[Any] = []
    for matrix, scales in [w.tensors for w in (weights.out, weights.gate_up, weights.down, following)] + [narrow]:
        planes += [_tiles_of(matrix, TILE), scales]
    rows: list[Any] = []
    for paired in (normed, product):
        rows += [_tiles_of(paired.codes, pairs), _scales_of(paired), paired.codes, paired.scales]
    bridge_kernel[(programs,)](
        _tiles_of(x.codes, pairs), _scales_of(x), *planes, residual, weights.norm,
        weights.norm if last else weights.next_norm, *rows, scratch(num_rows, hidden // TILE), outs, gated, downs, out,
        out_small, _counter(device, programs), num_rows, 0 if last else following.shape[0] // TILE, 2 if small else 0,
        weights.eps, weights.eps, H=hidden, A=width, I=inner, ROWS=pairs // 2, WARPS=warps, STAGES=stages,
        PARTS_OUT=parts[0], PARTS_INNER=parts[1], PARTS_DOWN=parts[2], num_warps=warps, launch_pdl=True,
    )  # fmt: skip
    return [downs] if last else [out, out_small] if small else [out]
