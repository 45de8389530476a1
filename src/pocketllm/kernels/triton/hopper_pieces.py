# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
"""What formats share of their part in `attend_hopper_kernels`: products with pairs of 8-bit numbers, and V from bytes.

How V comes to stand where tensor cores want it. They read it transposed, [D, tokens], from registers: a thread has 8 of 256
dims ("rows") of every fourth pair of tokens, and a register holds a dim of both tokens of a pair. Memory has it the other
way round: neighbours are dims of one token. But it is ours to say which dims the rows are. So a thread loads neighbouring
dims of two tokens, and the bytes change places among its registers while they are made fp16: `pack` elements of a
tensor go into inline PTX, in the order of its layout's registers, and come out in another order; reshapes and permutations
then give the tensor its true coordinates, and move nothing.

A row is (i, warp, h, g) of 4 x 4 x 2 x 8, g being one of a warp's 8 groups of 4 threads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def join_int8(high, low):
    """Products of high and low parts, int32 -> float32. Exact up to here: they are below 127 * 127 * 256."""
    return (high * 128 + low).to(gl.float32)


@gluon.jit
def join_e4m3(high, low):
    """The same of e4m3, float32."""
    return gl.fma(low, 0.0625, high)


@gluon.jit
def load_bytes(codes, first, TOKENS: gl.constexpr, ASM: gl.constexpr, layout: gl.constexpr):
    """Tokens first .. first + TOKENS - 1 of codes [64, 256] in shared memory -> fp16 [256, TOKENS], a left operand.

    ASM: 8 dims of two tokens, $8 and $9 of the first, $10 and $11 of the second -> $0 .. $7, each a dim of both.
    """
    as_stored: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [1, 0], [8, 0], [16, 0]] + ([[32, 0]] if TOKENS == 64 else []),
        [[2, 0], [4, 0], [0, 8], [0, 16], [0, 32]], [[0, 64], [0, 128]], [], [TOKENS, 256],
    )  # fmt: skip
    bytes_ = codes.slice(first, TOKENS).load(as_stored)
    x = gl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r", [bytes_], dtype=gl.float16, is_pure=True, pack=16
    )
    # It went in as (token / 2, token % 2, warp, g, dim / 4 % 2, dim / 2 % 2, dim % 2). Now elements of a register are two
    # tokens, and what the last of these bits stood for has moved on by one, the first of the moved to the last place.
    x = x.reshape([TOKENS // 2, 2, 4, 8, 2, 2, 2]).permute((1, 4, 2, 5, 3, 0, 6)).reshape([256, TOKENS])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def in_order(out):
    """out [256, N], rows as in `load_bytes` -> in the order of dims."""
    N: gl.constexpr = out.shape[1]
    # As it lies, but for the registers: with dims first, the compiler sees that a thread can store 8 at a time.
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [4, 0], [0, 1]] + ([[0, 8]] if N >= 16 else []) + ([[0, 16]] if N >= 32 else []),
        [[0, 2], [0, 4], [8, 0], [16, 0], [32, 0]], [[64, 0], [128, 0]], [], [256, N],
    )  # fmt: skip
    out = out.reshape([4, 4, 2, 8, N]).permute((1, 3, 0, 2, 4)).reshape([256, N])
    return gl.convert_layout(out, layout)
