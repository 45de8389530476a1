# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
"""What a bridge does between two products (see `bridge_kernels`): parts are added up, normed or gated, and made pairs.

Everything goes by groups of 128 columns of 8 rows, each of which one program takes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pocketllm.kernels.triton.gluon_pieces import meet_ranks, publish, store_pairs


@gluon.jit
def add_and_norm(
    parts, ranks, rank, residual, gain, codes, scales, squares, num_rows,
    H: gl.constexpr, PARTS: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr, RANKS: gl.constexpr,
):  # fmt: skip
    """residual [M, H] += the sum of parts [PARTS, M, H]; pairs of it times gain [H]; squares [M, H / 128]: their sums.

    With RANKS > 1 the parts of all of them are added, rank by rank: ranks = (addresses, flags) of a `parallel.Place`.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, WARPS // 4], [1, 0])
    r = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    groups: gl.constexpr = H // 128
    if RANKS > 1:
        meet_ranks(ranks[1], gl.program_id(0), rank, RANKS)
    for item in range(gl.program_id(0), groups * ((num_rows + 7) // 8), gl.num_programs(0)):
        group, row = item % groups, item // groups * 8 + r
        real = row < num_rows
        at = (row * H)[:, None] + (group * 128 + c)[None, :]
        weight = gl.load(gain + group * 128 + c)
        y = gl.load(residual + at, mask=real[:, None], other=0.0).to(gl.float32)
        total = gl.zeros([8, 128], gl.float32, layout)
        for each in gl.static_range(RANKS):
            base = parts
            if RANKS > 1:
                base = gl.load(ranks[0] + each).to(gl.pointer_type(gl.float32))
            of_rank = gl.zeros([8, 128], gl.float32, layout)
            for part in gl.static_range(PARTS):
                of_rank += gl.load(base + part * num_rows * H + at, mask=real[:, None], other=0.0)
            total += of_rank
        y = (y + total).to(residual.dtype.element_ty)
        gl.store(residual + at, y, mask=real[:, None])
        y = y.to(gl.float32)
        gl.store(squares + row * groups + group, gl.sum(y * y, axis=1), mask=real)
        store_pairs(codes, scales, y * weight[None, :], row, real, group, H, PAIRS, layout)
    publish()


@gluon.jit
def _gate_and_up(parts, group, row, real, num_rows, I: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    at = parts + (row * (2 * I))[:, None] + (group * 128 + c)[None, :]
    gate = gl.zeros([8, 128], gl.float32, layout)
    up = gl.zeros([8, 128], gl.float32, layout)
    for part in gl.static_range(PARTS):
        gate += gl.load(at + part * num_rows * (2 * I), mask=real[:, None], other=0.0)
        up += gl.load(at + part * num_rows * (2 * I) + I, mask=real[:, None], other=0.0)
    return gate, up


@gluon.jit
def gate_times_up(
    parts, codes, scales, num_rows, I: gl.constexpr, PARTS: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr
):
    """parts [PARTS, M, 2 I] -> pairs of silu(gate) * up, [M, I]. A program takes two groups of 8 rows at a time."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, WARPS // 4], [1, 0])
    r = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
    twos: gl.constexpr = (I // 128 + 1) // 2
    for item in range(gl.program_id(0), twos * ((num_rows + 7) // 8), gl.num_programs(0)):
        group, row = item % twos * 2, item // twos * 8 + r
        real = row < num_rows
        second = real & (group + 1 < I // 128)
        gate0, up0 = _gate_and_up(parts, group, row, real, num_rows, I, PARTS, layout)
        gate1, up1 = _gate_and_up(parts, group + 1, row, second, num_rows, I, PARTS, layout)
        store_pairs(codes, scales, gate0 / (1.0 + gl.exp(-gate0)) * up0, row, real, group, I, PAIRS, layout)
        store_pairs(codes, scales, gate1 / (1.0 + gl.exp(-gate1)) * up1, row, second, group + 1, I, PAIRS, layout)
    publish()
