"""Vector operations that only matrix products need: laying out rows of x, decoding weights, dot products over tiles.

Where a CPU has an instruction for one (bfloat16 and int8 dot products, byte look-ups) and the `Target` allows it, the
operation becomes that; else plain vector code of the same meaning.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import types
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic

from pocketllm.kernels.numba.simd import (
    LANES,
    _at,
    _call,
    _fma,
    _lanes_below,
    _load,
    _masked_load,
    _pack,
    _splat,
    _unpack,
    _vec,
    bfloat,
    f32x16,
    i32x16,
)

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_VF32, _VI32 = f32x16.llvm, i32x16.llvm

PREFETCH_BYTES = 8192  # how far ahead of the weights in use


# -- rows of x -------------------------------------------------------------------------------------------------------


def _row_addresses(b: ir.IRBuilder, x: ir.Value, stride: ir.Value, rows: ir.Value, count: int) -> list[ir.Value]:
    """`count` addresses from x, `stride` bytes apart; those of rows that are not there are x itself."""
    there = [b.icmp_signed("<", ir.Constant(_I64, r), rows) for r in range(count)]
    return [b.select(t, b.add(x, b.mul(stride, ir.Constant(_I64, r))), x) for r, t in enumerate(there)]


def _store_transposed(b: ir.IRBuilder, rows: Sequence[ir.Value], out: ir.Value) -> None:
    """Writes vectors of n words as n groups of one word a vector."""
    n = rows[0].type.count
    joined = _join(b, [b.bitcast(row, _vec(_I32, n)) for row in rows])
    index = [r * n + i for i in range(n) for r in range(len(rows))]
    moved = b.shuffle_vector(joined, joined, ir.Constant(_vec(_I32, len(index)), index))
    b.store(moved, _at(b, out, 0, moved.type), align=1)


def _join(b: ir.IRBuilder, parts: Sequence[ir.Value]) -> ir.Value:
    half = len(parts) // 2
    return parts[0] if len(parts) == 1 else _concat(b, _join(b, parts[:half]), _join(b, parts[half:]))


def _concat(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.shuffle_vector(x, y, ir.Constant(_vec(_I32, 2 * x.type.count), list(range(2 * x.type.count))))


@intrinsic(prefer_literal=True)
def pack_f32(typingctx: Any, size: Any, x: Any, stride: Any, rows: Any, count: Any, out: Any) -> Any:
    """A tile's 16 columns of x: the first `count` float32 (zeros after them) of `size` (a literal) rows, word by word.

    Rows lie `stride` bytes apart; only `rows` of them are there, the others are written as the first.
    """

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        _, x, stride, rows, count, out = a
        mask = _lanes_below(b, count, 0)
        addresses = _row_addresses(b, x, stride, rows, size.literal_value)
        _store_transposed(b, [_masked_load(b, address, 0, mask) for address in addresses], out)
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(size, i64, i64, i64, i64, i64), codegen


@intrinsic(prefer_literal=True)
def pack_bf16(typingctx: Any, size: Any, x: Any, stride: Any, rows: Any, count: Any, out: Any) -> Any:
    """pack_f32, rounded to bfloat16: a word is a pair of neighbours, 8 words a row."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        _, x, stride, rows, count, out = a
        mask = _lanes_below(b, count, 0)
        addresses = _row_addresses(b, x, stride, rows, size.literal_value)
        rounded = [b.fptrunc(_masked_load(b, address, 0, mask), _vec(bfloat)) for address in addresses]
        _store_transposed(b, [b.bitcast(r, _vec(_I32, 8)) for r in rounded], out)
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(size, i64, i64, i64, i64, i64), codegen


