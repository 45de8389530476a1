# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""fp8 in `attend_hopper_kernels`: V's codes become fp16 over 256, as in `fp8`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pocketllm.kernels.triton.attend_hopper_queries import pair_e4m3
from pocketllm.kernels.triton.hopper_pieces import in_order, join_e4m3, load_bytes
from pocketllm.kernels.triton.pieces import HopperPieces


def _to_fp16(words: int) -> str:
    """Words of four dims, first one token's, then the next one's -> for each dim, both tokens' fp16.

    The byte in the upper half of 16 bits: its sign is in place, the rest belongs one bit lower.
    """
    lines = [
        f"""prmt.b32 z, ${4 * words + word}, ${5 * words + word}, 0x{4 + i}{4 + i}{i}{i};
shr.b32 y, z, 1;
and.b32 y, y, 0x3f803f80;
lop3.b32 ${4 * word + i}, z, 0x80008000, y, 0xea;
"""
        for word in range(words)
        for i in range(4)
    ]
    return "{\n.reg .b32 z, y;\n" + "".join(lines) + "}"


_ASM, _HALF_ASM = gl.constexpr(_to_fp16(2)), gl.constexpr(_to_fp16(1))


@gluon.jit
def load_v(codes, first, TOKENS: gl.constexpr, layout: gl.constexpr):
    return load_bytes(codes, first, TOKENS, _ASM, _HALF_ASM, layout)


PIECES = HopperPieces(pair_e4m3, join_e4m3, load_v, in_order, 256.0)
