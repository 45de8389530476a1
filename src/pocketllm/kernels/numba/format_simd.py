"""Loads and stores of the narrow types KV formats are made of: 16 elements at a byte address, as `f32x16`."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic

from pocketllm.kernels.numba.simd import _at, _call, _load, _vec, f32x16, load_f32x16, splat
from pocketllm.kernels.numba.vector_math import absolute, constant, larger_or_nan, max_lanes_or_nan

LANES = 16
_I8, _I16, _I32 = (ir.IntType(bits) for bits in (8, 16, 32))
_F32 = ir.FloatType()
_VF32, _VI32 = _vec(_F32), _vec(_I32)
_E4M3_MIN_NORMAL = 2.0**-6


def _ints(value: int) -> ir.Constant:
    return ir.Constant(_VI32, [value] * LANES)


@intrinsic
def load_i8x16(typingctx: Any, address: Any) -> Any:
    """16 int8."""
    return f32x16(types.int64), lambda ctx, b, sig, a: b.sitofp(b.sext(_load(b, a[0], _vec(_I8)), _VI32), _VF32)


@intrinsic
def store_i8x16(typingctx: Any, address: Any, value: Any) -> Any:
    """Writes 16 whole numbers in [-128, 127] as int8 (a NaN becomes 0)."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        ints = _call(b, "llvm.fptosi.sat.v16i32.v16f32", _VI32, [a[1]])
        b.store(b.trunc(ints, _vec(_I8)), _at(b, a[0], 0, _vec(_I8)), align=1)
        return ctx.get_dummy_value()

    return types.void(types.int64, f32x16), codegen


@intrinsic
def store_f16x16(typingctx: Any, address: Any, value: Any) -> Any:
    """Rounds to float16, to nearest even."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        half = _vec(ir.HalfType())
        b.store(b.fptrunc(a[1], half), _at(b, a[0], 0, half), align=1)
        return ctx.get_dummy_value()

    return types.void(types.int64, f32x16), codegen


@intrinsic
def store_bf16x16(typingctx: Any, address: Any, value: Any) -> Any:
    """Rounds to bfloat16, to nearest even; denormals are kept, a NaN stays one."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        bits = b.bitcast(a[1], _VI32)
        odd = b.and_(b.lshr(bits, _ints(16)), _ints(1))
        rounded = b.lshr(b.add(bits, b.add(odd, _ints(0x7FFF))), _ints(16))
        rounded = b.select(b.fcmp_unordered("uno", a[1], a[1]), _ints(0x7FC0), rounded)
        b.store(b.trunc(rounded, _vec(_I16)), _at(b, a[0], 0, _vec(_I16)), align=1)
        return ctx.get_dummy_value()

    return types.void(types.int64, f32x16), codegen


@intrinsic
def load_e4m3x16(typingctx: Any, address: Any) -> Any:
    """16 8-bit floats (e4m3), finite ones: their bits, moved into place, are a float32 with an exponent 120 too small."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        bits = b.shl(b.sext(_load(b, a[0], _vec(_I8)), _VI32), _ints(20))
        return b.fmul(b.bitcast(b.and_(bits, _ints(0x87F00000 - (1 << 32))), _VF32), constant(2.0**120))

    return f32x16(types.int64), codegen


@intrinsic
def store_e4m3x16(typingctx: Any, address: Any, value: Any) -> Any:
    """Rounds values in [-448, 448] to e4m3, to nearest even; a NaN becomes NaN."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        bits = b.bitcast(a[1], _VI32)
        size_bits = b.and_(bits, _ints(0x7FFFFFFF))
        size = b.bitcast(size_bits, _VF32)
        odd = b.and_(b.lshr(size_bits, _ints(20)), _ints(1))
        normal = b.lshr(b.add(size_bits, b.add(odd, _ints(0x7FFFF - (120 << 23)))), _ints(20))
        small = b.fadd(size, constant(2.0**14))  # rounds to a multiple of 2**-9, the step below 2**-6
        small = b.and_(b.bitcast(small, _VI32), _ints(0xF))
        code = b.select(b.fcmp_ordered("<", size, constant(_E4M3_MIN_NORMAL)), small, normal)
        code = b.select(b.fcmp_unordered("uno", size, size), _ints(0x7F), code)
        code = b.or_(code, b.and_(b.lshr(bits, _ints(24)), _ints(0x80)))
        b.store(b.trunc(code, _vec(_I8)), _at(b, a[0], 0, _vec(_I8)), align=1)
        return ctx.get_dummy_value()

    return types.void(types.int64, f32x16), codegen


