# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
"""The Hadamard transform in Gluon, for rows that several warps hold: where each number lies is ours to say, so that no step
crosses shared memory unasked. The steps are those of `numerics.hadamard`, neighbours first, and so are the results' bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _exchange_asm(distance):
    return f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"


@gluon.jit
def over_registers(x, H: gl.constexpr):
    """Of every 2 H neighbours in a row of x [N, D], which one thread holds: the sums of the first H and the last H, then the
    differences."""
    N: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    first, last = x.reshape([N, D // (2 * H), 2, H]).permute((0, 1, 3, 2)).split()
    x = gl.join(first + last, first - last).permute((0, 1, 3, 2)).reshape([N, D])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def over_lanes(x, H: gl.constexpr, DISTANCE: gl.constexpr):
    """The same, where numbers that are H apart lie in lanes that are DISTANCE apart."""
    d = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    other = gl.inline_asm_elementwise(_exchange_asm(DISTANCE), "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)
    return gl.where((d & H)[None, :] != 0, other - x, x + other)


@gluon.jit
def hadamard_of_rows(x):
    """Orthonormal Walsh-Hadamard transform of each row of x [N, D] float32, D a power of two: a warp has a whole row, its
    threads D / 32 neighbours each."""
    D: gl.constexpr = x.shape[1]
    for i in gl.static_range(16):
        if (1 << i) < D // 32:
            x = over_registers(x, 1 << i)
        elif (1 << i) < D:
            x = over_lanes(x, 1 << i, (1 << i) * 32 // D)
    return x * (D**-0.5)


@gluon.jit
def hadamard_of_a_row(x, LAYOUT: gl.constexpr):
    """Of x [1, D], of which a warp has 32 neighbours -> in LAYOUT, where a thread has what is a multiple of 32 apart."""
    D: gl.constexpr = x.shape[1]
    for i in gl.static_range(5):
        x = over_lanes(x, 1 << i, 1 << i)
    x = gl.convert_layout(x, LAYOUT)
    for i in gl.static_range(5, 16):
        if (1 << i) < D:
            x = over_registers(x, 1 << i)
    return x * (D**-0.5)