@intrinsic(prefer_literal=True)
def pack_i8(typingctx: Any, size: Any, x: Any, stride: Any, rows: Any, shift: Any, out: Any) -> Any:
    """32 columns of `size` (a literal) rows of x quantised to int8: word by word 8 words of 4, a scale, a sum.

    scale = max |x| / 127 (NaN if an x is); the sum is float32 scale * sum(int8) where `shift` (a literal) is 0, else
    int32 -shift * sum(int8). Rows as in pack_f32.
    """

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        _, x, stride, rows, _, out = a
        count, off = size.literal_value, shift.literal_value
        wide, wide_int = _vec(_F32, 32), _vec(_I32, 32)
        codes, scales, sums = [], [], []
        for address in _row_addresses(b, x, stride, rows, count):
            values = _load(b, address, wide)
            bits = b.and_(b.bitcast(values, wide_int), ir.Constant(wide_int, [0x7FFFFFFF] * 32))
            amax = b.bitcast(_call(b, "llvm.vector.reduce.umax.v32i32", _I32, [bits]), _F32)
            scale = b.fdiv(amax, ir.Constant(_F32, 127.0))
            nonzero = b.fcmp_unordered("une", amax, ir.Constant(_F32, 0.0))
            inverse = b.select(nonzero, b.fdiv(ir.Constant(_F32, 127.0), amax), ir.Constant(_F32, 0.0))
            scaled = b.fmul(values, _splat(b, inverse, 32))
            # Adding 1.5 * 2**23 rounds to the nearest whole number and leaves it in the low bits.
            magic = b.bitcast(b.fadd(scaled, ir.Constant(wide, [12582912.0] * 32)), wide_int)
            ints = b.sub(magic, ir.Constant(wide_int, [0x4B400000] * 32))
            total = _call(b, "llvm.vector.reduce.add.v32i32", _I32, [ints])
            codes.append(b.bitcast(b.trunc(ints, _vec(_I8, 32)), _vec(_I32, 8)))
            scales.append(scale)
            weighted = b.bitcast(b.fmul(scale, b.sitofp(total, _F32)), _I32)
            sums.append(b.mul(total, ir.Constant(_I32, -off)) if off else weighted)
        _store_transposed(b, codes, out)
        for r in range(count):
            b.store(scales[r], _at(b, out, 32 * count + 4 * r, _F32), align=1)
            b.store(sums[r], _at(b, out, 36 * count + 4 * r, _I32), align=1)
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(size, i64, i64, i64, shift, i64), codegen


# -- decoding weights ------------------------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def load_pair(typingctx: Any, acc: Any, min_tile: Any, address: Any) -> Any:
    """128 bytes of weights as two i32x16. For tiles `acc` of at least `min_tile` (a literal) vectors, prefetches too.

    `linear_tiles` has the measurements.
    """
    wanted = acc.count >= min_tile.literal_value

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        for line in (0, 64) if wanted else ():
            ahead = _at(b, a[2], PREFETCH_BYTES + line, _I8)
            args = [ahead, *(ir.Constant(_I32, flag) for flag in (0, 3, 1))]  # to read, into all caches, data
            _call(b, "llvm.prefetch.p0", ir.VoidType(), args)
        return _pack(b, [_load(b, a[2], _VI32, line) for line in (0, 64)])

    return UniTuple(i32x16, 2)(acc, min_tile, types.int64), codegen


