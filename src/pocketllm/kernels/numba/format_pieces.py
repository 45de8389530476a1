"""How a KV format tells Numba kernels to read and write it, and how kernels call what it told.

A format's `numba_pieces(head_dim)` returns `FormatPieces`: plain functions over the operations of `simd` and
`format_simd`. Kernels get them inside a `Core`, a constant argument whose *type* carries the functions: Numba compiles a
kernel once per core, inlines the functions, and finds the result on disk by the core's name in the next process.

A *row* is what a format stores of one token and one KV head: a tuple of byte addresses, one per plane.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any, Protocol

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.core.types.containers import UniTuple
from numba.extending import (
    NativeValue,
    intrinsic,
    models,
    overload,
    register_jitable,
    register_model,
    typeof_impl,
    unbox,
)
from torch import Tensor

from pocketllm.kernels.numba.format_simd import load_i64
from pocketllm.kernels.numba.simd import _call, _load, _pack, f32x16, load_f32

# What mypy calls the types that Numba finds; an address is an int to both.
Row = tuple[int, ...]  # addresses of a row in each plane
Lanes = Any  # 16 float32 in a register (f32x16)


@dataclass(frozen=True, eq=False)
class FormatPieces:
    """A KV format for one head dimension D, as functions that Numba can compile.

    name      tells this format and D from all others
    row_bytes bytes of a row in each plane
    signs     None, or [D] float32: K and V are stored rotated by hadamard(signs * x); kernels rotate what they give to
              `encode_row`, the query, and once the output back, so that no other piece knows about it
    encode_row(k, v, row)  stores the D float32 at addresses k and v (which it may overwrite)
    load_k(row, i), load_v(row, i)  elements i .. i + 15 as f32x16, to be multiplied by
    k_scale(row), v_scale(row)      this float32
    """

    name: str
    head_dim: int
    row_bytes: tuple[int, ...]
    signs: Tensor | None
    encode_row: Callable[..., Any]
    load_k: Callable[..., Any]
    load_v: Callable[..., Any]
    k_scale: Callable[..., Any]
    v_scale: Callable[..., Any]

    @cached_property
    def key(self) -> str:
        """The name, and a digest of the functions' code: an edited format must not find its old kernels on disk."""
        digest = hashlib.sha256(repr((self.row_bytes, self.signs is None)).encode())
        for piece in (self.encode_row, self.load_k, self.load_v, self.k_scale, self.v_scale):
            _digest(digest, piece)
        return f"{self.name},{self.head_dim},{digest.hexdigest()[:16]}"


class NumbaCodec(Protocol):
    """What these kernels ask of a KV format beyond `kernels.types.KVCodec`."""

    def numba_pieces(self, head_dim: int) -> FormatPieces: ...


def _digest(digest: Any, function: Callable[..., Any]) -> None:
    """Feeds a function's code and what it refers to from outside: numbers, tuples and further functions."""
    code = function.__code__
    digest.update(code.co_code)
    digest.update(repr([c for c in code.co_consts if not isinstance(c, CodeType)]).encode())
    digest.update(repr(code.co_names + code.co_freevars).encode())
    outer = [cell.cell_contents for cell in function.__closure__ or ()]
    for value in outer + [function.__globals__.get(name) for name in code.co_names]:
        if isinstance(value, FunctionType):
            _digest(digest, value)
        elif isinstance(value, int | float | tuple | np.generic):
            digest.update(repr(value).encode())
        else:  # an operation of `simd`; the kernels' cache watches those files
            digest.update(getattr(value, "__name__", type(value).__name__).encode())


MAX_TILE = 64  # tokens of an attention tile, at most


