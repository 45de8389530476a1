"""How a KV format tells the Triton kernels to read and write it.

A format's `triton_pieces(head_dim)` returns `TritonPieces`: three `@triton.jit` functions, which kernels take as constant
arguments and Triton inlines. A *row* is what a format stores of one token and one KV head; row r of a plane of width w
starts at element r * w. D is the head dimension, DP the power of two at or above it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class HopperPieces:
    """What `attend_hopper` needs of a format with four planes: K in 8 bits, V, and a float32 scale of each.

    pair(q)     Triton: a query [D] float32 -> high and low parts [D] of K's type, and a factor
    join(high, low)     Gluon, as the rest: their products with K -> products with q over its factor, float32
    load_v(codes, first, TOKENS, layout)    tokens first .. of a tile of V's codes in shared memory -> fp16 [D, TOKENS] in
            `layout`, rows in any order
    in_order(out)   [D, N] with rows in that order -> rows in the order of dims
    v_factor    what V's scales are to be multiplied by
    """

    pair: Callable[..., Any]
    join: Callable[..., Any]
    load_v: Callable[..., Any]
    in_order: Callable[..., Any]
    v_factor: float


@dataclass(frozen=True, eq=False)
class TritonPieces:
    """A KV format for one head dimension.

    signs   None, or [D] float32: K and V are stored rotated by hadamard(signs * x). The kernels rotate what they give to
            `store_row`, the query, and once the output back; no other piece knows about it
    dtype   the type that products run in: that of the loaders' tiles; queries are turned into it
    scaled  whether rows have scales; else the loaders' second result is ignored
    store_row(planes, row, k, v, D, DP)      encodes k, v [DP] float32 (elements from D on are zero) into row `row`
    load_k(planes, rows, D, DP)          K of rows [N] -> a tile [N, DP], zeros from D on, and a scale [N] float32 to
            multiply its scores by
    load_v(planes, rows, D, DP)          likewise V; its scale multiplies the weights
    hopper()    the format's `HopperPieces`, or None: their module is loaded where they are used only
    """

    signs: Tensor | None
    dtype: torch.dtype
    scaled: bool
    store_row: Callable[..., Any]
    load_k: Callable[..., Any]
    load_v: Callable[..., Any]
    hopper: Callable[[], HopperPieces] | None = None


class TritonCodec(Protocol):
    """What these kernels ask of a KV format beyond `kernels.types.KVCodec`."""

    def triton_pieces(self, head_dim: int) -> TritonPieces: ...

    def __hash__(self) -> int: ...