@intrinsic
def load_nibbles(typingctx: Any, first: Any, first_shift: Any, second: Any, second_shift: Any, table: Any) -> Any:
    """table[4 bits] of 8 bytes at `first` and 8 at `second`, each byte shifted right by 0 or 4 first.

    table: a tuple of 16 float32 constants.
    """
    native = bool(llvm.get_host_cpu_features().get("avx512f"))

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        parts = []
        for address, shift in ((a[0], a[1]), (a[2], a[3])):
            wide = b.zext(_load(b, address, _vec(_I8, 8)), _vec(_I32, 8))
            amount = b.insert_element(
                ir.Constant(_vec(_I32, 8), ir.Undefined), b.trunc(shift, _I32), ir.Constant(_I32, 0)
            )
            amount = b.shuffle_vector(amount, amount, ir.Constant(_vec(_I32, 8), [0] * 8))
            parts.append(b.lshr(wide, amount))
        both = b.shuffle_vector(parts[0], parts[1], ir.Constant(_VI32, list(range(16))))
        return _look_up(b, b.and_(both, _ints(15)), _as_vector(b, a[4]), native)

    args = (types.int64, types.int64, types.int64, types.int64, UniTuple(types.float32, 16))
    return f32x16(*args), codegen


@intrinsic
def load_low_nibbles(typingctx: Any, address: Any, table: Any) -> Any:
    """table[low 4 bits] of 16 bytes."""
    return _half_bytes(0)


@intrinsic
def load_high_nibbles(typingctx: Any, address: Any, table: Any) -> Any:
    """table[high 4 bits] of 16 bytes."""
    return _half_bytes(4)


def _half_bytes(shift: int) -> Any:
    native = bool(llvm.get_host_cpu_features().get("avx512f"))

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        wide = b.zext(_load(b, a[0], _vec(_I8)), _VI32)
        codes = b.lshr(wide, _ints(4)) if shift else b.and_(wide, _ints(15))
        return _look_up(b, codes, _as_vector(b, a[1]), native)

    return f32x16(types.int64, UniTuple(types.float32, 16)), codegen


@intrinsic
def store_nibbles(typingctx: Any, address: Any, low: Any, high: Any) -> Any:
    """Writes 8 bytes low | high << 4 of the first 8 lanes, whole numbers in 0 .. 15."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        low, high = (b.fptosi(x, _VI32) for x in a[1:])
        codes = b.trunc(b.or_(low, b.shl(high, _ints(4))), _vec(_I8))
        codes = b.shuffle_vector(codes, codes, ir.Constant(_vec(_I32, 8), list(range(8))))
        b.store(codes, _at(b, a[0], 0, _vec(_I8, 8)), align=1)
        return ctx.get_dummy_value()

    return types.void(types.int64, f32x16, f32x16), codegen


def _as_vector(b: ir.IRBuilder, table: ir.Value) -> ir.Value:
    vector = ir.Constant(_VF32, ir.Undefined)
    for i in range(LANES):
        vector = b.insert_element(vector, b.extract_value(table, i), ir.Constant(_I32, i))
    return vector


def _look_up(b: ir.IRBuilder, codes: ir.Value, table: ir.Value, native: bool) -> ir.Value:
    if native:
        return _call(b, "llvm.x86.avx512.permvar.sf.512", _VF32, [table, codes])
    vector = ir.Constant(_VF32, ir.Undefined)
    for i in range(LANES):
        lane = ir.Constant(_I32, i)
        vector = b.insert_element(vector, b.extract_element(table, b.extract_element(codes, lane)), lane)
    return vector


@intrinsic
def count_below(typingctx: Any, x: Any, bounds: Any) -> Any:
    """How many of the constants `bounds`, a tuple of float32, are below each x."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        total = constant(0.0)
        for i in range(bounds.count):
            bound = b.insert_element(ir.Constant(_VF32, ir.Undefined), b.extract_value(a[1], i), ir.Constant(_I32, 0))
            bound = b.shuffle_vector(bound, bound, ir.Constant(_VI32, [0] * LANES))
            above = b.fcmp_ordered(">", a[0], bound)
            total = b.fadd(total, b.select(above, constant(1.0), constant(0.0)))
        return total

    return f32x16(f32x16, bounds), codegen


