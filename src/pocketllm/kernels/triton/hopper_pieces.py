# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
"""What formats share of their part in `attend_hopper_kernels`: products with pairs of 8-bit numbers, and V from bytes.

How V comes to stand where tensor cores want it. They read it transposed, [D, tokens], from registers: a thread has 8 of 256
dims ("rows"; 4 of 128) of every fourth pair of tokens, and a register holds a dim of both tokens of a pair. Memory has it
the other way round: neighbours are dims of one token. But it is ours to say which dims the rows are. So a thread loads
neighbouring dims of two tokens, and the bytes change places among its registers while they are made fp16: `pack` elements
of a tensor go into inline PTX, in the order of its layout's registers, and come out in another order; reshapes and
permutations then give the tensor its true coordinates, and move nothing.

A row is (i, warp, h, g) of D / 64 x 4 x 2 x 8, g being one of a warp's 8 groups of 4 threads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pocketllm.kernels.triton.gluon_pieces import powers


@gluon.jit
def join_int8(high, low):
    """Products of high and low parts, int32 -> float32. Exact up to here: they are below 127 * 127 * 256."""
    return (high * 128 + low).to(gl.float32)


@gluon.jit
def join_e4m3(high, low):
    """The same of e4m3, float32."""
    return gl.fma(low, 0.0625, high)


@gluon.constexpr_function
def columns_of(N):
    """Of a layout of [.., N] as tensor cores have it: how registers count through the columns that a thread has."""
    return [[0, column] for column in [1, *powers(8, N)]]


@gluon.constexpr_function
def _as_stored(D, TOKENS):
    """[TOKENS, D]: a thread has D / 32 neighbouring dims of two tokens, and of every eighth token after them."""
    each = D // 32
    return gl.DistributedLinearLayout(
        [[0, d] for d in powers(1, each)] + [[1, 0]] + [[t, 0] for t in powers(8, TOKENS)],
        [[2, 0], [4, 0]] + [[0, d] for d in powers(each, 8 * each)], [[0, 8 * each], [0, 16 * each]], [], [TOKENS, D],
    )  # fmt: skip


@gluon.jit
def load_bytes(codes, first, TOKENS: gl.constexpr, ASM: gl.constexpr, HALF_ASM: gl.constexpr, layout: gl.constexpr):
    """Tokens first .. first + TOKENS - 1 of codes [64, D] in shared memory -> fp16 [D, TOKENS], a left operand.

    ASM: 8 dims of two tokens, $8 and $9 of the first, $10 and $11 of the second -> $0 .. $7, each a dim of both. HALF_ASM,
    of D = 128: 4 dims, $4 of the first, $5 of the second -> $0 .. $3.
    """
    D: gl.constexpr = codes.shape[1]
    bytes_ = codes.slice(first, TOKENS).load(_as_stored(D, TOKENS))
    # They go in as (token / 2, token % 2, warp, g, dim / 4 % 2, dim / 2 % 2, dim % 2); of 128, without dim / 4 % 2. Then
    # elements of a register are two tokens, and what the last of these bits stood for has moved on by one, the first of the
    # moved to the last place.
    if D == 256:
        x = gl.inline_asm_elementwise(
            ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r", [bytes_], dtype=gl.float16, is_pure=False, pack=16
        )
        x = x.reshape([TOKENS // 2, 2, 4, 8, 2, 2, 2]).permute((1, 4, 2, 5, 3, 0, 6)).reshape([D, TOKENS])
    else:
        x = gl.inline_asm_elementwise(
            HALF_ASM, "=&r,=&r,=&r,=&r,r,r", [bytes_], dtype=gl.float16, is_pure=False, pack=8
        )
        x = x.reshape([TOKENS // 2, 2, 4, 8, 2, 2]).permute((1, 2, 4, 3, 0, 5)).reshape([D, TOKENS])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.constexpr_function
def _in_order(D, N):
    """[D, N] as it lies, but for the registers: with dims first, the compiler sees that a thread can store D / 32 at a
    time."""
    each = D // 32
    return gl.DistributedLinearLayout(
        [[d, 0] for d in powers(1, each)] + columns_of(N),
        [[0, 2], [0, 4]] + [[d, 0] for d in powers(each, 8 * each)], [[8 * each, 0], [16 * each, 0]], [], [D, N],
    )  # fmt: skip


@gluon.jit
def in_order(out):
    """out [D, N], rows as in `load_bytes` -> in the order of dims."""
    D: gl.constexpr = out.shape[0]
    N: gl.constexpr = out.shape[1]
    out = out.reshape([D // 64, 4, 2, 8, N]).permute((1, 3, 0, 2, 4)).reshape([D, N])
    return gl.convert_layout(out, _in_order(D, N))
