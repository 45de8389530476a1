"""512-bit vector operations for Numba kernels, with the instructions that matrix products live on.

Numba has no vector type, so this module adds two: `f32x16` and `i32x16` (a 64-byte load is an `i32x16`; what the bytes
mean is up to the operation that takes it). Every operation is an `@intrinsic`, usable inside `@njit`; memory is named
by integer addresses (`tensor.data_ptr()` plus bytes), so that bfloat16 and packed formats, which NumPy does not know,
are read in place. Loads and stores need no alignment.

Operations that some CPUs have an instruction for take a `Target` first: it says which features the kernel is compiled
for. Without the feature they emit plain LLVM vector code of the same meaning, which LLVM cuts to the machine's width
(AVX2, NEON). `Target.host()` reads the CPU once; tests compile the same kernels for a `Target()` without features.

A *tile* is a tuple of accumulators, `rows * lanes` vectors, row by row: lanes hold the outputs (columns of y), rows the
tokens. `tile_*` operations are unrolled over it, so one source line serves every tile size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.imputils import lower_constant
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic, models, overload, register_model, typeof_impl

LANES = 16
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()


# -- what the kernels are compiled for -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """CPU features a kernel may use, by LLVM's names. A constant inside kernels: it has a type and no value."""

    features: tuple[str, ...] = ()

    USED = ("avx512bf16", "avx512vnni", "avx512vbmi")

    @staticmethod
    def host() -> Target:
        """The features of this machine that any operation here has an instruction for."""
        found = llvm.get_host_cpu_features()
        return Target(tuple(name for name in Target.USED if found.get(name)))


class _TargetType(types.Type):
    def __init__(self, features: tuple[str, ...]) -> None:
        self.features = features
        super().__init__(name=f"Target({','.join(features)})")


@typeof_impl.register(Target)
def _typeof_target(value: Target, context: object) -> _TargetType:
    return _TargetType(value.features)


register_model(_TargetType)(models.OpaqueModel)


@lower_constant(_TargetType)
def _constant_target(context: Any, builder: Any, ty: object, value: object) -> Any:
    return context.get_dummy_value()


# -- vector types ----------------------------------------------------------------------------------------------------


class _Vector(types.Type):
    def __init__(self, name: str, element: ir.Type) -> None:
        self.llvm = ir.VectorType(element, LANES)
        super().__init__(name=name)


class _F32x16(_Vector):
    def __init__(self) -> None:
        super().__init__("f32x16", _F32)


class _I32x16(_Vector):
    def __init__(self) -> None:
        super().__init__("i32x16", _I32)


f32x16 = _F32x16()
i32x16 = _I32x16()


@register_model(_F32x16)
@register_model(_I32x16)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]  # Numba has no types
    def __init__(self, dmm: Any, fe_type: _Vector) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


_VF32, _VI32 = f32x16.llvm, i32x16.llvm


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


bfloat = _BFloat()
_F16 = ir.HalfType()


def _vec(element: ir.Type, count: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, count)


def _at(builder: ir.IRBuilder, address: ir.Value, offset: int, pointee: ir.Type) -> ir.Value:
    """A pointer to address + offset bytes."""
    # LLVM may rewrite address a + i as "pointer i plus a"; inlined where i is 0, that is null, and "never happens".
    set.add(builder.function.attributes, "null_pointer_is_valid")  # past llvmlite's list of the attributes it knows
    base = builder.inttoptr(address, ir.PointerType(_I8))
    moved = builder.gep(base, [ir.Constant(_I64, offset)]) if offset else base
    return builder.bitcast(moved, ir.PointerType(pointee))


def _load(builder: ir.IRBuilder, address: ir.Value, pointee: ir.Type, offset: int = 0) -> ir.Value:
    return builder.load(_at(builder, address, offset, pointee), align=1)


def _splat(builder: ir.IRBuilder, scalar: ir.Value, count: int = LANES) -> ir.Value:
    undefined = ir.Constant(_vec(scalar.type, count), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_vec(_I32, count), [0] * count))


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, args: Sequence[ir.Value]) -> ir.Value:
    fnty = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, fnty, name), args)


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return _call(builder, "llvm.fma.v16f32", _VF32, [a, b, c])


