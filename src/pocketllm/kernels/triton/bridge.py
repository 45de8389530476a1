"""`bridge`: from one mixer to the next in one persistent kernel (`bridge_kernels`), where the device's table says so."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, cast

import torch
import triton
from torch import Tensor

from pocketllm.kernels.protocol import Cross
from pocketllm.kernels.triton.linear_tuning import linear_table
from pocketllm.kernels.triton.pairs import room_for_pairs, to_pairs
from pocketllm.kernels.triton.tuning import multiprocessors
from pocketllm.kernels.types import Activations, Bridge, Paired
from pocketllm.parallel import MOST_PARTS, SMALL_BATCH, Place

TILE = 128  # outputs of a product's tiles
GROUPS = 2  # groups of 128 columns that a program takes at a time
UNIT = 128 * GROUPS  # columns
MOST_HIDDEN = 16384  # a program adds up the squares of all groups of a row at once
MOST_UNEVEN = 1.03  # units of the program with most of them over the mean, of gate and up in `own_pairs`
MOST_PAIRS = 4  # of a program: the kernel has code for each
KEPT = 3072  # bytes of shared memory for weights' scales (`bridge_kernels.keep_scales`)
ADDED_ROWS = 8  # that one program adds up of a pair that is left over there
# rows: (warps that multiply, places in the ring of units of weights and of rows, units of weights on their way)
SIZES = {8: (8, 6, 6, 2), 16: (8, 6, 2, 2), 32: (8, 5, 2, 2), 64: (8, 3, 3, 2)}


def bridge(weights: Bridge, num_rows: int, dtype: object, places: Sequence[Place] = ()) -> Cross | None:
    table = linear_table(weights.out.tensors[0].device)
    if not (table.bridge and 0 < num_rows <= SMALL_BATCH and dtype == torch.bfloat16 and _fits(weights)):
        return None
    if places and (max(parts_of(weights)[::2]) > MOST_PARTS or _sync_of(weights, places) is None):
        return None
    return partial(_cross, weights, places)


def _fits(weights: Bridge) -> bool:
    """FP8 weights of whole tiles and units, without bias; of the next mixer's, the second may be a narrow one."""
    big = [weights.out, weights.gate_up, weights.down, *weights.next_in[:1]]
    if any(w.format.name != "fp8_block" or w.shape[0] % TILE or w.shape[1] % UNIT for w in big):
        return False
    if len(weights.next_in) > 2 or any(not w.pairs for w in weights.next_in[1:]):
        return False
    tiles = weights.next_in[0].shape[0] // TILE + 2 if weights.next_in else 0
    if 4 * GROUPS * sum(_most_units(weights, tiles)) > KEPT:
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