@intrinsic
def look_up(typingctx: Any, codes: Any, table: Any) -> Any:
    """table[code] for whole numbers in 0 .. 15."""
    native = bool(llvm.get_host_cpu_features().get("avx512f"))

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        return _look_up(b, b.fptosi(a[0], _VI32), _as_vector(b, a[1]), native)

    return f32x16(f32x16, UniTuple(types.float32, 16)), codegen


@njit
def absmax(x, size):
    """Largest magnitude of the `size` float32 at x, at least 1e-12 (the floor of `absmax_scale`); NaN if any is."""
    largest = splat(0.0)
    for i in range(0, size, 16):
        largest = larger_or_nan(largest, absolute(load_f32x16(x + i * 4)))
    result = max_lanes_or_nan(largest)
    floor = np.float32(1e-12)
    return floor if result < floor else result


@intrinsic
def load_i32(typingctx: Any, address: Any) -> Any:
    """One int32 at `address`, as int64."""
    i32, i64 = ir.IntType(32), ir.IntType(64)
    return types.int64(types.int64), lambda ctx, b, sig, a: b.sext(_load(b, a[0], i32), i64)


@intrinsic
def store_i32(typingctx: Any, address: Any, value: Any) -> Any:
    """Writes the lower 32 bits of an int64."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        b.store(b.trunc(a[1], _I32), _at(b, a[0], 0, _I32), align=1)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def as_int(typingctx: Any, x: Any) -> Any:
    """The bits of a float32, as int64."""
    i64 = ir.IntType(64)
    return types.int64(types.float32), lambda ctx, b, sig, a: b.sext(b.bitcast(a[0], _I32), i64)


@intrinsic
def as_float(typingctx: Any, bits: Any) -> Any:
    """The inverse of `as_int`."""
    return types.float32(types.int64), lambda ctx, b, sig, a: b.bitcast(b.trunc(a[0], _I32), _F32)


@intrinsic
def load_i64(typingctx: Any, address: Any) -> Any:
    return types.int64(types.int64), lambda ctx, b, sig, a: _load(b, a[0], ir.IntType(64))


@intrinsic
def store_i64(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        b.store(a[1], _at(b, a[0], 0, ir.IntType(64)), align=1)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def load_i16x16(typingctx: Any, address: Any) -> Any:
    """16 int16."""
    return f32x16(types.int64), lambda ctx, b, sig, a: b.sitofp(b.sext(_load(b, a[0], _vec(_I16)), _VI32), _VF32)


@intrinsic
def store_i16x16(typingctx: Any, address: Any, value: Any) -> Any:
    """Writes 16 whole numbers in [-32768, 32767] as int16 (a NaN becomes 0)."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        ints = _call(b, "llvm.fptosi.sat.v16i32.v16f32", _VI32, [a[1]])
        b.store(b.trunc(ints, _vec(_I16)), _at(b, a[0], 0, _vec(_I16)), align=1)
        return ctx.get_dummy_value()

    return types.void(types.int64, f32x16), codegen


@intrinsic
def keep_alive(typingctx: Any, array: Any) -> Any:
    """To be called when an array of which only the address is used may go: Numba frees it after its last mention."""
    return types.void(array), lambda ctx, b, sig, a: ctx.get_dummy_value()
