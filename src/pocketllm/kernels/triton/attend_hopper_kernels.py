# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment"
"""The splits of decode and verify on Hopper, for formats whose K is 8 bits wide. See `attend_kernels` for what is computed.

Decoding K and V takes more instructions than there is time for while the bytes arrive. So K is not decoded: tensor cores
multiply its codes, straight from shared memory, with queries that are *pairs* of 8-bit numbers, high and low parts, in
twice as many columns. And V is decoded in the registers from which tensor cores read it, so it crosses shared memory once.

    a warp:      queries, and tiles of codes and scales, from memory into a ring of shared memory, as far ahead as it is long
    four warps:  scores [64, N] = K Q, their largest | weights | out [D, N] += V weights

The two meet at barriers, a *full* and an *empty* one for each place in the ring. Tiles have 64 tokens of a page; N is 8, 16
or 32 query rows. Everything is transposed, as in `attend_kernels`: instructions take 64 tokens, or 64 dims of V, times as
many columns as there are query rows, and do the same to each column however many there are. So rows of decode and of
verify are equal to the last bit.
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
    largest_of,
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


@gluon.jit
def _fetch(
    planes, queries, factors, block_table, max_pages, batch, rings, query_buffers, full, empty, q_full, q_empty,
    HK: gl.constexpr, PIECES: gl.constexpr, PAGE: gl.constexpr, SPLITS: gl.constexpr, NP: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """One warp's part: queries and tiles of all this program's pieces of work, in order. Rows past a slot's last token are
    copied too, as far as the tile goes; what they hold changes no sum. queries None: the other warps make them."""
    k_codes, v_codes, k_scales, v_scales = planes
    k_ring, v_ring, k_scale_ring, v_scale_ring = rings
    q_smem, factors_smem, notes = query_buffers
    STAGES: gl.constexpr = k_ring.shape[0]
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
        with_queries = first + _TILE * (gl.minimum(STAGES - 1, last) if turn == 0 else 0)
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
            if place == STAGES:
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
def _attend(
    q, signs, part_out, part_sums, max_splits, scale, rings, query_buffers, room, weights_smem, full, empty, q_full, q_empty,
    Q: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr, SPLITS: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
    CHUNK: gl.constexpr, PAIR: gl.constexpr, JOIN: gl.constexpr, LOAD_V: gl.constexpr, IN_ORDER: gl.constexpr,
    V_FACTOR: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Four warps' part: all but the copying. q not None: they make pairs of their queries, too.

    Of 24 query rows, 32 columns are multiplied; in the last 8, the compiler finds constants, and leaves the rest out.
    """
    GROUP: gl.constexpr = HQ // HK
    LIVE: gl.constexpr = min(N, (GROUP * Q + 7) // 8 * 8)
    k_ring, v_ring, k_scale_ring, v_scale_ring = rings
    q_smem, factors_smem, notes = query_buffers
    STAGES: gl.constexpr = k_ring.shape[0]
    SUM: gl.constexpr = gl.int32 if k_ring.dtype == gl.int8 else gl.float32
    pairs_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, 2 * N, 32])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, N, 16])  # of scores and out
    v_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    per_row: gl.constexpr = gl.SliceLayout(0, layout)
    per_token: gl.constexpr = gl.SliceLayout(1, layout)
    n, m = gl.arange(0, _TILE, layout=per_token), gl.arange(0, N, layout=per_row)
    live = m < LIVE
    nothing = gl.zeros([_TILE, 2 * N], SUM, pairs_layout)
    place, parity, buffer, q_parity, half = 0, 0, 0, 0, 0
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
        if q is not None:
            factors_smem.index(buffer).store(_store_pairs(q_smem.index(buffer), raw, sign, signs is not None, PAIR))
            fence_async_shared()
            gl.thread_barrier()
        queries = q_smem.index(buffer).permute((1, 0))
        factor = factors_smem.index(buffer).load(per_row) * scale
        head, row = piece % HK, piece // HK * N + m
        position = kv_len - Q + row // GROUP
        largest = gl.full([N], float("-inf"), gl.float32, per_row)
        total = over_pairs(gl.zeros([_TILE, N], gl.float32, layout), N)  # of weights; added up at the end
        out = gl.zeros([D, N], gl.float32, layout)
        for start in range(first, end, _TILE):
            mbarrier.wait(full.index(place), parity)
            product = warpgroup_mma(k_ring.index(place), queries, nothing, use_acc=False, is_async=True)
            v = LOAD_V(v_ring.index(place), 0, CHUNK, v_layout)
            k_scale = k_scale_ring.index(place).load(per_token)
            v_scale = v_scale_ring.index(place).load(per_token) * V_FACTOR
            # A new basic block: else the compiler would put off decoding V until tensor cores have nothing to do.
            mbarrier.wait(full.index(place), parity)
            product = warpgroup_mma_wait(0, deps=[product])
            high, low = product.reshape([_TILE, 2, N]).permute((0, 2, 1)).split()
            scores = gl.convert_layout(JOIN(high, low), layout) * factor[None, :]
            # V's scale is part of the score, and the sum takes it out again: see `softmax.softmax_step`.
            k_scales = gl.broadcast(k_scale[:, None], scores)[0]
            scores = gl.fma(scores, k_scales, gl.broadcast(log2(v_scale)[:, None], scores)[0])
            scores = gl.where(((start + n)[:, None] <= position[None, :]) & live[None, :], scores, float("-inf"))
            new_largest = gl.maximum(largest, largest_of(scores, room.index(half), N, per_row))
            new_largest = gl.where(live, new_largest, float("-inf"))
            half ^= 1
            reference = gl.where(new_largest == float("-inf"), 0.0, new_largest)
            weights, shrink = exp2(scores - reference[None, :]), exp2(largest - reference)
            weights, shrink = gl.where(live[None, :], weights, 0.0), gl.where(live, shrink, 1.0)
            largest = new_largest
            of_scale = gl.where(start + n < kv_len, inverse(v_scale), 0.0)  # past the last token there may be no number
            shrink_total = gl.convert_layout(shrink, gl.SliceLayout(0, total.type.layout))
            added = over_pairs(weights * of_scale[:, None], N)
            total = gl.fma(total, gl.broadcast(shrink_total[None, :], total)[0], added)
            weights_smem.permute((1, 0)).store(weights.to(gl.float16))
            fence_async_shared()
            gl.thread_barrier()
            out = out * shrink[None, :]
            for chunk in gl.static_range(_TILE // CHUNK):
                tile = weights_smem.slice(chunk * CHUNK, CHUNK, 1).permute((1, 0))
                out = warpgroup_mma(v, tile, out, is_async=True)
                if chunk + 1 < _TILE // CHUNK:
                    v = LOAD_V(v_ring.index(place), (chunk + 1) * CHUNK, CHUNK, v_layout)
            if CHUNK < _TILE:
                gl.thread_barrier()
            mbarrier.arrive(empty.index(place), count=1)
            out = warpgroup_mma_wait(0, deps=[out])
            place += 1
            if place == STAGES:
                place = 0
                parity ^= 1
        mbarrier.arrive(q_empty.index(buffer), count=1)
        out_row = (seq * Q + row // GROUP) * HQ + head * GROUP + row % GROUP
        part, exists = out_row.to(gl.int64) * max_splits + split, row < GROUP * Q
        buffer ^= 1
        q_parity ^= 1 - buffer
        mbarrier.wait(q_full.index(buffer), q_parity)
        piece, seq, split, first, end, kv_len = told(notes, buffer)
        # Not before: the next kernel's programs would find room on those few multiprocessors only that are done first.
        if EARLY > 0 and end < 0:
            launch_dependents()
        if q is not None:  # the next ones are on their way while this piece's results are stored
            raw = queries_of(q, piece, seq, end >= 0, Q, HQ, HK, D, N)
        values = IN_ORDER((out * (1 / SPLITS[2])).to(part_out.dtype.element_ty))
        at_layout: gl.constexpr = values.type.layout
        dim = gl.arange(0, D, layout=gl.SliceLayout(1, at_layout))
        at = gl.convert_layout(part * D, gl.SliceLayout(0, at_layout))
        at_exists = gl.convert_layout(exists, gl.SliceLayout(0, at_layout))
        # To be read again soon: K and V, which pass through the L2 once, shall not push it out into memory.
        gl.store(part_out + at[None, :] + dim[:, None], values, mask=at_exists[None, :], eviction_policy="evict_last")
        gl.store(part_sums + part * 2, largest, mask=exists, eviction_policy="evict_last")
        total = gl.convert_layout(gl.sum(total, axis=0), per_row)
        gl.store(part_sums + part * 2 + 1, total, mask=exists, eviction_policy="evict_last")


@gluon.jit(
    do_not_specialize=["max_pages", "num_seqs", "max_splits"], do_not_specialize_on_alignment=["slot_ids", "kv_lens"]
)
def hopper_split_kernel(
    k_codes, v_codes, k_scales, v_scales, q, signs, queries, factors, block_table, max_pages, slot_ids, kv_lens, num_seqs,
    part_out, part_sums, max_splits, scale,
    Q: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, SPLITS: gl.constexpr,
    N: gl.constexpr, NP: gl.constexpr, STAGES: gl.constexpr, CHUNK: gl.constexpr, EARLY: gl.constexpr,
    PAIR: gl.constexpr, JOIN: gl.constexpr, LOAD_V: gl.constexpr, IN_ORDER: gl.constexpr, V_FACTOR: gl.constexpr,
):  # fmt: skip
    """As `attend_kernels.split_kernel`, with N query rows in a piece of work.

    k_codes, v_codes: descriptors of planes [rows, HK * width] in blocks of [64, width]; k_scales, v_scales [rows, HK].
    queries: a descriptor of `query_pairs_kernel`'s codes in blocks of [2 N, D], and factors; or None, and q [n, Q, HQ, D] as
    it is, and signs [D]. STAGES: places in the ring. CHUNK: tokens whose V is decoded at a time: registers. The last five:
    see `HopperPieces`.
    """
    PIECES: gl.constexpr = (HQ // HK * Q + N - 1) // N
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_ring = gl.allocate_shared_memory(k_codes.dtype, [STAGES, _TILE, D], k_codes.layout)
    v_ring = gl.allocate_shared_memory(v_codes.dtype, [STAGES, _TILE, v_codes.block_shape[1]], v_codes.layout)
    k_scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, _TILE], line)
    v_scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, _TILE], line)
    q_smem = gl.allocate_shared_memory(k_codes.dtype, [2, 2 * N, D], k_codes.layout)
    factors_smem = gl.allocate_shared_memory(gl.float32, [2, N], line)
    notes = gl.allocate_shared_memory(gl.int32, [2, 8], line)
    room = gl.allocate_shared_memory(gl.float32, [2, _WARPS, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    weights_smem = gl.allocate_shared_memory(gl.float16, [N, _TILE], gl.NVMMASharedLayout(128, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=_COPIERS + 1)  # the copy engine's bytes are expected by one more
        mbarrier.init(empty.index(s), count=1)
    for s in gl.static_range(2):
        mbarrier.init(q_full.index(s), count=_COPIERS + 1)
        mbarrier.init(q_empty.index(s), count=1)
    fence_async_shared()
    batch, rings = (slot_ids, kv_lens, num_seqs), (k_ring, v_ring, k_scale_ring, v_scale_ring)
    query_buffers = (q_smem, factors_smem, notes)
    gl.warp_specialize([
        (_attend, (q, signs, part_out, part_sums, max_splits, scale, rings, query_buffers, room, weights_smem, full, empty,
                   q_full, q_empty, Q, HQ, HK, SPLITS, D, N, CHUNK, PAIR, JOIN, LOAD_V, IN_ORDER, V_FACTOR, EARLY)),
        (_fetch, ((k_codes, v_codes, k_scales, v_scales), queries, factors, block_table, max_pages, batch, rings,
                  query_buffers, full, empty, q_full, q_empty, HK, PIECES, PAGE, SPLITS, NP, EARLY)),
    ], [1], [32])  # fmt: skip
    if EARLY > 0:  # of programs without work
        launch_dependents()
