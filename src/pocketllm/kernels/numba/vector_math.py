"""Arithmetic on `f32x16` that attention, norms and gates share: exp, reductions, transposition, Hadamard transform.

Each is one fixed sequence of IEEE operations: a result depends on the input alone, not on where in a tensor it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from pocketllm.kernels.numba.simd import (
    _at,
    _call,
    _fma,
    _lanes_below,
    _load,
    _masked_load,
    _splat,
    _vec,
    f32x16,
    load_f32x16,
    splat,
    store_f32x16,
)

LANES = 16
_F32, _I32 = ir.FloatType(), ir.IntType(32)
_VF32, _VI32 = _vec(_F32), _vec(_I32)

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # the high part is short: n * high is exact
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_ROUND = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, which is then in the low mantissa bits
_EXP_MIN, _EXP_MAX = -87.0, 88.0


def constant(value: float) -> ir.Constant:
    """The same float32 in all lanes."""
    return ir.Constant(_VF32, [value] * LANES)


def _shuffle(b: ir.IRBuilder, x: ir.Value, y: ir.Value, lanes: list[int]) -> ir.Value:
    """Lanes 0..15 of x and 16..31 of y."""
    return b.shuffle_vector(x, y, ir.Constant(_vec(_I32, len(lanes)), lanes))


def _elementwise(arity: int, emit: Callable[..., Any]) -> Any:
    def unary(typingctx: Any, x: Any) -> Any:
        return f32x16(f32x16), lambda ctx, b, sig, a: emit(b, *a)

    def binary(typingctx: Any, x: Any, y: Any) -> Any:
        return f32x16(f32x16, f32x16), lambda ctx, b, sig, a: emit(b, *a)

    return intrinsic((unary, binary)[arity - 1])


divide = _elementwise(2, lambda b, x, y: b.fdiv(x, y))
larger = _elementwise(2, lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))  # one instruction; may drop a NaN
larger_or_nan = _elementwise(2, lambda b, x, y: _call(b, "llvm.maximum.v16f32", _VF32, [x, y]))
smaller_or_nan = _elementwise(2, lambda b, x, y: _call(b, "llvm.minimum.v16f32", _VF32, [x, y]))
absolute = _elementwise(1, lambda b, x: _call(b, "llvm.fabs.v16f32", _VF32, [x]))
round_even = _elementwise(1, lambda b, x: _call(b, "llvm.rint.v16f32", _VF32, [x]))


@intrinsic
def exp(typingctx: Any, x: Any) -> Any:
    """e**x to about 1 ulp: exactly 1 at 0, exactly 0 below -87, e**88 above 88, NaN for NaN (Cephes' polynomial)."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        x = a[0]
        low = b.fcmp_ordered("<", x, constant(_EXP_MIN))
        high = b.fcmp_ordered(">", x, constant(_EXP_MAX))
        x = b.select(high, constant(_EXP_MAX), b.select(low, constant(_EXP_MIN), x))
        shifted = _fma(b, x, constant(_LOG2_E), constant(_ROUND))
        n = b.fsub(shifted, constant(_ROUND))
        r = _fma(b, n, constant(-_LN2_LOW), _fma(b, n, constant(-_LN2_HIGH), x))
        p = constant(_EXP[0])
        for c in _EXP[1:]:
            p = _fma(b, p, r, constant(c))
        y = b.fadd(_fma(b, p, b.fmul(r, r), r), constant(1.0))
        exponent = b.shl(b.bitcast(shifted, _VI32), ir.Constant(_VI32, [23] * LANES))
        power = b.bitcast(b.add(exponent, ir.Constant(_VI32, [127 << 23] * LANES)), _VF32)
        return b.select(low, constant(0.0), b.fmul(y, power))

    return f32x16(f32x16), codegen


@njit(forceinline=True)
def sigmoid(x):
    one = splat(1.0)
    return divide(one, one + exp(splat(0.0) - x))


@njit(forceinline=True)
def silu(x):
    return x * sigmoid(x)


@intrinsic
def load_f32x16_part(typingctx: Any, address: Any, count: Any) -> Any:
    """The first `count` of 16 float32, zeros after them; reads nothing beyond."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        return _masked_load(b, a[0], 0, _lanes_below(b, a[1], 0))

    return f32x16(types.int64, types.int64), codegen


@intrinsic
def store_f32x16_part(typingctx: Any, address: Any, value: Any, count: Any) -> Any:
    """Writes the first `count` of 16 float32."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        mask = _lanes_below(b, a[2], 0)
        pointer = _at(b, a[0], 0, _VF32)
        _call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), [a[1], pointer, ir.Constant(_I32, 1), mask])
        return ctx.get_dummy_value()

    return types.void(types.int64, f32x16, types.int64), codegen


# -- across lanes ----------------------------------------------------------------------------------------------------


def _reduce(emit: Callable[[Any, Any, Any], Any]) -> Any:
    def reduce(typingctx: Any, x: Any) -> Any:
        def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
            x = a[0]
            for half in (8, 4, 2, 1):
                x = emit(b, x, _shuffle(b, x, x, [(i + half) % LANES for i in range(LANES)]))
            return b.extract_element(x, ir.Constant(_I32, 0))

        return types.float32(f32x16), codegen

    return intrinsic(reduce)


