# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""int8_per_token_head in `attend_hopper_kernels`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pocketllm.kernels.triton.attend_hopper_queries import pair_int8
from pocketllm.kernels.triton.hopper_pieces import in_order, join_int8, load_bytes
from pocketllm.kernels.triton.pieces import HopperPieces


def _to_fp16(words: int) -> str:
    """Words of four dims, first one token's, then the next one's -> for each dim, both tokens' fp16.

    A byte with its sign bit turned over is b + 128; in the mantissa of 1024.0, that is 1152 + b (0x6480 is 1152.0).
    """
    lines = [
        f"""prmt.b32 z, ${4 * words + word}, ${5 * words + word}, {halves};
lop3.b32 ${4 * word + i}, z, 0x00ff00ff, shift, 0x6a;
shr.b32 z, z, 8;
lop3.b32 ${4 * word + i + 1}, z, 0x00ff00ff, shift, 0x6a;
sub.rn.f16x2 ${4 * word + i}, ${4 * word + i}, shift;
sub.rn.f16x2 ${4 * word + i + 1}, ${4 * word + i + 1}, shift;
"""
        for word in range(words)
        for i, halves in ((0, "0x5410"), (2, "0x7632"))
    ]
    return "{\n.reg .b32 z, shift;\nmov.b32 shift, 0x64806480;\n" + "".join(lines) + "}"


_ASM, _HALF_ASM = gl.constexpr(_to_fp16(2)), gl.constexpr(_to_fp16(1))


@gluon.jit
def load_v(codes, first, TOKENS: gl.constexpr, layout: gl.constexpr):
    return load_bytes(codes, first, TOKENS, _ASM, _HALF_ASM, layout)


PIECES = HopperPieces(pair_int8, join_int8, load_v, in_order, 1.0)
