"""TurboQuant K8V4: K in 8 bits, V in 4 bits, both after the randomised Hadamard rotation.

After the rotation a head's values are close to Gaussian whatever the model did (TurboQuant, arXiv 2504.19874), so V's 16
levels can be fixed in advance: see `cubic_levels`. K has a scale per token-head; so has V in heads of more than 64, here.
In smaller ones, the same 4 bytes hold a scale for every 16 values of V: see `grouped_v4`.

A row's codes are the nearest ones for a least-squares scale, from the better of two starts: one fits a Gaussian of
the row's size, one puts the row's largest value on the outermost level. The scale stored with them is a little larger:
that which makes x . decode(x) = |x|^2. A least-squares fit is always shorter than x, and where attention averages the
errors of many tokens away, that bias is what stays. docs/kv-quality.md compares the alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pocketllm.cache.formats.base import KVFormat
from pocketllm.cache.formats.cubic_levels import (
    CUBIC,
    TINY,
    fit,
    levels,
    nearest,
    numba_levels,
    numba_load,
    numba_pack,
    pack,
    unpack,
)
from pocketllm.cache.formats.grouped_v4 import (
    decode_groups,
    encode_groups,
    is_grouped,
    numba_encode_groups,
    with_groups,
)
from pocketllm.cache.formats.int8_per_token_head import encode_int8, numba_int8
from pocketllm.cache.formats.rotation import rotate, rotate_back, signs
from pocketllm.kernels.types import PlaneSpec

if TYPE_CHECKING:
    from pocketllm.kernels.numba.format_pieces import FormatPieces
    from pocketllm.kernels.triton.pieces import TritonPieces

LEVELS_RMS = 4.0  # first start of the scale search: a Gaussian of this RMS
LARGEST = 0.95  # second start: the largest value over the outermost level, times this
OUTERMOST = LARGEST / (7.5 + CUBIC * 7.5**3)


def encode_v4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D], already rotated -> packed codes uint8 [..., D/2] and scale [..., 1] float32."""
    size = x.square().mean(-1, keepdim=True).sqrt().clamp_min(TINY) / LEVELS_RMS
    outermost = x.abs().amax(-1, keepdim=True).clamp_min(TINY) * OUTERMOST
    (scale, explained), (other, other_explained) = fit(x, size), fit(x, outermost)
    codes = nearest(x / torch.where(other_explained > explained, other, scale))
    product = (x * levels().to(x.device)[codes]).sum(-1, keepdim=True).clamp_min(TINY)
    return pack(codes), (x.square().sum(-1, keepdim=True) / product).clamp_min(TINY)


def numba_encode(head_dim: int) -> Callable[..., Any]:
    """Encodes V for Numba kernels.

    Sums run in another order than torch's, so the scale may differ from `encode_v4`'s in its last bits, and a value that
    stands at a midpoint between two levels may get the other one.
    """
    from numba.extending import register_jitable

    from pocketllm.kernels.numba.format_simd import count_below, look_up
    from pocketllm.kernels.numba.simd import fma, load_f32x16, splat, store_f32, store_f32x16
    from pocketllm.kernels.numba.vector_math import divide, larger, max_lanes, sum_lanes

    table, midpoints = numba_levels()
    pack_codes = register_jitable(numba_pack(head_dim))
    tiny, largest = np.float32(TINY), np.float32(OUTERMOST)

    def encode(x: int, packed: int, scale_at: int) -> None:
        squares, extreme = splat(0.0), splat(0.0)
        for i in range(0, head_dim, 16):
            y = load_f32x16(x + i * 4)
            squares = fma(y, y, squares)
            extreme = larger(extreme, larger(y, splat(0.0) - y))
        whole, outermost = sum_lanes(squares), max_lanes(extreme)
        rms = np.sqrt(whole / np.float32(head_dim))
        scale, most = tiny, np.float32(-1)
        for start in range(2):
            if start == 0:
                guess = (tiny if rms < tiny else rms) / np.float32(LEVELS_RMS)
            else:
                guess = (tiny if outermost < tiny else outermost) * largest
            products, squares = splat(0.0), splat(0.0)
            for i in range(0, head_dim, 16):
                y = load_f32x16(x + i * 4)
                level = look_up(count_below(divide(y, splat(guess)), midpoints), table)
                products, squares = fma(y, level, products), fma(level, level, squares)
            product, square = sum_lanes(products), sum_lanes(squares)
            if start == 0 or product * product / square > most:
                most = product * product / square
                best = product / square
                scale = tiny if best < tiny else best
        products = splat(0.0)
        for i in range(0, head_dim, 16):  # codes take the values' place, so that halves need no alignment to vectors
            y = load_f32x16(x + i * 4)
            codes = count_below(divide(y, splat(scale)), midpoints)
            products = fma(y, look_up(codes, table), products)
            store_f32x16(x + i * 4, codes)
        product = sum_lanes(products)
        scale = whole / (tiny if product < tiny else product)
        store_f32(scale_at, tiny if scale < tiny else scale)
        pack_codes(x, packed)

    return encode


class TurboQuantK8V4(KVFormat):
    name = "turboquant_k8v4"
    tolerance = 0.13

    def planes(self, head_dim: int) -> tuple[PlaneSpec, ...]:
        if head_dim % 2:
            raise ValueError(f"turboquant_k8v4 packs two values to a byte: head_dim {head_dim} must be even")
        return (
            PlaneSpec("k", head_dim, torch.int8),
            PlaneSpec("v", head_dim // 2, torch.uint8),
            PlaneSpec("k_scale", 1, torch.float32),
            PlaneSpec("v_scale", 1, torch.int32 if is_grouped(head_dim) else torch.float32),
        )

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        k_codes, k_scale = encode_int8(rotate(k))
        v_codes, v_scale = (encode_groups if is_grouped(v.shape[-1]) else encode_v4)(rotate(v))
        return k_codes, v_codes, k_scale, v_scale

    def decode(self, planes: Sequence[Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        k, v, k_scale, v_scale = planes
        values = decode_groups(v, v_scale) if is_grouped(head_dim) else levels().to(v.device)[unpack(v)] * v_scale
        return rotate_back(k.float() * k_scale), rotate_back(values)

    def numba_pieces(self, head_dim: int) -> FormatPieces:
        from pocketllm.kernels.numba.format_pieces import scaled_pieces

        grouped, sizes = is_grouped(head_dim), tuple(p.nbytes for p in self.planes(head_dim))
        (encode_k, load_k), load_v = numba_int8(head_dim), numba_load(head_dim)
        encode = (encode_k, numba_encode_groups(head_dim) if grouped else numba_encode(head_dim))
        pieces = scaled_pieces(self.name, head_dim, sizes, signs(head_dim), encode, (load_k, load_v))
        return with_groups(pieces, load_v) if grouped else pieces

    def triton_pieces(self, head_dim: int) -> TritonPieces:
        if is_grouped(head_dim):
            from pocketllm.cache.formats.triton import grouped_v4

            return grouped_v4.pieces(head_dim)
        from pocketllm.cache.formats.triton import turboquant_k8v4

        return turboquant_k8v4.pieces(head_dim)


FORMATS = (TurboQuantK8V4(),)
