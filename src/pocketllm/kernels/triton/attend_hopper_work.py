# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
"""What the Hopper kernels of decode and verify share: which pieces of work a program takes, how its copying warp tells the
others of them, and what four of those do to a tile of scores [64 tokens, N query rows], of which each has 16 tokens.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pocketllm.kernels.triton.attend_hopper import TILE
from pocketllm.kernels.triton.attend_splits import long_splits, piece_of, share_of, short_splits, split_start

WARPS = 4  # of which each has 16 tokens' scores
_TILE, _WARPS = gl.constexpr(TILE), gl.constexpr(WARPS)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def plan_of(batch, OF_SPLIT: gl.constexpr, SPLITS: gl.constexpr, NP: gl.constexpr):
    """This program's share of the work, of splits with OF_SPLIT pieces each. NP: room for sequences."""
    slot_ids, kv_lens, num_seqs = batch
    index = gl.arange(0, NP, layout=gl.BlockedLayout([1], [32], [1], [0]))
    lens = gl.load(kv_lens + index, mask=index < num_seqs, other=0).to(gl.int32)
    slots = gl.load(slot_ids + index, mask=index < num_seqs, other=0).to(gl.int32)
    shorts, longs = short_splits(lens, SPLITS), long_splits(lens, SPLITS)
    num_longs, num_shorts = gl.sum(longs, axis=0) * OF_SPLIT, gl.sum(shorts, axis=0) * OF_SPLIT
    share = share_of(gl.program_id(0), gl.num_programs(0), num_longs, num_shorts, SPLITS)
    up_to = gl.associative_scan(shorts, 0, _add), gl.associative_scan(longs, 0, _add)
    return share, index, lens, slots, (shorts, longs), up_to


@gluon.jit
def find(turn, plan, OF_SPLIT: gl.constexpr, SPLITS: gl.constexpr):
    """A piece of this program: its number in the split; sequence, split, first token and end, the slot and its length."""
    share, index, lens, slots, counts, up_to = plan
    is_long, piece = piece_of(turn, share, gl.program_id(0), gl.num_programs(0))
    count, ends = gl.where(is_long, counts[1], counts[0]), gl.where(is_long, up_to[1], up_to[0])
    item = piece // OF_SPLIT
    seq = gl.sum((ends <= item).to(gl.int32), axis=0)
    here = index == seq
    split = item - gl.sum(gl.where(here, ends - count, 0), axis=0)
    split += gl.where(is_long, SPLITS[1] // SPLITS[0], 0)
    slot, kv_len = gl.sum(gl.where(here, slots, 0), axis=0), gl.sum(gl.where(here, lens, 0), axis=0)
    end = gl.minimum(split_start(split + 1, SPLITS), kv_len)
    return piece % OF_SPLIT, seq, split, split_start(split, SPLITS), end, slot, kv_len


@gluon.jit
def tell(notes, buffer, piece, seq, split, first, end, kv_len):
    """Leaves what the other warps must know of a piece of work."""
    i = gl.arange(0, 8, layout=gl.BlockedLayout([1], [32], [1], [0]))
    note = gl.where(i == 0, first, gl.where(i == 1, end, gl.where(i == 2, kv_len, 0)))
    note = gl.where(i == 3, piece, gl.where(i == 4, seq, gl.where(i == 5, split, note)))
    notes.index(buffer).store(note)
    gl.thread_barrier()


@gluon.jit
def told(notes, buffer):
    """(piece, seq, split, first, end, kv_len)"""
    layout: gl.constexpr = gl.DistributedLinearLayout([[1], [2], [4]], [[0]] * 5, [[0]] * 2, [], [8])
    note, i = notes.index(buffer).load(layout), gl.arange(0, 8, layout=layout)
    first, end = gl.sum(gl.where(i == 0, note, 0), axis=0), gl.sum(gl.where(i == 1, note, 0), axis=0)
    kv_len, piece = gl.sum(gl.where(i == 2, note, 0), axis=0), gl.sum(gl.where(i == 3, note, 0), axis=0)
    seq, split = gl.sum(gl.where(i == 4, note, 0), axis=0), gl.sum(gl.where(i == 5, note, 0), axis=0)
    return piece, seq, split, first, end, kv_len


@gluon.constexpr_function
def queries_layout(D):
    """[N, D]: a warp has a whole row, a thread D / 32 neighbours."""
    return gl.BlockedLayout([1, D // 32], [1, 32], [WARPS, 1], [1, 0])


@gluon.jit
def queries_of(
    q, piece, seq, exists, Q: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr, D: gl.constexpr, N: gl.constexpr
):
    """The rows [N, D] of a piece of work, zeros where there are none. q [n, Q, HQ, D]."""
    GROUP: gl.constexpr = HQ // HK
    layout: gl.constexpr = queries_layout(D)
    row = piece // HK * N + gl.arange(0, N, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    at = ((seq * Q + row // GROUP) * HQ + piece % HK * GROUP + row % GROUP).to(gl.int64) * D
    real = (exists & (row < GROUP * Q))[:, None]
    return gl.load(q + at[:, None] + d[None, :], mask=real, other=0.0)


@gluon.jit
def largest_of(scores, room, N: gl.constexpr, layout: gl.constexpr):
    """The largest of each column of scores [64, N], whose warps have 16 rows each. room [4, N]: for what they tell each
    other; not that of the call before."""
    together: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [0, 1]] + ([[0, 8]] if N >= 16 else []) + ([[0, 16]] if N >= 32 else []),
        [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [_WARPS, N],
    )  # fmt: skip
    room.store(gl.max(scores.reshape([_WARPS, 16, N]), axis=1))
    return gl.convert_layout(gl.max(room.load(together), axis=0), layout)


@gluon.jit
def over_pairs(x, N: gl.constexpr):
    """x [64, N] with the two rows that a thread has added up: [32, N]."""
    return gl.sum(x.reshape([_WARPS, 2, 8, N]), axis=1).reshape([_TILE // 2, N])


_LARGEST_OF_WARP = gl.constexpr(
    "{\n.reg .b32 x;\nmov.b32 x, $1;\nredux.sync.max.s32 x, x, 0xffffffff;\nmov.b32 $0, x;\n}"
)


@gluon.jit
def note_highest(x, room, N: gl.constexpr):
    """Leaves each warp's largest of x [64, N], or 0, in room [4, 32], for `highest` once all warps have done so."""
    x = gl.max(gl.max(gl.max(x.reshape([_WARPS, 2, 8, N // 8, 4, 2]), axis=5), axis=3), axis=1)  # of each thread
    # Numbers that are not negative are in the order of their bits.
    x = gl.inline_asm_elementwise(
        _LARGEST_OF_WARP, "=f,f", [gl.maximum(x, 0.0)], dtype=gl.float32, is_pure=False, pack=1
    )
    room.store(x.reshape([_WARPS, 32]))


@gluon.jit
def highest(room):
    """The largest that `note_highest` has left."""
    everywhere: gl.constexpr = gl.DistributedLinearLayout([[1, 0], [2, 0]], [[0, 0]] * 5, [[0, 0]] * 2, [], [_WARPS, 1])
    return gl.max(gl.max(room.slice(0, 1, 1).load(everywhere), axis=0), axis=0)
