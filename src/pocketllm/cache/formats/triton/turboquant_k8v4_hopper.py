# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""TurboQuant K8V4 in `attend_hopper_kernels`: V's levels as in `turboquant_k8v4`, bit for bit."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pocketllm.cache.formats.cubic_levels import CUBIC
from pocketllm.kernels.triton.attend_hopper_queries import pair_int8
from pocketllm.kernels.triton.gluon_pieces import powers
from pocketllm.kernels.triton.hopper_pieces import columns_of, join_int8
from pocketllm.kernels.triton.pieces import HopperPieces

_CONSTANTS = """.reg .b32 both, z, x, t, one, half, middle, thirtysecond, high_middle, inverse;
mov.b32 one, 0x64006400;
mov.b32 half, 0x38003800;
mov.b32 middle, 0xe00fe00f;
mov.b32 thirtysecond, 0x28002800;
mov.b32 high_middle, 0xd0f0d0f0;
mov.b32 inverse, 0x582b582b;
"""


def _levels(count: int) -> str:
    """`count` bytes of a token and of the next -> what the low nibbles stand for, then the high ones, each of both tokens.

    A nibble of 2^i in the mantissa of 1024.0 is 1024 + 2^i q, of which one fma makes x = q - 7.5 if i is 1 or more: so the
    low ones are moved up by one bit.
    """
    lines = []
    for byte in range(count):
        if byte % 2 == 0:  # four bytes: two registers, of a token each; two bytes: both tokens are in one
            both = f"prmt.b32 both, $8, $9, {('0x5410', '0x7632')[byte // 2]}" if count == 4 else "mov.b32 both, $4"
            lines.append(f"{both};\nshl.b32 z, both, 1;\n")
        else:
            lines.append("shr.b32 z, both, 7;\n")
        lines.append(f"""lop3.b32 x, z, 0x001e001e, one, 0xea;
fma.rn.f16x2 x, x, half, middle;
fma.rn.f16x2 t, x, x, inverse;
mul.rn.f16x2 ${byte}, x, t;
lop3.b32 x, z, 0x01e001e0, one, 0xea;
fma.rn.f16x2 x, x, thirtysecond, high_middle;
fma.rn.f16x2 t, x, x, inverse;
mul.rn.f16x2 ${count + byte}, x, t;
""")
    return "{\n" + _CONSTANTS + "".join(lines) + "}"


_ASM, _HALF_ASM = gl.constexpr(_levels(4)), gl.constexpr(_levels(2))


@gluon.constexpr_function
def _as_stored(D, TOKENS):
    """[TOKENS, D / 2]: a thread has D / 64 neighbouring bytes of two tokens, and of every eighth token after them."""
    each = D // 64
    return gl.DistributedLinearLayout(
        [[0, d] for d in powers(1, each)] + [[1, 0]] + [[t, 0] for t in powers(8, TOKENS)],
        [[2, 0], [4, 0]] + [[0, d] for d in powers(each, 8 * each)], [[0, 8 * each], [0, 16 * each]], [],
        [TOKENS, D // 2],
    )  # fmt: skip


@gluon.jit
def load_v(codes, first, TOKENS: gl.constexpr, layout: gl.constexpr):
    """As `hopper_pieces.load_bytes`, of codes [64, D / 2]: a thread's dims are D / 64 neighbours, and those D / 2 above."""
    D: gl.constexpr = 2 * codes.shape[1]
    packed = codes.slice(first, TOKENS).load(_as_stored(D, TOKENS))
    # As (token / 2, token % 2, warp, g, d / 2 % 2, d % 2, high), of 128 without d / 2 % 2; those between token / 2 and high
    # that are not warp or g have moved on.
    if D == 256:
        low, high = gl.inline_asm_elementwise(
            _ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [packed], dtype=(gl.float16, gl.float16), is_pure=False, pack=8
        )
        x = gl.join(low, high).reshape([TOKENS // 2, 2, 4, 8, 2, 2, 2]).permute((6, 1, 2, 4, 3, 0, 5))
    else:
        low, high = gl.inline_asm_elementwise(
            _HALF_ASM, "=&r,=&r,=&r,=&r,r", [packed], dtype=(gl.float16, gl.float16), is_pure=False, pack=4
        )
        x = gl.join(low, high).reshape([TOKENS // 2, 2, 4, 8, 2, 2]).permute((5, 2, 1, 3, 0, 4))
    return gl.convert_layout(x.reshape([D, TOKENS]), layout, assert_trivial=True)


@gluon.constexpr_function
def _in_order(D, N):
    """As `hopper_pieces._in_order`."""
    each = D // 64
    return gl.DistributedLinearLayout(
        [[d, 0] for d in powers(1, each)] + [[D // 2, 0]] + columns_of(N),
        [[0, 2], [0, 4]] + [[d, 0] for d in powers(each, 8 * each)], [[8 * each, 0], [16 * each, 0]], [], [D, N],
    )  # fmt: skip


@gluon.jit
def in_order(out):
    """As `hopper_pieces.in_order`."""
    D: gl.constexpr = out.shape[0]
    N: gl.constexpr = out.shape[1]
    if D == 256:
        out = out.reshape([2, 2, 4, 2, 8, N]).permute((0, 2, 4, 1, 3, 5))
    else:
        out = out.reshape([2, 4, 2, 8, N]).permute((0, 1, 3, 2, 4))
    return gl.convert_layout(out.reshape([D, N]), _in_order(D, N))


PIECES = HopperPieces(pair_int8, join_int8, load_v, in_order, CUBIC)
