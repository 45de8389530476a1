# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
"""The splits of decode and verify on Hopper, for formats whose K is 8 bits wide. See `attend_kernels` for what is computed.

Decoding K and V takes more instructions than there is time for while the bytes arrive. So K is not decoded: tensor cores
multiply its codes, straight from shared memory, with queries that are *pairs* of 8-bit numbers, high and low parts, in
twice as many columns. And V is decoded in the registers from which tensor cores read it, so it crosses shared memory once.

    a warp:         queries, and tiles of codes and scales, from memory into a ring of shared memory, as far as that is long
    2 x four warps: scores [64, N] = K Q | weights | out [D, N] += V weights

They meet at barriers, a *full* and an *empty* one for each place in the ring. Tiles have 64 tokens of a page; N is 8, 16 or
32 query rows. The two groups of four take tiles in turn ("ping-pong", as in FlashAttention-3), so that one's tensor cores
work while the other's softmax does. At a split's end the first gives its sums to the second and goes on; the second adds
both up and stores them. (Either may have had the split's first tile: the sum of two numbers does not depend on their order.)

Weights are 2^(score - reference), and a row's reference is not its largest score so far, but one that no score is more
than `_LIMIT` above (conditional rescaling, as in FlashAttention-4). So for most tiles, warps need to tell each other one
number and not the largest score of every row, and what has been added up does not shrink: after a split's first tile,
scores hardly ever rise by as much.

Everything is transposed, as in `attend_kernels`: instructions take 64 tokens, or 64 dims of V, times as many columns as
there are query rows, and do the same to each column however many there are. So rows of decode and of verify are equal to
the last bit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
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
    highest,
    largest_of,
    note_highest,
    over_pairs,
    plan_of,
    queries_layout,
    queries_of,
    tell,
    told,
)
from pocketllm.kernels.triton.gluon_pieces import launch_dependents, wait_for_kernels
from pocketllm.kernels.triton.hopper_rotation import hadamard_of_rows
from pocketllm.kernels.triton.numerics import exp2, inverse, log2

_TILE, _WARPS = gl.constexpr(TILE), gl.constexpr(WARPS)
_COPIERS = gl.constexpr(32)  # threads that copy scales
_LOWEST = gl.constexpr(-1e38)  # the reference before a row's first score
# V's codes times weights of up to 2^4, over a split's number of tokens, are stored as fp16: none is too large in any format.
_LIMIT = gl.constexpr(4.0)


@gluon.jit
def _fetch(
    planes, queries, factors, block_table, max_pages, batch, rings, query_buffers, barriers,
    HK: gl.constexpr, PIECES: gl.constexpr, PAGE: gl.constexpr, SPLITS: gl.constexpr, NP: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """One warp's part: queries and tiles of all this program's pieces of work, in order. Rows past a slot's last token are
    copied too, as far as the tile goes; what they hold changes no sum. queries None: the other warps make them."""
    k_codes, v_codes, k_scales, v_scales = planes
    k_ring, v_ring, k_scale_ring, v_scale_ring = rings
    q_smem, factors_smem, notes = query_buffers
    full, empty, q_full, q_empty = barriers
    PLACES: gl.constexpr = k_ring.shape[0]
    DK: gl.constexpr = k_ring.shape[2]
    DV: gl.constexpr = v_ring.shape[2]
    N: gl.constexpr = factors_smem.shape[1]
    if EARLY > 0 and queries is None:
        wait_for_kernels()
    plan = plan_of(batch, PIECES * HK, SPLITS, NP)
    n = gl.arange(0, _TILE, layout=gl.BlockedLayout([1], [32], [1], [0]))
    m = gl.arange(0, N, layout=gl.BlockedLayout([1], [32], [1], [0]))
    place, parity, buffer, q_parity = 0, 1, 0, 1
    for turn in range(plan[0][0] + plan[0][1] + plan[0][2]):
        piece, seq, split, first, end, slot, kv_len = find(turn, plan, PIECES * HK, SPLITS)
        head = piece % HK
        mbarrier.wait(q_empty.index(buffer), q_parity)
        tell(notes, buffer, piece, seq, split, first, end, kv_len)
        if queries is None:
            mbarrier.arrive(q_full.index(buffer), count=_COPIERS + 1)
        # Queries come before a piece's first tile; but the first of all after some tiles, since the kernel that makes them
        # still runs. (It let this one start once all before it had ended: K and V are there.)
        last = (end - 1 - first) // _TILE
        with_queries = first + _TILE * (gl.minimum(PLACES - 1, last) if turn == 0 else 0)
        table = block_table + slot * max_pages
        page = gl.load(table + first // PAGE)
        for start in range(first, end, _TILE):
            if queries is not None and start == with_queries:
                if EARLY > 0:
                    wait_for_kernels()
                q_ready, block = q_full.index(buffer), (seq * HK + head) * PIECES + piece // HK
                async_copy.async_copy_global_to_shared(factors_smem.index(buffer), factors + block * N + m)
                async_copy.mbarrier_arrive(q_ready, increment_count=False)
                mbarrier.expect(q_ready, 2 * N * DK)
                tma.async_copy_global_to_shared(queries, [block * 2 * N, 0], q_ready, q_smem.index(buffer))
            row = page * PAGE + start % PAGE
            page = gl.load(table + gl.minimum(start + _TILE, end - 1) // PAGE)
            mbarrier.wait(empty.index(place), parity)
            ready = full.index(place)
            mbarrier.expect(ready, _TILE * (DK + DV))
            tma.async_copy_global_to_shared(k_codes, [row, head * DK], ready, k_ring.index(place))
            tma.async_copy_global_to_shared(v_codes, [row, head * DV], ready, v_ring.index(place))
            at = (row + n) * HK + head  # of scales, which lie too far apart for the copy engine
            async_copy.async_copy_global_to_shared(k_scale_ring.index(place), k_scales + at)
            async_copy.async_copy_global_to_shared(v_scale_ring.index(place), v_scales + at)
            async_copy.mbarrier_arrive(ready, increment_count=False)
            place += 1
            if place == PLACES:
                place = 0
                parity ^= 1
        buffer ^= 1
        q_parity ^= 1 - buffer
    if EARLY > 0:  # of programs without work too: who waits for this kernel relies on those before it
        wait_for_kernels()
    mbarrier.wait(q_empty.index(buffer), q_parity)
    tell(notes, buffer, 0, 0, 0, 0, -1, 0)
    mbarrier.arrive(q_full.index(buffer), count=_COPIERS + 1)


@gluon.jit
def _store_pairs(pairs, rows, sign, ROTATED: gl.constexpr, PAIR: gl.constexpr):
    """Queries rows [N, D] become pairs [2 N, D] in shared memory -> factors [N]: `query_pairs_kernel`, bit for bit."""
    N: gl.constexpr = rows.shape[0]
    rows = rows.to(gl.float32)
    if ROTATED:
        rows = hadamard_of_rows(rows * sign)
    high, low, factors = PAIR(rows)
    pairs.slice(0, N).store(high)
    pairs.slice(N, N).store(low)
    return factors


@gluon.jit
def _rise(scores, reference, total, out, live, room):
    """Where a score of a row is more than _LIMIT above its reference, the row's largest takes its place. -> reference, and
    what has been added up, total and out, for that one."""
    N: gl.constexpr = scores.shape[1]
    per_row: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    largest = largest_of(scores, room, N, per_row)
    # The difference, as in what `highest` found: a row that is not above the limit must not rise with one that is.
    risen = gl.where(live & (largest - reference > _LIMIT), largest, reference)
    shrink = gl.where(live, exp2(reference - risen), 1.0)
    of_total = gl.convert_layout(shrink, gl.SliceLayout(0, total.type.layout))
    return risen, total * gl.broadcast(of_total[None, :], total)[0], out * shrink[None, :]


@gluon.jit
def _store_weights(weights_smem, scores, reference, live):
    """-> the weights [64, N] of scores, which tensor cores can read afterwards, once all warps are here."""
    weights = gl.where(live[None, :], exp2(scores - reference[None, :]), 0.0)
    weights_smem.permute((1, 0)).store(weights.to(gl.float16))
    fence_async_shared()
    return weights


@gluon.jit
def _store_both(
    part_out, part_sums, part, exists, values, largest, total, gift, parity,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """Stores the sums of a split: values [D, N], largest [N], total [N] and those that the other group gave."""
    given_values, given_sums, given, taken = gift
    columns: gl.constexpr = gl.SliceLayout(0, values.type.layout)
    largest, total = gl.convert_layout(largest, columns), gl.convert_layout(total, columns)
    mbarrier.wait(given, parity)
    other = given_values.permute((1, 0)).load(values.type.layout)
    other_largest, other_total = given_sums.index(0).load(columns), given_sums.index(1).load(columns)
    gl.thread_barrier()
    mbarrier.arrive(taken, count=1)
    both = gl.maximum(largest, other_largest)
    reference = gl.where(both == float("-inf"), 0.0, both)
    share, other_share = exp2(largest - reference), exp2(other_largest - reference)
    values = (values * share[None, :] + other * other_share[None, :]) * (1 / SPLIT)
    dim = gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, values.type.layout))
    # To be read again soon: K and V, which pass through the L2 once, shall not push it out into memory.
    at = part_out + (part * values.shape[0])[None, :] + dim[:, None]
    gl.store(at, values.to(part_out.dtype.element_ty), mask=exists[None, :], eviction_policy="evict_last")
    gl.store(part_sums + part * 2, both, mask=exists, eviction_policy="evict_last")
    total = total * share + other_total * other_share
    gl.store(part_sums + part * 2 + 1, total, mask=exists, eviction_policy="evict_last")


@gluon.jit
def _attend(
    q, signs, part_out, part_sums, max_splits, scale, rings, query_buffers, rooms, weights_smem, gift, barriers,
    SECOND: gl.constexpr, Q: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr, SPLITS: gl.constexpr, D: gl.constexpr,
    N: gl.constexpr, CHUNK: gl.constexpr, PAIR: gl.constexpr, JOIN: gl.constexpr, LOAD_V: gl.constexpr,
    IN_ORDER: gl.constexpr, V_FACTOR: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A group's part, of four warps: all but the copying. q not None: they make pairs of their queries, too.

    SECOND: 0 for the group that gives its sums away, 1 for the one that stores both's. Of 24 query rows, 32 columns are
    multiplied; in the last 8, the compiler finds constants, and leaves the rest out.
    """
    GROUP: gl.constexpr = HQ // HK
    LIVE: gl.constexpr = min(N, (GROUP * Q + 7) // 8 * 8)
    k_ring, v_ring, k_scale_ring, v_scale_ring = rings
    q_smem, factors_smem, notes = query_buffers
    full, empty, q_full, q_empty = barriers
    room, highest_room = rooms
    PLACES: gl.constexpr = k_ring.shape[0]
    SUM: gl.constexpr = gl.int32 if k_ring.dtype == gl.int8 else gl.float32
    pairs_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, 2 * N, 32])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, N, 16])  # of scores and out
    v_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    per_row: gl.constexpr = gl.SliceLayout(0, layout)
    per_token: gl.constexpr = gl.SliceLayout(1, layout)
    n, m = gl.arange(0, _TILE, layout=per_token), gl.arange(0, N, layout=per_row)
    live = m < LIVE
    nothing = gl.zeros([_TILE, 2 * N], SUM, pairs_layout)
    place, parity, buffer, q_parity, half, gift_parity = SECOND, 0, 0, 0, 0, 0
    tiles = 0  # of the pieces before, modulo 2
    # Groups that make their queries have two buffers each.
    EACH: gl.constexpr = 1 if q is None else 2
    OWN: gl.constexpr = 0 if q is None else SECOND
    mbarrier.wait(q_full.index(0), 0)
    piece, seq, split, first, end, kv_len = told(notes, 0)
    raw, sign = 0, 0
    if q is not None:
        if signs is not None:
            sign = gl.load(signs + gl.arange(0, D, layout=gl.SliceLayout(0, queries_layout(D))))[None, :]
        if EARLY > 0:
            wait_for_kernels()
        raw = queries_of(q, piece, seq, end >= 0, Q, HQ, HK, D, N)
    while end >= 0:
        q_place = EACH * buffer + OWN
        if q is not None:
            factors_smem.index(q_place).store(_store_pairs(q_smem.index(q_place), raw, sign, signs is not None, PAIR))
            fence_async_shared()
            gl.thread_barrier()
        queries = q_smem.index(q_place).permute((1, 0))
        head, row = piece % HK, piece // HK * N + m
        # Where there is no query, numbers that stood there before would be taken for scores that rise.
        factor = gl.where(row < GROUP * Q, factors_smem.index(q_place).load(per_row) * scale, 0.0)
        position = kv_len - Q + row // GROUP
        reference = gl.full([N], _LOWEST, gl.float32, per_row)
        total = over_pairs(gl.zeros([_TILE, N], gl.float32, layout), N)  # of weights; added up at the end
        out = gl.zeros([D, N], gl.float32, layout)
        for start in range(first + _TILE * ((SECOND + tiles) % 2), end, 2 * _TILE):
            mbarrier.wait(full.index(place), parity)
            product = warpgroup_mma(k_ring.index(place), queries, nothing, use_acc=False, is_async=True)
            v = LOAD_V(v_ring.index(place), 0, CHUNK, v_layout)
            k_scale = k_scale_ring.index(place).load(per_token)
            v_scale = v_scale_ring.index(place).load(per_token) * V_FACTOR
            product = warpgroup_mma_wait(0, deps=[product])
            high, low = product.reshape([_TILE, 2, N]).permute((0, 2, 1)).split()
            scores = gl.convert_layout(JOIN(high, low), layout) * factor[None, :]
            # V's scale is part of the score, and the sum takes it out again: see `softmax.softmax_step`.
            k_scales = gl.broadcast(k_scale[:, None], scores)[0]
            scores = gl.fma(scores, k_scales, gl.broadcast(log2(v_scale)[:, None], scores)[0])
            if start + _TILE > kv_len - Q + 1:  # not all rows see all of it
                scores = gl.where((start + n)[:, None] <= position[None, :], scores, float("-inf"))
            note_highest(gl.where(live[None, :], scores - reference[None, :], 0.0), highest_room.index(half), N)
            weights = _store_weights(weights_smem, scores, reference, live)
            gl.thread_barrier()
            if highest(highest_room.index(half)) > _LIMIT:
                reference, total, out = _rise(scores, reference, total, out, live, room.index(half))
                weights = _store_weights(weights_smem, scores, reference, live)
                gl.thread_barrier()
            half ^= 1
            of_scale = gl.where(start + n < kv_len, inverse(v_scale), 0.0)  # past the last token there may be no number
            total = total + over_pairs(weights * of_scale[:, None], N)
            for chunk in gl.static_range(_TILE // CHUNK):
                tile = weights_smem.slice(chunk * CHUNK, CHUNK, 1).permute((1, 0))
                out = warpgroup_mma(v, tile, out, is_async=True)
                if chunk + 1 < _TILE // CHUNK:
                    v = LOAD_V(v_ring.index(place), (chunk + 1) * CHUNK, CHUNK, v_layout)
            if CHUNK < _TILE:
                gl.thread_barrier()
            mbarrier.arrive(empty.index(place), count=1)
            out = warpgroup_mma_wait(0, deps=[out])
            place += 2
            if place >= PLACES:
                place -= PLACES
                parity ^= 1
        gl.thread_barrier()  # all have read the note and the factors, of a piece without a tile for this group, too
        mbarrier.arrive(q_empty.index(buffer), count=1)
        tiles = (tiles + (end - first + _TILE - 1) // _TILE) % 2
        values, largest = IN_ORDER(out), gl.where(reference == _LOWEST, float("-inf"), reference)
        total_of_row = gl.convert_layout(gl.sum(total, axis=0), per_row)
        if SECOND == 0:
            given_values, given_sums, given, taken = gift
            mbarrier.wait(taken, gift_parity ^ 1)
            given_values.permute((1, 0)).store(values)
            given_sums.index(0).store(largest)
            given_sums.index(1).store(total_of_row)
            gl.thread_barrier()
            mbarrier.arrive(given, count=1)
        row = piece // HK * N + gl.arange(0, N, layout=gl.SliceLayout(0, values.type.layout))
        out_row = (seq * Q + row // GROUP) * HQ + head * GROUP + row % GROUP
        part, exists = out_row.to(gl.int64) * max_splits + split, row < GROUP * Q
        buffer ^= 1
        q_parity ^= 1 - buffer
        mbarrier.wait(q_full.index(buffer), q_parity)
        piece, seq, split, first, end, kv_len = told(notes, buffer)
        # Not before: the next kernel's programs would find room on those few multiprocessors only that are done first.
        if SECOND == 1 and EARLY > 0 and end < 0:
            launch_dependents()
        if q is not None:  # the next ones are on their way while this piece's results are stored
            raw = queries_of(q, piece, seq, end >= 0, Q, HQ, HK, D, N)
        if SECOND == 1:
            _store_both(part_out, part_sums, part, exists, values, largest, total_of_row, gift, gift_parity, SPLITS[2])
        gift_parity ^= 1


@gluon.jit
def _room(WARPS: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """Of two times [WARPS, N], for what warps tell each other: not that of the call before."""
    return gl.allocate_shared_memory(gl.float32, [2, WARPS, N], layout)


@gluon.jit(
    do_not_specialize=["max_pages", "num_seqs", "max_splits"], do_not_specialize_on_alignment=["slot_ids", "kv_lens"]
)
def hopper_split_kernel(
    k_codes, v_codes, k_scales, v_scales, q, signs, queries, factors, block_table, max_pages, slot_ids, kv_lens, num_seqs,
    part_out, part_sums, max_splits, scale,
    Q: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, SPLITS: gl.constexpr,
    N: gl.constexpr, NP: gl.constexpr, PLACES: gl.constexpr, CHUNK: gl.constexpr, EARLY: gl.constexpr,
    PAIR: gl.constexpr, JOIN: gl.constexpr, LOAD_V: gl.constexpr, IN_ORDER: gl.constexpr, V_FACTOR: gl.constexpr,
):  # fmt: skip
    """As `attend_kernels.split_kernel`, with N query rows in a piece of work.

    k_codes, v_codes: descriptors of planes [rows, HK * width] in blocks of [64, width]; k_scales, v_scales [rows, HK].
    queries: a descriptor of `query_pairs_kernel`'s codes in blocks of [2 N, D], and factors; or None, and q [n, Q, HQ, D] as
    it is, and signs [D]. PLACES: of the ring, an even number: each has one group's tiles only. CHUNK: tokens whose V is
    decoded at a time: registers. The last five: see `HopperPieces`.
    """
    PIECES: gl.constexpr = (HQ // HK * Q + N - 1) // N
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_ring = gl.allocate_shared_memory(k_codes.dtype, [PLACES, _TILE, D], k_codes.layout)
    v_ring = gl.allocate_shared_memory(v_codes.dtype, [PLACES, _TILE, v_codes.block_shape[1]], v_codes.layout)
    k_scale_ring = gl.allocate_shared_memory(gl.float32, [PLACES, _TILE], line)
    v_scale_ring = gl.allocate_shared_memory(gl.float32, [PLACES, _TILE], line)
    BUFFERS: gl.constexpr = 2 if q is None else 4
    q_smem = gl.allocate_shared_memory(k_codes.dtype, [BUFFERS, 2 * N, D], k_codes.layout)
    factors_smem = gl.allocate_shared_memory(gl.float32, [BUFFERS, N], line)
    notes = gl.allocate_shared_memory(gl.int32, [2, 8], line)
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(PLACES):
        mbarrier.init(full.index(s), count=_COPIERS + 1)  # the copy engine's bytes are expected by one more
        mbarrier.init(empty.index(s), count=1)
    for s in gl.static_range(2):
        mbarrier.init(q_full.index(s), count=_COPIERS + 1)
        mbarrier.init(q_empty.index(s), count=2)
    given = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(given, count=1)
    mbarrier.init(taken, count=1)
    given_values = gl.allocate_shared_memory(gl.float32, [N, D], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    gift = (given_values, gl.allocate_shared_memory(gl.float32, [2, N], line), given, taken)
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    first_rooms = (_room(_WARPS, N, rows), _room(_WARPS, 32, rows))
    second_rooms = (_room(_WARPS, N, rows), _room(_WARPS, 32, rows))
    weights: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    first_weights = gl.allocate_shared_memory(gl.float16, [N, _TILE], weights)
    second_weights = gl.allocate_shared_memory(gl.float16, [N, _TILE], weights)
    fence_async_shared()
    batch, rings = (slot_ids, kv_lens, num_seqs), (k_ring, v_ring, k_scale_ring, v_scale_ring)
    query_buffers, barriers = (q_smem, factors_smem, notes), (full, empty, q_full, q_empty)
    gl.warp_specialize([
        (_attend, (q, signs, part_out, part_sums, max_splits, scale, rings, query_buffers, first_rooms, first_weights,
                   gift, barriers, 0, Q, HQ, HK, SPLITS, D, N, CHUNK, PAIR, JOIN, LOAD_V, IN_ORDER, V_FACTOR, EARLY)),
        (_attend, (q, signs, part_out, part_sums, max_splits, scale, rings, query_buffers, second_rooms, second_weights,
                   gift, barriers, 1, Q, HQ, HK, SPLITS, D, N, CHUNK, PAIR, JOIN, LOAD_V, IN_ORDER, V_FACTOR, EARLY)),
        (_fetch, ((k_codes, v_codes, k_scales, v_scales), queries, factors, block_table, max_pages, batch, rings,
                  query_buffers, barriers, HK, PIECES, PAGE, SPLITS, NP, EARLY)),
    ], [4, 1], [232, 32])  # fmt: skip
    if EARLY > 0:  # of programs without work
        launch_dependents()