@dataclass(frozen=True)
class Core:
    """What an attention kernel is compiled for: a format, and `rows` queries that share every load of K and V.

    shared: V of a tile is decoded once into scratch memory, for several blocks of rows; else in registers where needed.
    """

    pieces: FormatPieces
    rows: int = 1
    shared: bool = False

    @property
    def head_dim(self) -> int:
        return self.pieces.head_dim

    @property
    def tile(self) -> int:
        """Tokens whose K, as columns, fits the L1 cache."""
        return MAX_TILE if self.head_dim <= 128 else MAX_TILE // 2

    @property
    def lanes(self) -> int:
        """Vectors of V that are held, with `rows` accumulators each, in 32 registers."""
        if self.head_dim % 64 == 0 and self.rows <= 6:
            return 4
        return 2 if self.head_dim % 32 == 0 else 1


class CoreType(types.Type):
    def __init__(self, core: Core) -> None:
        self.core = core
        super().__init__(name=f"Core({core.pieces.key},{core.rows},{core.shared})")

    def __getstate__(self) -> dict[str, Any]:
        """Cached kernels are found by name; functions need not (and can't always) be pickled."""
        return {k: v for k, v in self.__dict__.items() if k != "core"}


@typeof_impl.register(Core)
def _typeof_core(value: Core, context: object) -> CoreType:
    core_type = CoreType(value)  # Numba returns the first type of this name, which may come from a cache file
    core_type.core = value
    return core_type


register_model(CoreType)(models.OpaqueModel)


@unbox(CoreType)
def _unbox_core(core_type: object, value: object, c: Any) -> Any:
    return NativeValue(c.context.get_dummy_value())


# -- calls, for use inside kernels -----------------------------------------------------------------------------------


def encode_row(core: Any, k: Any, v: Any, row: Any) -> Any:
    raise NotImplementedError("for use inside kernels")


def load_k(core: Any, row: Any, i: Any) -> Any:
    raise NotImplementedError("for use inside kernels")


def load_v(core: Any, row: Any, i: Any) -> Any:
    raise NotImplementedError("for use inside kernels")


def v_tile(core: Any, planes: Any, index: Any, v: Any, t: Any, i: Any) -> Any:
    """`core.lanes` vectors of V of token t of a tile, from element i on.

    If `core.shared`, from the decoded tile at address v; else from the row whose number stands at index + 8 t.
    """
    raise NotImplementedError("for use inside kernels")


def k_scale(core: Any, row: Any) -> Any:
    raise NotImplementedError("for use inside kernels")


def v_scale(core: Any, row: Any) -> Any:
    raise NotImplementedError("for use inside kernels")


@overload(encode_row)
def _encode_row(core, k, v, row):
    piece = njit(core.core.pieces.encode_row)
    return lambda core, k, v, row: piece(k, v, row)


@overload(load_k)
def _load_k(core, row, i):
    piece = njit(core.core.pieces.load_k, forceinline=True)
    return lambda core, row, i: piece(row, i)


@overload(load_v)
def _load_v(core, row, i):
    piece = njit(core.core.pieces.load_v, forceinline=True)
    return lambda core, row, i: piece(row, i)


@overload(v_tile, jit_options={"forceinline": True})
def _v_tile(core, planes, index, v, t, i):
    dim, lanes, shared = core.core.head_dim, core.core.lanes, core.core.shared
    load = register_jitable(core.core.pieces.load_v)

    def decoded(core, planes, index, v, t, i):
        return load_tile_f32(core, v + 4 * (t * dim + i))

    def one(core, planes, index, v, t, i):
        return (load(row_at(core, planes, load_i64(index + 8 * t)), i),)

    def two(core, planes, index, v, t, i):
        row = row_at(core, planes, load_i64(index + 8 * t))
        return load(row, i), load(row, i + 16)

    def four(core, planes, index, v, t, i):
        row = row_at(core, planes, load_i64(index + 8 * t))
        return load(row, i), load(row, i + 16), load(row, i + 32), load(row, i + 48)

    return decoded if shared else {1: one, 2: two, 4: four}[lanes]


@overload(k_scale)
def _k_scale(core, row):
    piece = njit(core.core.pieces.k_scale, forceinline=True)
    return lambda core, row: piece(row)


