# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""Triton pieces of TurboQuant K8V4 for heads of up to 64, with four scales in a word: see `formats.grouped_v4`.

V's tile holds levels (over CUBIC) times scales in units of 1/32, so that its numbers, up to 2,800, fit fp16; the rest of
the unit goes into the row's scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.cache.formats.cubic_levels import CUBIC, TINY
from pocketllm.cache.formats.grouped_v4 import BITS, GROUP, LONGER, NO_NUMBER, STARTS, UNITS
from pocketllm.cache.formats.rotation import signs
from pocketllm.cache.formats.triton.int8_per_token_head import load_k, store_int8
from pocketllm.cache.formats.triton.turboquant_k8v4 import level_of, nearest_code, read_levels, store_codes
from pocketllm.kernels.triton.numerics import round_even
from pocketllm.kernels.triton.pieces import TritonPieces

_CUBIC, _TINY = tl.constexpr(CUBIC), tl.constexpr(TINY)
_OUTERMOST = tl.constexpr(1 / (7.5 + CUBIC * 7.5**3))
_STARTS, _TRIES = tl.constexpr(STARTS), tl.constexpr(len(STARTS))
_GROUP, _BITS = tl.constexpr(GROUP), tl.constexpr(BITS)
_UNITS, _NO_NUMBER = tl.constexpr(UNITS), tl.constexpr(NO_NUMBER)
_IN_SCALE = tl.constexpr(32 * CUBIC * LONGER)


@triton.jit
def _scales(groups):
    """Of groups [G, 16]: the best scale of each, [G]; the search of `grouped_v4.encode_groups`."""
    outermost = tl.maximum(tl.max(tl.abs(groups), axis=1), _TINY) * _OUTERMOST
    scale = tl.zeros_like(outermost)
    most = scale - 1.0
    for i in tl.static_range(_TRIES):
        c = nearest_code(groups / (outermost * _STARTS[i])[:, None]) - 7.5
        level = c + _CUBIC * c * c * c
        product, square = tl.sum(groups * level, axis=1), tl.sum(level * level, axis=1)
        explained = product * product / square
        better = (explained > most) | (explained != explained)
        fitted = product / square
        scale = tl.where(better, tl.where(fitted < _TINY, _TINY, fitted), scale)  # NaN stays
        most = tl.where(better, explained, most)
    return scale


@triton.jit
def _store_v4(plane, words, row, x, D: tl.constexpr, DP: tl.constexpr):
    groups = tl.reshape(x, [DP // _GROUP, _GROUP])
    scale = _scales(groups)
    largest = tl.max(scale, axis=0) + 0.0 * tl.sum(scale, axis=0)  # a maximum passes over NaN
    exponent = (largest.to(tl.int32, bitcast=True) >> 23 & 255) - (_BITS - 1)
    exponent = tl.where(exponent < 255 - (_BITS - 1), tl.maximum(exponent, 1), _NO_NUMBER)
    unit = (exponent << 23).to(tl.float32, bitcast=True)
    units = tl.minimum(round_even(scale / unit), _UNITS)
    codes = nearest_code(groups / tl.maximum(units * unit, _TINY)[:, None])
    store_codes(plane, row, tl.reshape(codes, [DP]), D, DP)
    word = tl.sum(units.to(tl.int32) << tl.arange(0, DP // _GROUP) * _BITS, axis=0) | exponent << 24
    tl.store(words + row, word)


@triton.jit
def store_row(planes, row, k, v, D: tl.constexpr, DP: tl.constexpr):
    store_int8(planes[0], planes[2], row, k, D, DP)
    _store_v4(planes[1], planes[3], row, v, D, DP)


@triton.jit
def _scaled(levels, words, first, COUNT: tl.constexpr):
    """levels [N, 16 COUNT] fp16, of groups `first` to first + COUNT - 1, times their scales over 32."""
    N: tl.constexpr = levels.shape[0]
    units = words[:, None] >> ((tl.arange(0, COUNT) + first) * _BITS)[None, :] & _UNITS
    units = units.to(tl.float16) * (1 / 32)
    scaled = tl.reshape(levels, [N, COUNT, _GROUP]) * units[:, :, None].to(tl.float16)
    return tl.reshape(scaled, [N, COUNT * _GROUP])


@triton.jit
def load_v(planes, rows, D: tl.constexpr, DP: tl.constexpr):
    HALF: tl.constexpr = D // 2
    words = tl.load(planes[3] + rows)
    scale = (words >> 1 & 0x7F800000).to(tl.float32, bitcast=True) * _IN_SCALE
    if D == DP and D // _GROUP % 2 == 0:
        codes = tl.load(planes[1] + rows[:, None] * HALF + tl.arange(0, HALF)[None, :])
        low, high = read_levels(codes)
        low, high = _scaled(low, words, 0, HALF // _GROUP), _scaled(high, words, HALF // _GROUP, HALF // _GROUP)
        tile = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [codes.shape[0], D])
    else:
        d = tl.arange(0, DP)
        mask = (d < D)[None, :]
        at = planes[1] + rows[:, None] * HALF + tl.where(d < HALF, d, d - HALF)[None, :]
        codes = tl.load(at, mask=mask, other=0)
        level = tl.where(mask, level_of(tl.where((d < HALF)[None, :], codes & 15, codes >> 4)), 0.0).to(tl.float16)
        tile = _scaled(level, words, 0, DP // _GROUP)
    return tile, scale


def pieces(head_dim: int) -> TritonPieces:
    return TritonPieces(signs(head_dim), torch.float16, True, store_row, load_k, load_v)