@intrinsic
def nibbles(typingctx: Any, w: Any) -> Any:
    """(low, high) 4 bits of each of 64 bytes, as unsigned bytes."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        mask = ir.Constant(_VI32, [0x0F0F0F0F] * LANES)
        high = b.lshr(a[0], ir.Constant(_VI32, [4] * LANES))
        return _pack(b, [b.and_(a[0], mask), b.and_(high, mask)])

    return UniTuple(i32x16, 2)(i32x16), codegen


def _e4m3_as_bf16(code: int) -> int:
    """The bfloat16 bits of a float8 e4m3fn code without its sign, 0 .. 127 (every one is a normal bfloat16 or 0)."""
    exponent, fraction = code >> 3, code & 7
    if code == 127:
        return 0x7FC0  # NaN
    value = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
    return int.from_bytes(struct.pack(">f", value)[:2], "big")


@intrinsic
def e4m3_to_bf16(typingctx: Any, target: Any, w: Any) -> Any:
    """64 float8 e4m3fn -> two vectors of bfloat16 pairs. In each 16 bytes, the first 8 go to the first vector."""
    native = "avx512vbmi" in target.features

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        codes = b.bitcast(a[1], _vec(_I8, 64))
        order = [16 * q + i for q in range(4) for i in range(8)]
        if native:  # two look-ups in tables of 128 bytes; the instruction ignores the sign bit
            table = [_e4m3_as_bf16(code) for code in range(128)]

            def look_up(part: list[int]) -> Any:
                tables = [ir.Constant(_vec(_I8, 64), part[i : i + 64]) for i in (0, 64)]
                args = [tables[0], codes, tables[1]]
                return _call(b, "llvm.x86.avx512.vpermi2var.qi.512", _vec(_I8, 64), args)

            low = look_up([t & 255 for t in table])
            sign = b.and_(codes, ir.Constant(_vec(_I8, 64), [128] * 64))
            high = b.or_(look_up([t >> 8 for t in table]), sign)
            both = [[j for i in order for j in (i + 8 * half, i + 8 * half + 64)] for half in (0, 1)]
            parts = [b.shuffle_vector(low, high, ir.Constant(_vec(_I32, 64), index)) for index in both]
        else:  # the code's exponent and fraction, moved to float32's place, are the value times 2**-120
            wide = b.zext(codes, _vec(_I32, 64))
            sign = b.shl(b.lshr(wide, ir.Constant(wide.type, [7] * 64)), ir.Constant(wide.type, [31] * 64))
            rest = b.and_(wide, ir.Constant(wide.type, [127] * 64))
            bits = b.or_(sign, b.shl(rest, ir.Constant(wide.type, [20] * 64)))
            value = b.fmul(b.bitcast(bits, _vec(_F32, 64)), ir.Constant(_vec(_F32, 64), [2.0**120] * 64))
            nan = b.icmp_unsigned("==", rest, ir.Constant(wide.type, [127] * 64))
            value = b.select(nan, ir.Constant(_vec(_F32, 64), [float("nan")] * 64), value)
            bf16 = b.trunc(b.lshr(b.bitcast(value, wide.type), ir.Constant(wide.type, [16] * 64)), _vec(_I16, 64))
            parts = [
                b.shuffle_vector(bf16, bf16, ir.Constant(_vec(_I32, 32), [i + 8 * half for i in order]))
                for half in (0, 1)
            ]
        return _pack(b, [b.bitcast(p, _VI32) for p in parts])

    return UniTuple(i32x16, 2)(target, i32x16), codegen


# -- products of tiles -----------------------------------------------------------------------------------------------


@intrinsic
def tile_dot_bf16(typingctx: Any, target: Any, acc: Any, w: Any, x: Any) -> Any:
    """acc[r, l] += w[l][lane, 0] * x[r][0] + w[l][lane, 1] * x[r][1]: bfloat16; x: address of a pair a row."""
    rows, native = acc.count // w.count, "avx512bf16" in target.features

    def halves(b: Any, v: Any) -> tuple[Any, Any]:
        low = b.shl(v, ir.Constant(_VI32, [16] * LANES))
        high = b.and_(v, ir.Constant(_VI32, [-65536] * LANES))
        return b.bitcast(low, _VF32), b.bitcast(high, _VF32)

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        _, accs, ws, address = a
        out, weights = _unpack(b, accs, acc), _unpack(b, ws, w)
        pairs = _vec(bfloat, 2 * LANES)
        for r in range(rows):
            xr = _splat(b, _load(b, address, _I32, 4 * r))
            for l, wl in enumerate(weights):
                i = r * w.count + l
                if native:
                    args = [out[i], b.bitcast(wl, pairs), b.bitcast(xr, pairs)]
                    out[i] = _call(b, "llvm.x86.avx512bf16.dpbf16ps.512", _VF32, args)
                else:
                    (w0, w1), (x0, x1) = halves(b, wl), halves(b, xr)
                    out[i] = _fma(b, w1, x1, _fma(b, w0, x0, out[i]))
        return _pack(b, out)

    return acc(target, acc, w, types.int64), codegen


@intrinsic
def tile_dot_u8s8(typingctx: Any, target: Any, acc: Any, w: Any, x: Any) -> Any:
    """acc[r, l] += sum over 4 of w[l][lane, i] * x[r][i], exact in int32: w unsigned, x signed bytes."""
    rows, native = acc.count // w.count, "avx512vnni" in target.features

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        _, accs, ws, address = a
        out, weights = _unpack(b, accs, acc), _unpack(b, ws, w)
        quads = _vec(_I8, 4 * LANES) if llvm.llvm_version_info[0] >= 21 else _VI32

        def byte(v: Any, i: int, signed: bool) -> Any:
            moved = b.shl(v, ir.Constant(_VI32, [24 - 8 * i] * LANES))
            return (b.ashr if signed else b.lshr)(moved, ir.Constant(_VI32, [24] * LANES))

        for r in range(rows):
            xr = _splat(b, _load(b, address, _I32, 4 * r))
            for l, wl in enumerate(weights):
                i = r * w.count + l
                if native:
                    args = [out[i], b.bitcast(wl, quads), b.bitcast(xr, quads)]
                    out[i] = _call(b, "llvm.x86.avx512.vpdpbusd.512", _VI32, args)
                else:
                    for j in range(4):
                        out[i] = b.add(out[i], b.mul(byte(wl, j, False), byte(xr, j, True)))
        return _pack(b, out)

    return acc(target, acc, w, types.int64), codegen


@intrinsic
def tile_splat_i32(typingctx: Any, like: Any, w: Any, x: Any) -> Any:
    """An int32 tile of the size of `like` (lanes as in w), whose row r holds the int32 at x + 4 r."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        values = [_splat(b, _load(b, a[2], _I32, 4 * r)) for r in range(like.count // w.count)]
        return _pack(b, [v for v in values for _ in range(w.count)])

    return UniTuple(i32x16, like.count)(like, w, types.int64), codegen