sum_lanes = _reduce(lambda b, x, y: b.fadd(x, y))  # a fixed tree
max_lanes = _reduce(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
max_lanes_or_nan = _reduce(lambda b, x, y: _call(b, "llvm.maximum.v16f32", _VF32, [x, y]))


@intrinsic
def transpose_16x16(typingctx: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> Any:
    """Reads 16 rows of 16 float32, strides in bytes apart, and writes them as columns. One shuffle a vector and step."""
    groups = range(4)
    pair_low = [x for g in groups for x in (4 * g, 16 + 4 * g, 4 * g + 1, 17 + 4 * g)]
    pair_high = [x + 2 for x in pair_low]
    quad_low = [x for g in groups for x in (4 * g, 4 * g + 1, 16 + 4 * g, 17 + 4 * g)]
    quad_high = [x + 2 for x in quad_low]
    block_even = [4 * g + i for g in (0, 2, 4, 6) for i in range(4)]
    block_odd = [4 * g + i for g in (1, 3, 5, 7) for i in range(4)]

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        source, source_stride, target, target_stride = a
        rows = []
        for _ in range(LANES):
            rows.append(_load(b, source, _VF32))
            source = b.add(source, source_stride)
        out: list[Any] = [None] * LANES
        quads = []
        for i in range(0, LANES, 4):  # 4 rows: columns 4 g + c of them meet in group g of vector c
            r = rows[i : i + 4]
            low0, high0 = _shuffle(b, r[0], r[1], pair_low), _shuffle(b, r[0], r[1], pair_high)
            low1, high1 = _shuffle(b, r[2], r[3], pair_low), _shuffle(b, r[2], r[3], pair_high)
            quads.append(
                [
                    _shuffle(b, low0, low1, quad_low),
                    _shuffle(b, low0, low1, quad_high),
                    _shuffle(b, high0, high1, quad_low),
                    _shuffle(b, high0, high1, quad_high),
                ]
            )
        for c in range(4):  # then a transposition of 4 x 4 groups
            q = [quad[c] for quad in quads]
            even0, odd0 = _shuffle(b, q[0], q[1], block_even), _shuffle(b, q[0], q[1], block_odd)
            even1, odd1 = _shuffle(b, q[2], q[3], block_even), _shuffle(b, q[2], q[3], block_odd)
            out[c], out[8 + c] = _shuffle(b, even0, even1, block_even), _shuffle(b, even0, even1, block_odd)
            out[4 + c], out[12 + c] = _shuffle(b, odd0, odd1, block_even), _shuffle(b, odd0, odd1, block_odd)
        for column in out:
            b.store(column, _at(b, target, 0, _VF32), align=1)
            target = b.add(target, target_stride)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def _hadamard_16(typingctx: Any, x: Any) -> Any:
    """Butterflies (a, b) -> (a + b, a - b) at distances 1, 2, 4, 8."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        x = a[0]
        for half in (1, 2, 4, 8):
            other = _shuffle(b, x, x, [i ^ half for i in range(LANES)])
            sums, differences = b.fadd(x, other), b.fsub(other, x)
            x = _shuffle(b, sums, differences, [16 + i if i & half else i for i in range(LANES)])
        return x

    return f32x16(f32x16), codegen


@njit
def hadamard(x, size, block, factor):
    """Hadamard transform, in place, of each `block` (a power of two from 16) of the `size` float32 at x, times factor."""
    for i in range(0, size, 16):
        store_f32x16(x + i * 4, _hadamard_16(load_f32x16(x + i * 4)))
    half = 16
    while half < block:
        for start in range(0, size, 2 * half):
            for i in range(start, start + half, 16):
                a, b = load_f32x16(x + i * 4), load_f32x16(x + (i + half) * 4)
                store_f32x16(x + i * 4, a + b)
                store_f32x16(x + (i + half) * 4, a - b)
        half *= 2
    scale = splat(factor)
    for i in range(0, size, 16):
        store_f32x16(x + i * 4, load_f32x16(x + i * 4) * scale)


@intrinsic
def hide(typingctx: Any, scores: Any, position: Any, query: Any, window: Any, sinks: Any) -> Any:
    """Scores of keys position .. position + 15 with -inf where the query at `query` may not look (see AttentionMask)."""

    def codegen(ctx: Any, b: Any, sig: Any, a: Any) -> Any:
        scores, *numbers = a
        position, query, window, sinks = (_splat(b, b.trunc(x, _I32)) for x in numbers)
        key = b.add(position, ir.Constant(_VI32, list(range(LANES))))
        past = b.icmp_signed("<=", key, query)
        unlimited = b.icmp_signed("==", window, ir.Constant(_VI32, [0] * LANES))
        near = b.icmp_signed("<", b.sub(query, key), window)
        near = b.or_(unlimited, b.or_(near, b.icmp_signed("<", key, sinks)))
        return b.select(b.and_(past, near), scores, constant(float("-inf")))

    return f32x16(f32x16, types.int64, types.int64, types.int64, types.int64), codegen