def _unpack(builder: ir.IRBuilder, value: ir.Value, ty: Any) -> list[ir.Value]:
    return [builder.extract_value(value, i) for i in range(ty.count)]


def _pack(builder: ir.IRBuilder, values: Sequence[ir.Value]) -> ir.Value:
    result = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for i, v in enumerate(values):
        result = builder.insert_value(result, v, i)
    return result


# -- loads, stores, conversions --------------------------------------------------------------------------------------


@intrinsic
def load_f32(typingctx: Any, address: Any) -> Any:
    """One float32 at `address`."""
    return types.float32(types.int64), lambda ctx, b, sig, a: _load(b, a[0], _F32)


@intrinsic
def store_f32(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        b.store(a[1], _at(b, a[0], 0, _F32), align=1)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def load_f32x16(typingctx: Any, address: Any) -> Any:
    return f32x16(types.int64), lambda ctx, b, sig, a: _load(b, a[0], _VF32)


@intrinsic
def load_f16x16(typingctx: Any, address: Any) -> Any:
    """16 float16 as float32."""
    return f32x16(types.int64), lambda ctx, b, sig, a: b.fpext(_load(b, a[0], _vec(_F16)), _VF32)


@intrinsic
def load_bf16x16(typingctx: Any, address: Any) -> Any:
    """16 bfloat16 as float32."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        wide = b.zext(_load(b, a[0], _vec(_I16)), _VI32)
        return b.bitcast(b.shl(wide, ir.Constant(_VI32, [16] * LANES)), _VF32)

    return f32x16(types.int64), codegen


@intrinsic
def store_f32x16(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        b.store(a[1], _at(b, a[0], 0, _VF32), align=1)
        return ctx.get_dummy_value()

    return types.void(types.int64, f32x16), codegen


@intrinsic
def splat(typingctx: Any, value: Any) -> Any:
    """A float32 in all 16 lanes."""
    return f32x16(types.float32), lambda ctx, b, sig, a: _splat(b, a[0])


def _binary(emit: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @intrinsic
    def op(typingctx: Any, x: Any, y: Any) -> Any:
        return f32x16(f32x16, f32x16), lambda ctx, b, sig, a: emit(b, a[0], a[1])

    def overloaded(x, y):  # Numba compares this signature with the lambda's
        return (lambda x, y: op(x, y)) if x is f32x16 and y is f32x16 else None

    return overloaded


overload(operator.add)(_binary(lambda b, x, y: b.fadd(x, y)))
overload(operator.sub)(_binary(lambda b, x, y: b.fsub(x, y)))
overload(operator.mul)(_binary(lambda b, x, y: b.fmul(x, y)))


@intrinsic
def fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    return f32x16(f32x16, f32x16, f32x16), lambda ctx, b, sig, a: _fma(b, *a)


def _lanes_below(b: ir.IRBuilder, count: ir.Value, start: int) -> ir.Value:
    lanes = ir.Constant(_VI32, list(range(start, start + LANES)))
    return b.icmp_signed("<", lanes, _splat(b, b.trunc(count, _I32)))


def _masked_load(b: ir.IRBuilder, address: ir.Value, offset: int, mask: ir.Value) -> ir.Value:
    args = [_at(b, address, offset, _VF32), ir.Constant(_I32, 1), mask, ir.Constant(_VF32, None)]
    return _call(b, "llvm.masked.load.v16f32.p0", _VF32, args)


# -- tiles -----------------------------------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def tile_zeros(typingctx: Any, count: Any) -> Any:
    """A float32 tile of `count` (a literal) vectors of zeros."""
    ty = UniTuple(f32x16, count.literal_value)
    return ty(count), lambda ctx, b, sig, a: ir.Constant(ctx.get_value_type(ty), None)


@intrinsic
def tile_fma(typingctx: Any, acc: Any, w: Any, x: Any) -> Any:
    """acc[r, l] += w[l] * x[r]; x the address of one float32 a row."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        out, weights = _unpack(b, a[0], acc), _unpack(b, a[1], w)
        for r in range(acc.count // w.count):
            xr = _splat(b, _load(b, a[2], _F32, 4 * r))
            for l, wl in enumerate(weights):
                out[r * w.count + l] = _fma(b, wl, xr, out[r * w.count + l])
        return _pack(b, out)

    return acc(acc, w, types.int64), codegen