@intrinsic
def tile_zeros_i32(typingctx: Any, like: Any) -> Any:
    """An int32 tile of zeros of the size of `like`."""
    ty = UniTuple(i32x16, like.count)
    return ty(like), lambda ctx, b, sig, a: ir.Constant(ctx.get_value_type(ty), None)


@intrinsic
def tile_clear(typingctx: Any, like: Any) -> Any:
    """A float32 tile of zeros of the size of `like`."""
    ty = UniTuple(f32x16, like.count)
    return ty(like), lambda ctx, b, sig, a: ir.Constant(ctx.get_value_type(ty), None)


@intrinsic
def tile_add_product(typingctx: Any, acc: Any, part: Any, factor: Any) -> Any:
    """acc + part * factor, tile by tile; factor is one vector."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        pairs = zip(_unpack(b, a[0], acc), _unpack(b, a[1], part), strict=True)
        return _pack(b, [_fma(b, p, a[2], s) for s, p in pairs])

    return acc(acc, part, f32x16), codegen


@intrinsic
def tile_add_scaled(typingctx: Any, acc: Any, product: Any, scale: Any, x: Any) -> Any:
    """acc[r, l] += (float32(product[r, l]) * scale[l]) * x[r]; x the address of one float32 a row."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        accs, products, scales, address = a
        out, ints, s = _unpack(b, accs, acc), _unpack(b, products, product), _unpack(b, scales, scale)
        for r in range(acc.count // scale.count):
            xr = _splat(b, _load(b, address, _F32, 4 * r))
            for l in range(scale.count):
                i = r * scale.count + l
                out[i] = _fma(b, b.fmul(b.sitofp(ints[i], _VF32), s[l]), xr, out[i])
        return _pack(b, out)

    return acc(acc, product, scale, types.int64), codegen


@intrinsic(prefer_literal=True)
def tile_store(typingctx: Any, acc: Any, lanes: Any, y: Any, stride: Any, rows: Any, columns: Any, bias: Any) -> Any:
    """Writes rows x columns of the tile (`lanes`, a literal, vectors a row) to y, rows `stride` bytes apart.

    `bias` is the address of `columns` float32 to add, or 0.
    """
    num_lanes = lanes.literal_value

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        accs, _, y, stride, rows, columns, bias = a
        values = _unpack(b, accs, acc)
        has_bias = b.icmp_signed("!=", bias, ir.Constant(_I64, 0))
        readable = b.select(has_bias, bias, y)  # a masked load from address 0 is legal but slow
        for l in range(num_lanes):
            mask = _lanes_below(b, columns, l * LANES)
            added = _masked_load(b, readable, 64 * l, b.and_(mask, _splat(b, has_bias)))
            out = y
            for r in range(acc.count // num_lanes):
                with b.if_then(b.icmp_signed("<", ir.Constant(_I64, r), rows)):
                    args = [
                        b.fadd(values[r * num_lanes + l], added),
                        _at(b, out, 64 * l, _VF32),
                        ir.Constant(_I32, 1),
                        mask,
                    ]
                    _call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), args)
                out = b.add(out, stride)
        return ctx.get_dummy_value()

    i64 = types.int64
    return types.void(acc, lanes, i64, i64, i64, i64, i64), codegen