@overload(v_scale)
def _v_scale(core, row):
    piece = njit(core.core.pieces.v_scale, forceinline=True)
    return lambda core, row: piece(row)


def _number(get: Callable[[Core], int]) -> Any:
    """An intrinsic that gives a number of the core as a constant."""

    def number(typingctx: Any, core: Any) -> Any:
        value = get(core.core)
        return types.int64(core), lambda ctx, b, sig, a: ir.Constant(ir.IntType(64), value)

    return intrinsic(number)


head_dim = _number(lambda core: core.head_dim)
tile_tokens = _number(lambda core: core.tile)
tile_rows = _number(lambda core: core.rows)
tile_lanes = _number(lambda core: core.lanes)
is_rotated = _number(lambda core: int(core.pieces.signs is not None))
is_shared = _number(lambda core: int(core.shared))


@intrinsic
def row_at(typingctx: Any, core: Any, planes: Any, index: Any) -> Any:
    """Row number `index` of planes that start at the given addresses."""
    row_bytes = core.core.pieces.row_bytes

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        row = a[1]
        for p, size in enumerate(row_bytes):
            offset = b.mul(a[2], ir.Constant(ir.IntType(64), size))
            row = b.insert_value(row, b.add(b.extract_value(a[1], p), offset), p)
        return row

    return planes(core, planes, types.int64), codegen


@intrinsic
def load_tile_f32(typingctx: Any, core: Any, address: Any) -> Any:
    """`core.lanes` vectors of float32."""
    ty = UniTuple(f32x16, core.core.lanes)

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        return _pack(b, [_load(b, a[1], f32x16.llvm, 64 * l) for l in range(ty.count)])

    return ty(core, types.int64), codegen


@intrinsic
def prefetch_row(typingctx: Any, core: Any, planes: Any, index: Any) -> Any:
    """Asks for row number `index` to be brought to the L2 cache. Planes of a few bytes a row are left to the hardware."""
    i8, i32, i64 = (ir.IntType(bits) for bits in (8, 32, 64))
    row_bytes = core.core.pieces.row_bytes

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        for p, size in enumerate(row_bytes):
            if size < 16:
                continue
            start = b.add(b.extract_value(a[1], p), b.mul(a[2], ir.Constant(i64, size)))
            for offset in range(0, size, 64):
                pointer = b.inttoptr(b.add(start, ir.Constant(i64, offset)), ir.PointerType(i8))
                read, to_l2, data = ir.Constant(i32, 0), ir.Constant(i32, 2), ir.Constant(i32, 1)
                _call(b, "llvm.prefetch.p0", ir.VoidType(), [pointer, read, to_l2, data])
        return ctx.get_dummy_value()

    return types.void(core, planes, types.int64), codegen


# -- common shapes of formats ----------------------------------------------------------------------------------------


def scaled_pieces(
    name: str,
    head_dim: int,
    row_bytes: tuple[int, ...],
    signs: Tensor | None,
    encode: tuple[Callable[..., Any], Callable[..., Any]],
    load: tuple[Callable[..., Any], Callable[..., Any]],
) -> FormatPieces:
    """Pieces of a format with four planes: codes of K, codes of V, float32 scale of K, float32 scale of V.

    encode: for K and for V, a function (x, codes, scale) of addresses; load: likewise (codes, i) -> f32x16.
    """
    encode_k, encode_v = (register_jitable(f) for f in encode)
    read_k, read_v = (register_jitable(f) for f in load)

    def encode_row(k: int, v: int, row: Row) -> None:
        encode_k(k, row[0], row[2])
        encode_v(v, row[1], row[3])

    def load_k(row: Row, i: int) -> Lanes:
        return read_k(row[0], i)

    def load_v(row: Row, i: int) -> Lanes:
        return read_v(row[1], i)

    def k_scale(row: Row) -> Any:
        return load_f32(row[2])

    def v_scale(row: Row) -> Any:
        return load_f32(row[3])

    return FormatPieces(name, head_dim, row_bytes, signs, encode_row, load_k, load_v, k_scale, v_scale)
