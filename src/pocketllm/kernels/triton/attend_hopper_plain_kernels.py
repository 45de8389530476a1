# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
"""The splits of decode and verify on Hopper, for K and V stored in 16 bits. See `attend_kernels` for what is computed.

Tensor cores read K and V where the copy engine puts them, so four warps have little to do, and one program of a
multiprocessor is enough. What counts is that memory is never idle: all the shared memory that is left is one ring, with K
and V of a tile in places of their own, and the copies of the next piece of work follow those of this one.

    a warp:      tiles of K and V from memory into the ring, as far ahead as it is long
    four warps:  scores [64, N] = K Q, their largest | weights | out [D, N] += V weights

Each place has a barrier that says *full* and one that says *empty*. As in `attend_hopper_kernels`, everything is transposed,
and each column has the same done to it however many there are: rows of decode and of verify are equal to the last bit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pocketllm.kernels.triton.attend_hopper import TILE
from pocketllm.kernels.triton.attend_hopper_work import (
    WARPS,
    find,
    largest_of,
    over_pairs,
    plan_of,
    queries_layout,
    queries_of,
    tell,
    told,
)
from pocketllm.kernels.triton.gluon_pieces import launch_dependents, wait_for_kernels
from pocketllm.kernels.triton.numerics import exp2

_TILE, _WARPS = gl.constexpr(TILE), gl.constexpr(WARPS)
_ROWS_AT_ONCE = gl.constexpr(16)  # of V, when some of a tile are cleared: registers


@gluon.jit
def _next(place, parity, PLACES: gl.constexpr):
    """The place after this one, and the parity of its barriers' phase."""
    place += 1
    if place == PLACES:
        place = 0
        parity ^= 1
    return place, parity


