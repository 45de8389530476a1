# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""TurboQuant K8V4 in `attend_hopper_kernels`: V's levels as in `turboquant_k8v4`, bit for bit."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pocketllm.cache.formats.cubic_levels import CUBIC
from pocketllm.kernels.triton.attend_hopper_queries import pair_int8
from pocketllm.kernels.triton.hopper_pieces import join_int8
from pocketllm.kernels.triton.pieces import HopperPieces

# $8 has four bytes of a token, $9 those of the next; $0 .. $3 get what the low nibbles stand for, $4 .. $7 the high ones,
# each of both tokens. A nibble of 2^i in the mantissa of 1024.0 is 1024 + 2^i q, of which one fma makes x = q - 7.5 if i is
# 1 or more: so the low ones are moved up by one bit.
_LEVELS = gl.constexpr(
    """{
.reg .b32 both, z, x, t, one, half, middle, thirtysecond, high_middle, inverse;
mov.b32 one, 0x64006400;
mov.b32 half, 0x38003800;
mov.b32 middle, 0xe00fe00f;
mov.b32 thirtysecond, 0x28002800;
mov.b32 high_middle, 0xd0f0d0f0;
mov.b32 inverse, 0x582b582b;
"""
    + "".join(
        f"prmt.b32 both, $8, $9, {halves};\n"
        + "".join(
            f"""{move};
lop3.b32 x, z, 0x001e001e, one, 0xea;
fma.rn.f16x2 x, x, half, middle;
fma.rn.f16x2 t, x, x, inverse;
mul.rn.f16x2 ${byte}, x, t;
lop3.b32 x, z, 0x01e001e0, one, 0xea;
fma.rn.f16x2 x, x, thirtysecond, high_middle;
fma.rn.f16x2 t, x, x, inverse;
mul.rn.f16x2 ${4 + byte}, x, t;
"""
            for byte, move in ((first, "shl.b32 z, both, 1"), (first + 1, "shr.b32 z, both, 7"))
        )
        for first, halves in ((0, "0x5410"), (2, "0x7632"))
    )
    + "}"
)


@gluon.jit
def load_v(codes, first, TOKENS: gl.constexpr, layout: gl.constexpr):
    """As `hopper_pieces.load_bytes`, of codes [64, 128]: a thread's 8 dims are d .. d + 3 and d + 128 .. d + 131."""
    as_stored: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0]] + ([[32, 0]] if TOKENS == 64 else []),
        [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]], [[0, 32], [0, 64]], [], [TOKENS, 128],
    )  # fmt: skip
    packed = codes.slice(first, TOKENS).load(as_stored)
    low, high = gl.inline_asm_elementwise(
        _LEVELS, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [packed], dtype=(gl.float16, gl.float16), is_pure=True, pack=8
    )
    # As (token / 2, token % 2, warp, g, d / 2 % 2, d % 2, high); token % 2 and the two after g have moved on.
    x = gl.join(low, high).reshape([TOKENS // 2, 2, 4, 8, 2, 2, 2])
    x = x.permute((6, 1, 2, 4, 3, 0, 5)).reshape([256, TOKENS])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def in_order(out):
    """As `hopper_pieces.in_order`."""
    N: gl.constexpr = out.shape[1]
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [128, 0], [0, 1]] + ([[0, 8]] if N >= 16 else []) + ([[0, 16]] if N >= 32 else []),
        [[0, 2], [0, 4], [4, 0], [8, 0], [16, 0]], [[32, 0], [64, 0]], [], [256, N],
    )  # fmt: skip
    out = out.reshape([2, 2, 4, 2, 8, N]).permute((0, 2, 4, 1, 3, 5)).reshape([256, N])
    return gl.convert_layout(out, layout)


PIECES = HopperPieces(pair_int8, join_int8, load_v, in_order, CUBIC)
