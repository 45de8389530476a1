"""V in 4 bits with a scale for every 16 values: what K8V4 does in heads of up to 64.

A scale of 32 bits is half a bit a value in a head of 64, and those bits buy more as four coarse scales: 1.9 dB on Gaussian
values. They share a word (int32) of a row: bits 31-24 hold a unit, as the exponent of a float32, bits 6 g .. 6 g + 5 the
scale of group g = 0 .. 3 in units, 0 to 63. The unit is such that the row's largest scale is 32 units or more. (In
larger heads, groups of a quarter of the head would gain half as much, and cost multiplications in the attention loop.)

A group's codes are the nearest ones for a least-squares scale, from the best of three starts near the scale that puts the
group's largest value on the outermost level. Decoding makes all values larger by a constant, without which a row would on
average be shorter than what it stands for; attention averages errors away, but not that one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pocketllm.cache.formats.cubic_levels import (
    TINY,
    fit,
    levels,
    nearest,
    numba_levels,
    numba_pack,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from pocketllm.kernels.numba.format_pieces import FormatPieces, Lanes, Row

GROUP = 16
MOST_GROUPS = 4  # in a word
BITS = 6  # of a scale
UNITS = 63  # the largest scale
STARTS = (0.88, 0.96, 1.04)
LONGER = 1.0049  # |x|^2 over x . decode(x) without it: the mean over rows of Gaussian values
NO_NUMBER = 255  # the unit's exponent for a row with a NaN: it is decoded to NaN


def is_grouped(head_dim: int) -> bool:
    return head_dim % GROUP == 0 and head_dim <= GROUP * MOST_GROUPS


def encode_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D], already rotated -> packed codes uint8 [..., D/2] and the word of scales [..., 1] int32."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)  # [..., G, 16]
    outermost = groups.abs().amax(-1, keepdim=True).clamp_min(TINY) / levels()[-1].item()
    scale, most = torch.zeros_like(outermost), torch.full_like(outermost, -1.0)
    for start in STARTS:
        fitted, explained = fit(groups, outermost * start)
        better = (explained > most) | explained.isnan()
        scale, most = torch.where(better, fitted, scale), torch.where(better, explained, most)
    exponent = (scale.amax(-2).view(torch.int32) >> 23 & 255) - (BITS - 1)  # [..., 1]
    exponent = torch.where(exponent < 255 - (BITS - 1), exponent.clamp_min(1), NO_NUMBER)
    unit = (exponent << 23).view(torch.float32).unsqueeze(-1)
    units = (scale / unit).nan_to_num().round().clamp(0, UNITS)  # [..., G, 1]
    codes = nearest(groups / (units * unit).clamp_min(TINY))
    word = (units.squeeze(-1).long() << _shifts(units)).sum(-1, keepdim=True) | exponent.long() << 24
    return pack(codes.flatten(-2)), word.to(torch.int32)


def decode_groups(packed: Tensor, word: Tensor) -> Tensor:
    """The inverse: x [..., D] float32, still rotated, up to the loss."""
    values = levels().to(packed.device)[unpack(packed)]
    values = values.view(*values.shape[:-1], -1, GROUP)  # [..., G, 16]
    units = (word >> _shifts(values) & UNITS).unsqueeze(-1)
    unit = (word >> 1 & 0x7F800000).view(torch.float32)
    return (values * units).flatten(-2) * (unit * LONGER)


def _shifts(groups: Tensor) -> Tensor:
    """Of each group [..., G, n]: where its scale stands in the word, [G]."""
    return torch.arange(0, groups.shape[-2] * BITS, BITS, device=groups.device)


def numba_encode_groups(head_dim: int) -> Callable[..., Any]:
    """`encode_groups` for Numba kernels. Sums run in another order: of two starts that fit alike, the other may be taken."""
    from numba.extending import register_jitable

    from pocketllm.kernels.numba.format_simd import absmax, as_float, as_int, count_below, look_up, store_i32
    from pocketllm.kernels.numba.simd import load_f32, load_f32x16, splat, store_f32, store_f32x16
    from pocketllm.kernels.numba.vector_math import divide, sum_lanes

    groups, (table, midpoints), pack_codes = head_dim // GROUP, numba_levels(), register_jitable(numba_pack(head_dim))
    starts, tries, tiny = tuple(np.float32(start) for start in STARTS), len(STARTS), np.float32(TINY)

    def scale_of_group(x: int) -> Any:
        """The float32 that fits the group at address x."""
        y, outermost = load_f32x16(x), absmax(x, GROUP) / table[15]
        scale, most = tiny, np.float32(-1)
        for attempt in range(tries):
            level = look_up(count_below(divide(y, splat(outermost * starts[attempt])), midpoints), table)
            product, square = sum_lanes(y * level), sum_lanes(level * level)
            explained = product * product / square
            if not explained <= most:
                most, fitted = explained, product / square
                scale = tiny if fitted < tiny else fitted
        return scale

    fit_group = register_jitable(scale_of_group)

    def encode(x: int, packed: int, word_at: int) -> None:
        largest = np.float32(0)
        for g in range(groups):  # the scales wait where the codes will be
            scale = fit_group(x + 64 * g)
            store_f32(packed + 4 * g, scale)
            largest = largest if scale <= largest or largest != largest else scale
        exponent = (as_int(largest) >> 23 & 255) - (BITS - 1)
        exponent = max(exponent, 1) if exponent < 255 - (BITS - 1) else NO_NUMBER
        unit, word = as_float(exponent << 23), exponent << 24
        for g in range(groups):
            units = np.rint(load_f32(packed + 4 * g) / unit)
            units = np.float32(UNITS) if units > UNITS else units if units > 0 else np.float32(0)
            scale = units * unit
            codes = count_below(divide(load_f32x16(x + 64 * g), splat(tiny if scale < tiny else scale)), midpoints)
            store_f32x16(x + 64 * g, codes)
            word |= np.int64(units) << BITS * g
        store_i32(word_at, word)
        pack_codes(x, packed)

    return encode


def with_groups(pieces: FormatPieces, load: Callable[..., Any]) -> FormatPieces:
    """Numba pieces whose V has a word of scales. load(codes, i) -> levels."""
    from numba.extending import register_jitable

    from pocketllm.kernels.numba.format_simd import as_float, load_i32
    from pocketllm.kernels.numba.simd import splat

    longer, load_levels = np.float32(LONGER), register_jitable(load)

    def load_v(row: Row, i: int) -> Lanes:
        units = load_i32(row[3]) >> BITS * (i // GROUP) & UNITS
        return load_levels(row[1], i) * splat(np.float32(units))

    def v_scale(row: Row) -> Any:
        return as_float(load_i32(row[3]) >> 1 & 0x7F800000) * longer

    return replace(pieces, load_v=load_v, v_scale=v_scale)