@gluon.jit
def _fetch(
    k, v, block_table, max_pages, batch, ring, notes, full, empty, note_full, note_empty,
    HK: gl.constexpr, PIECES: gl.constexpr, PAGE: gl.constexpr, SPLITS: gl.constexpr, NP: gl.constexpr,
):  # fmt: skip
    """One warp's part: tiles of all this program's pieces of work, in order. Rows past a slot's last token are copied too,
    as far as the tile goes."""
    PLACES: gl.constexpr = ring.shape[0]
    D: gl.constexpr = ring.shape[2]
    NBYTES: gl.constexpr = _TILE * D * 2
    plan = plan_of(batch, PIECES * HK, SPLITS, NP)
    place, parity, buffer, note_parity = 0, 1, 0, 1
    for turn in range(plan[0][0] + plan[0][1] + plan[0][2]):
        piece, seq, split, first, end, slot, kv_len = find(turn, plan, PIECES * HK, SPLITS)
        mbarrier.wait(note_empty.index(buffer), note_parity)
        tell(notes, buffer, piece, seq, split, first, end, kv_len)
        mbarrier.arrive(note_full.index(buffer), count=1)
        buffer ^= 1
        note_parity ^= 1 - buffer
        table, column = block_table + slot * max_pages, piece % HK * D
        page = gl.load(table + first // PAGE)
        for start in range(first, end, _TILE):
            row = page * PAGE + start % PAGE
            page = gl.load(table + gl.minimum(start + _TILE, end - 1) // PAGE)
            mbarrier.wait(empty.index(place), parity)
            mbarrier.expect(full.index(place), NBYTES)
            tma.async_copy_global_to_shared(k, [row, column], full.index(place), ring.index(place))
            place, parity = _next(place, parity, PLACES)
            mbarrier.wait(empty.index(place), parity)
            mbarrier.expect(full.index(place), NBYTES)
            tma.async_copy_global_to_shared(v, [row, column], full.index(place), ring.index(place))
            place, parity = _next(place, parity, PLACES)
    mbarrier.wait(note_empty.index(buffer), note_parity)
    tell(notes, buffer, 0, 0, 0, 0, -1, 0)
    mbarrier.arrive(note_full.index(buffer), count=1)


@gluon.jit
def _clear(tile, first):
    """Zeros in rows `first` and later of tile [64, D]: what memory holds past a slot's last token may be no number."""
    ROWS: gl.constexpr = _ROWS_AT_ONCE
    D: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = queries_layout(D)
    n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    for i in gl.static_range(_TILE // ROWS):
        rows = tile.slice(i * ROWS, ROWS)
        values = rows.load(layout)
        rows.store(gl.where((i * ROWS + n < first)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _attend(
    q, part_out, part_sums, max_splits, scale, ring, notes, q_smem, room, weights_smem, full, empty, note_full, note_empty,
    Q: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr, SPLITS: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Four warps' part: all but the copying."""
    GROUP: gl.constexpr = HQ // HK
    PLACES: gl.constexpr = ring.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, N, 16])  # of scores and out
    per_row: gl.constexpr = gl.SliceLayout(0, layout)
    n, m = gl.arange(0, _TILE, layout=gl.SliceLayout(1, layout)), gl.arange(0, N, layout=per_row)
    dim = gl.arange(0, D, layout=gl.SliceLayout(1, layout))
    nothing = gl.zeros([_TILE, N], gl.float32, layout)
    queries_t, weights_t = q_smem.permute((1, 0)), weights_smem.permute((1, 0))
    place, parity, buffer, note_parity, half = 0, 0, 0, 0, 0
    mbarrier.wait(note_full.index(0), 0)
    piece, seq, split, first, end, kv_len = told(notes, 0)
    queries = queries_of(q, piece, seq, end >= 0, Q, HQ, HK, D, N).to(ring.dtype)
    while end >= 0:
        q_smem.store(queries)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(note_empty.index(buffer), count=1)
        row = piece // HK * N + m
        position = kv_len - Q + row // GROUP
        largest = gl.full([N], float("-inf"), gl.float32, per_row)
        total = over_pairs(gl.zeros([_TILE, N], gl.float32, layout), N)  # of weights; added up at the end
        out = gl.zeros([D, N], gl.float32, layout)
        for start in range(first, end, _TILE):
            k_place = place
            mbarrier.wait(full.index(k_place), parity)
            scores = warpgroup_mma(ring.index(k_place), queries_t, nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores]) * scale
            scores = gl.where((start + n)[:, None] <= position[None, :], scores, float("-inf"))
            new_largest = gl.maximum(largest, largest_of(scores, room.index(half), N, per_row))
            half ^= 1
            reference = gl.where(new_largest == float("-inf"), 0.0, new_largest)
            weights, shrink = exp2(scores - reference[None, :]), exp2(largest - reference)
            largest = new_largest
            shrink_total = gl.convert_layout(shrink, gl.SliceLayout(0, total.type.layout))
            total = gl.fma(total, gl.broadcast(shrink_total[None, :], total)[0], over_pairs(weights, N))
            weights_t.store(weights.to(ring.dtype))
            place, parity = _next(place, parity, PLACES)
            mbarrier.wait(full.index(place), parity)
            v = ring.index(place)
            if start + _TILE > kv_len:
                _clear(v, kv_len - start)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(empty.index(k_place), count=1)
            out = out * shrink[None, :]
            out = warpgroup_mma(v.permute((1, 0)), weights_t, out, is_async=True)
            out = warpgroup_mma_wait(0, deps=[out])
            gl.thread_barrier()
            mbarrier.arrive(empty.index(place), count=1)
            place, parity = _next(place, parity, PLACES)
        part = ((seq * Q + row // GROUP) * HQ + piece % HK * GROUP + row % GROUP).to(gl.int64) * max_splits + split
        exists = row < GROUP * Q
        buffer ^= 1
        note_parity ^= 1 - buffer
        mbarrier.wait(note_full.index(buffer), note_parity)
        piece, seq, split, first, end, kv_len = told(notes, buffer)
        # The next queries are on their way while this piece's results are stored.
        queries = queries_of(q, piece, seq, end >= 0, Q, HQ, HK, D, N).to(ring.dtype)
        values = (out * (1 / SPLITS[2])).to(part_out.dtype.element_ty)
        # See `attend_hopper_kernels`.
        gl.store(
            part_out + (part * D)[None, :] + dim[:, None], values, mask=exists[None, :], eviction_policy="evict_last"
        )
        gl.store(part_sums + part * 2, largest, mask=exists, eviction_policy="evict_last")
        total = gl.convert_layout(gl.sum(total, axis=0), per_row)
        gl.store(part_sums + part * 2 + 1, total, mask=exists, eviction_policy="evict_last")


@gluon.jit(
    do_not_specialize=["max_pages", "num_seqs", "max_splits"], do_not_specialize_on_alignment=["slot_ids", "kv_lens"]
)
def hopper_plain_split_kernel(
    q, k, v, block_table, max_pages, slot_ids, kv_lens, num_seqs, part_out, part_sums, max_splits, scale,
    Q: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, SPLITS: gl.constexpr,
    N: gl.constexpr, NP: gl.constexpr, PLACES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """As `attend_kernels.split_kernel`, with N query rows in a piece of work.

    k, v: descriptors of planes [rows, HK * D] in blocks of [64, D]. PLACES: of the ring, each for one of those.
    """
    PIECES: gl.constexpr = (HQ // HK * Q + N - 1) // N
    ring = gl.allocate_shared_memory(k.dtype, [PLACES, _TILE, D], k.layout)
    q_smem = gl.allocate_shared_memory(k.dtype, [N, D], gl.NVMMASharedLayout(128, 16, 2))
    weights_smem = gl.allocate_shared_memory(k.dtype, [N, _TILE], gl.NVMMASharedLayout(128, 16, 2))
    room = gl.allocate_shared_memory(gl.float32, [2, _WARPS, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    notes = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    note_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    note_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(note_full.index(i), count=1)
        mbarrier.init(note_empty.index(i), count=1)
    fence_async_shared()
    if EARLY > 0:
        wait_for_kernels()
        launch_dependents()  # a multiprocessor has room for programs of the next kernel: they wait beside this one's
    batch = (slot_ids, kv_lens, num_seqs)
    gl.warp_specialize([
        (_attend, (q, part_out, part_sums, max_splits, scale, ring, notes, q_smem, room, weights_smem, full, empty,
                   note_full, note_empty, Q, HQ, HK, SPLITS, D, N)),
        (_fetch, (k, v, block_table, max_pages, batch, ring, notes, full, empty, note_full, note_empty,
                  HK, PIECES, PAGE, SPLITS, NP)),
    ], [1], [32])  # fmt: skip