def _cuts(weights: Bridge) -> tuple[list[tuple[int, int]], int]:
    """(tiles, units of a tile) of the three products that are shared out by units, and over how many programs: none of them
    is without a unit."""
    sms = multiprocessors(weights.out.tensors[0].device)
    cuts = [(w.shape[0] // TILE, w.shape[1] // UNIT) for w in (weights.out, weights.gate_up, weights.down)]
    return cuts, min(sms, *(tiles * units for tiles, units in cuts))


@cache
def own_pairs(tiles: int, units: int, programs: int) -> tuple[int, int, int] | None:
    """How gate's and up's `tiles` tiles are shared out if each program is to have whole pairs of them: pairs of a program,
    how many are left over, and units of a part of those, of which a program has one at most. None where the busiest program
    would have over MOST_UNEVEN times the mean, or where too few are left without a part to add the parts up.

    It must follow from the arguments alone: bridges of a shape share counters (`_sync_of`)."""
    own, left = divmod(tiles // 2, programs)
    if left == 0:
        return (own, 0, units) if 0 < own <= MOST_PAIRS else None
    parted, adders = 2 * units * left, left * (SMALL_BATCH // ADDED_ROWS)
    # a part is in one tile, and of as few units as can be
    cut = next((n for n in range(1, units + 1) if units % n == 0 and parted <= n * (programs - adders)), None)
    if not 0 < own <= MOST_PAIRS or cut is None or (2 * units * own + cut) * programs > MOST_UNEVEN * tiles * units:
        return None
    return own, left, cut


def _own_pairs(weights: Bridge) -> tuple[int, int, int] | None:
    cuts, programs = _cuts(weights)
    return own_pairs(*cuts[1], programs)


def parts_of(weights: Bridge) -> list[int]:
    """How many parts tiles' results have; with `own_pairs`, those of the pairs that are left over."""
    (out, gate_up, down), programs = _cuts(weights)
    own = _own_pairs(weights)
    of_gate_up = num_parts(*gate_up, programs) if own is None else gate_up[1] // own[2]
    return [num_parts(*out, programs), of_gate_up, num_parts(*down, programs)]


def _most_units(weights: Bridge, last_tiles: int) -> tuple[int, ...]:
    """Of each product, the units that one program has at most, rounded up to a power of two."""
    cuts, programs = _cuts(weights)
    counts = [-(-tiles * units // programs) for tiles, units in cuts]
    own = _own_pairs(weights)
    if own is not None:
        counts[1] = 2 * cuts[1][1] * own[0] + (own[2] if own[1] else 0)
    counts.append(-(-max(last_tiles, 1) // programs) * (weights.out.shape[0] // UNIT))
    return tuple(triton.next_power_of_2(n) for n in counts)


def _new_sync(device: torch.device, programs: int, hidden: int, inner: int) -> Tensor:
    return torch.zeros(programs + 2 * (2 * hidden + inner) // TILE, dtype=torch.int64, device=device)


_device_sync = cache(_new_sync)


def _sync_of(weights: Bridge, places: Sequence[Place]) -> Tensor | None:
    """What programs of bridges of this shape meet by, one kernel after the other (`sync` of `bridge_kernel`). Bridges on two
    streams at a time would wait for multiprocessors that the other holds: there must be one stream.

    Ranks that send each other words have one to a group: kernels' numbers are the stamps, so all ranks must count from the
    same one on, and a word must not be another bridge's. None if bridges of another shape meet there.
    """
    device, shape = weights.out.tensors[0].device, (_cuts(weights)[1], *weights.down.shape)
    if not places:
        return _device_sync(device, *shape)
    meetings = places[0].meetings
    if not meetings:
        meetings[shape] = _new_sync(device, *shape)
    return meetings.get(shape)


def _tiles_of(x: Tensor, rows: int) -> Any:
    """A descriptor of x [N, K] e4m3 for a unit's tiles at a time, side by side, of `rows` rows and 128 columns."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    n, k = x.shape
    return TensorDescriptor(x, [k // TILE, n, TILE], [TILE, k, 1], [GROUPS, rows, TILE], NVMMASharedLayout(128, 8, 3))


def _rows_of(x: Paired) -> tuple[Any, Any]:
    """Descriptors of its codes and its scales, for a unit's groups at a time."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    scales = TensorDescriptor.from_tensor(x.scales, [GROUPS, x.scales.shape[1]], NVMMASharedLayout(0, 32, 2))
    return _tiles_of(x.codes, len(x.codes)), scales


def _cross(weights: Bridge, places: Sequence[Place], x: Activations, residual: Tensor) -> list[Tensor]:
    from pocketllm.kernels.triton.bridge_kernels import bridge_kernel  # Gluon is not loaded where no bridge is

    x = x if isinstance(x, Paired) else to_pairs(cast(Tensor, x))
    (num_rows, width), hidden, device, dtype = x.shape, residual.shape[1], residual.device, residual.dtype
    inner, pairs = weights.down.shape[1], len(x.codes)
    warps, *in_ring, flight = SIZES[pairs // 2]
    programs, parts = _cuts(weights)[1], parts_of(weights)
    normed, product = room_for_pairs(num_rows, hidden, dtype, device), room_for_pairs(num_rows, inner, dtype, device)

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    last, small, own = weights.next_norm is None, len(weights.next_in) == 2, _own_pairs(weights)
    outs = scratch(parts[0], num_rows, hidden)  # (or parts are sent)
    gated = scratch(parts[1], num_rows, 2 * inner if own is None else 2 * TILE * own[1])
    of_downs = parts[2], num_rows, hidden
    # of the last block, whoever reads the parts adds up all ranks'
    downs = places[1].room(of_downs, torch.float32) if places and last else scratch(*of_downs)
    mail: list[Tensor | None] = [None] * 3
    rank, num_ranks, sync = 0, 1, _sync_of(weights, places)
    if places:
        mail = [*(place.inboxes for place in places), places[0].stop]
        rank, num_ranks = places[0].rank, places[0].size
    following = weights.down if last else weights.next_in[0]  # anything, after the last block
    narrow = weights.next_in[1].pairs if small else following.tensors
    out = torch.empty(num_rows, following.shape[0], dtype=dtype, device=device)
    out_small = scratch(2, num_rows, TILE)
    planes: list[Any] = []
    for matrix, scales in [w.tensors for w in (weights.out, weights.gate_up, weights.down, following)] + [narrow]:
        planes += [_tiles_of(matrix, TILE), scales]
    rows: list[Any] = []
    for paired in (normed, product):
        rows += [*_rows_of(paired), paired.codes, paired.scales]
    tiles, small_tiles = 0 if last else following.shape[0] // TILE, 2 if small else 0
    bridge_kernel[(programs,)](
        *_rows_of(x), *planes, residual, weights.norm, weights.norm if last else weights.next_norm, *rows,
        scratch(num_rows, hidden // TILE), outs, gated, downs, out, out_small,
        sync, *mail, rank, num_rows, tiles, small_tiles, weights.eps,
        H=hidden, A=width, I=inner, ROWS=pairs // 2, WARPS=warps, PLACES=tuple(in_ring), FLIGHT=flight,
        GROUPS=GROUPS,
        PARTS=tuple(parts), RANKS=num_ranks, MOST=_most_units(weights, tiles + small_tiles), OWN=own,
        num_warps=warps, launch_pdl=True,
    )  # fmt: skip
    return [downs] if last else [out, out_small] if small else [out]
