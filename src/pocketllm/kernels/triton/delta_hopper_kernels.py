# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, assignment, var-annotated"
# ruff: noqa: RUF005  (Triton knows no starred tuples)
"""Gated DeltaNet token by token on Hopper, for heads of 128 x 128. See `gated_delta_kernels` for what is computed.

Nearly all the time goes into reading states and writing them back. With a program to each head, as there, all programs of a
few slots run at once: all read, then all compute, then all write. Here a program stays on its multiprocessor and takes a
few heads, one after the other, and the three happen at the same time:

    a warp:      states, from memory into a ring of shared memory, as far ahead as it is long, and back
    four warps:  what else a token needs: q, k, v (the convolution is theirs, too), gate, decay and beta
    four warps:  the delta rule, a state being in their registers; the gated norm; outputs

Those that bring a token's vectors wait several times for an item: for its tails and inputs, then for a counter. So there may
be two such groups, *bringers*, that take items in turn, each with a ring of its own.

All meet at barriers, a *full* and an *empty* one for each place of the rings. An item is a head of a sequence; which ones a
program takes changes no result: each is computed by itself, and in one way. Programs take them in turn, so that all of them
together go through the states in order: what memory is asked for at any time lies close together, which is fastest.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from pocketllm.kernels.triton.delta_hopper import DIM, TAPS
from pocketllm.kernels.triton.gated_delta_kernels import softplus, sum_of_parts
from pocketllm.kernels.triton.gluon_pieces import is_last, launch_dependents, powers, wait_for_kernels
from pocketllm.kernels.triton.pairs import round_e4m3, scale_of

PLACES = 4  # tokens whose vectors a bringer keeps ahead
BRINGER_WARPS = 4
_DIM, _TAPS = gl.constexpr(DIM), gl.constexpr(TAPS)
_PLACES, _BRINGER_WARPS = gl.constexpr(PLACES), gl.constexpr(BRINGER_WARPS)
_Q, _K, _V, _GATE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)  # of a token's vectors


@gluon.constexpr_function
def _by_columns(rows, warps):
    """Of [rows, DIM]: a thread has 4 columns of all rows, whichever warp it is in."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2]] + [[i, 0] for i in powers(1, rows)], [[0, i] for i in powers(4, DIM)],
        [[0, 0]] * len(powers(1, warps)), [], [rows, DIM],
    )  # fmt: skip


@gluon.constexpr_function
def _by_rows(warps):
    """Of [2, DIM], numbers for the rows of a state: a warp has those of its rows, all of them in each thread."""
    rows = DIM // warps
    return gl.DistributedLinearLayout(
        [[0, i] for i in powers(1, rows)] + [[1, 0]], [[0, 0]] * 5, [[0, i] for i in powers(rows, DIM)], [], [2, DIM]
    )


@gluon.jit
def _load_vectors(vectors, WARPS: gl.constexpr, layout: gl.constexpr):
    """vectors [4, DIM] in shared memory -> q and k [WARPS, DIM / WARPS, 1], v and gate [DIM], as they meet a state."""
    column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    rows = vectors.slice(_Q, 2).load(_by_rows(WARPS)).reshape([2, WARPS, _DIM // WARPS])
    q, k = rows.permute((1, 2, 0)).split()
    v, gate = vectors.slice(_V, 2).load(_by_columns(2, WARPS)).permute((1, 0)).split()
    q = gl.convert_layout(q, gl.SliceLayout(2, layout), assert_trivial=True)[:, :, None]
    k = gl.convert_layout(k, gl.SliceLayout(2, layout), assert_trivial=True)[:, :, None]
    v = gl.convert_layout(v, column, assert_trivial=True)
    return q, k, v, gl.convert_layout(gate, column, assert_trivial=True)


@gluon.jit
def _item(t):
    """The t-th one of this program."""
    return gl.program_id(0) + t * gl.num_programs(0)


@gluon.jit
def _state_row(t, slot_ids, HV: gl.constexpr, WARPS: gl.constexpr):
    """Where the state of the t-th item begins, in the rows [S * HV * WARPS] of the descriptor."""
    item = _item(t)
    return (gl.load(slot_ids + item // HV).to(gl.int32) * HV + item % HV) * WARPS


@gluon.jit
def _move_states(work, states, states_ring, HV: gl.constexpr):
    """One warp's part: states of `count` items into the ring, decode's also back from it.

    They are asked for before any kernel before has ended: none earlier in the pass writes this layer's.
    """
    slot_ids, count, _, _, verify = work
    ring, full, empty = states_ring
    STAGES: gl.constexpr = ring.shape[0]
    WARPS: gl.constexpr = ring.shape[1]
    for t in range(gl.minimum(count, STAGES)):
        row = _state_row(t, slot_ids, HV, WARPS)
        mbarrier.expect(full.index(t), 4 * _DIM * _DIM)
        tma.async_copy_global_to_shared(states, [row, 0, 0], full.index(t), ring.index(t))
    for t in range(count):
        place = t % STAGES
        row = _state_row(t, slot_ids, HV, WARPS)
        next_row = _state_row(gl.minimum(t + STAGES, count - 1), slot_ids, HV, WARPS)
        mbarrier.wait(empty.index(place), t // STAGES & 1)
        if verify == 0:
            tma.async_copy_shared_to_global(states, [row, 0, 0], ring.index(place))
        if t + STAGES < count:
            tma.store_wait(0)  # until the place has been read
            mbarrier.expect(full.index(place), 4 * _DIM * _DIM)
            tma.async_copy_global_to_shared(states, [next_row, 0, 0], full.index(place), ring.index(place))
    tma.store_wait(0)


@gluon.jit
def _load_taps(weight, c, mask):
    """weight [C, 4] of channels c [4, DIM] -> four of these; a channel's are loaded together."""
    layout: gl.constexpr = gl.BlockedLayout([4 // _BRINGER_WARPS, 1, 4], [1, 32, 1], [_BRINGER_WARPS, 1, 1], [2, 1, 0])
    of_channel: gl.constexpr = gl.SliceLayout(2, layout)
    tap = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    first = gl.convert_layout(c, of_channel, assert_trivial=True)[:, :, None] * _TAPS
    loaded = gl.convert_layout(mask, of_channel, assert_trivial=True)[:, :, None]
    taps = gl.load(weight + (first + tap[None, None, :]), mask=loaded, other=0.0)
    even, odd = taps.reshape([4, _DIM, 2, 2]).split()
    tap_0, tap_2 = even.split()
    tap_1, tap_3 = odd.split()
    return (
        gl.convert_layout(tap_0, c.type.layout, assert_trivial=True),
        gl.convert_layout(tap_1, c.type.layout, assert_trivial=True),
        gl.convert_layout(tap_2, c.type.layout, assert_trivial=True),
        gl.convert_layout(tap_3, c.type.layout, assert_trivial=True),
    )


@gluon.jit
def _bring_vectors(
    work, turn, sources, vectors_ring, HK: gl.constexpr, HV: gl.constexpr, PARTS: gl.constexpr,
    BRINGERS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A bringer's part: of each token of every BRINGERS-th item, from `turn` on, q, k, v and silu(z), [4, DIM], and its
    decay and beta, into its ring.

    They do what `conv_step_kernel` does, all value heads of a key head the same for its channels of q and k. The first of
    them writes these to the journal. The last that has read their tails moves them on: counters say which.
    """
    C: gl.constexpr = (2 * HK + HV) * _DIM
    layout: gl.constexpr = gl.BlockedLayout([4 // _BRINGER_WARPS, 1], [1, 32], [_BRINGER_WARPS, 1], [1, 0])
    slot_ids, count, q_len, journal_len, verify = work
    qkv, z, b, a, gates_of, conv = sources
    x, x_stride = qkv
    a_log, dt_bias = gates_of
    weight, tail, journal_x, journal_k, counters = conv
    vectors, gates, full, empty = vectors_ring
    kind = gl.arange(0, 4, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, _DIM, layout=gl.SliceLayout(0, layout))
    i = gl.arange(0, 2, layout=gl.BlockedLayout([1], [32], [_BRINGER_WARPS], [0]))
    kinds, dims = gl.broadcast(kind[:, None], d[None, :])
    is_mixed, is_gate, is_key = kinds != _GATE, kinds == _GATE, kinds == _K
    n = 0
    next_slot = gl.load(slot_ids + _item(gl.minimum(turn, count - 1)) // HV)
    for t in range(turn, count, BRINGERS):
        seq, head = _item(t) // HV, _item(t) % HV
        key_head, member = head // (HV // HK), head % (HV // HK)
        slot = next_slot.to(gl.int64)
        next_slot = gl.load(slot_ids + _item(gl.minimum(t + BRINGERS, count - 1)) // HV)
        channel = gl.where(kind == _V, 2 * HK + head, gl.where(kind == _K, HK + key_head, key_head)) * _DIM
        c = channel[:, None] + dims
        # Tails may be read before any kernel before has ended, as states.
        window = ()
        for tap in gl.static_range(_TAPS - 1):
            kept = gl.load(tail + (slot * C + c) * (_TAPS - 1) + tap, mask=is_mixed, other=0.0)
            window = window + (kept.to(gl.float32),)
        taps = _load_taps(weight, c, is_mixed)
        log_rate, shift = gl.load(a_log + head), gl.load(dt_bias + head)
        if EARLY > 0:  # again it costs nothing
            wait_for_kernels()
            launch_dependents()
        token = seq * q_len
        next_x = gl.load(x + token * x_stride + c, mask=is_mixed, other=0.0)
        next_z = gl.load(z[0] + token * z[1] + head * _DIM + dims, mask=is_gate, other=0.0)
        next_a = sum_of_parts(a[0] + token * a[2] + head, a[1], True, PARTS)
        next_b = sum_of_parts(b[0] + token * b[2] + head, b[1], True, PARTS)
        rate = gl.exp(log_rate)
        for step in range(q_len):
            new, gate = next_x.to(gl.float32), next_z.to(gl.float32)
            decay, beta = gl.exp(-rate * softplus(next_a + shift)), 1.0 / (1.0 + gl.exp(-next_b))
            token += 1
            another = step + 1 < q_len
            next_x = gl.load(x + token * x_stride + c, mask=is_mixed & another, other=0.0)
            next_z = gl.load(z[0] + token * z[1] + head * _DIM + dims, mask=is_gate & another, other=0.0)
            next_a = sum_of_parts(a[0] + token * a[2] + head, a[1], another, PARTS)
            next_b = sum_of_parts(b[0] + token * b[2] + head, b[1], another, PARTS)
            window = window + (new,)
            y = new * 0.0
            for tap in gl.static_range(_TAPS):
                y = gl.fma(window[tap], taps[tap], y)
            window = window[1:]
            y = gl.where(is_gate, gate, y)
            y = y / (1.0 + gl.exp(-y))
            unit = gl.rsqrt(gl.sum(y * y, axis=1) + 1e-6)
            factor = gl.where(kind == _Q, unit * _DIM**-0.5, gl.where(kind == _K, unit, 1.0))
            y = y * factor[:, None]
            place = turn * _PLACES + n % _PLACES
            mbarrier.wait(empty.index(place), (n // _PLACES & 1) ^ 1)
            vectors.index(place).store(y)
            gates.index(place).store(gl.where(i == 0, decay, beta))
            gl.thread_barrier()
            mbarrier.arrive(full.index(place), count=1)
            n += 1
            if verify != 0:
                entry, owns = slot * journal_len + step, (kind == _V) | ((kind < _V) & (member == 0))
                owned = gl.broadcast(owns[:, None], dims)[0]
                gl.store(journal_x + entry * C + c, new.to(journal_x.dtype.element_ty), mask=owned)
                at = journal_k + (entry * HK + key_head) * _DIM + dims
                gl.store(at, y, mask=is_key & owned)
        if verify == 0:
            last = is_last(counters + seq * HK + key_head, HV // HK)
            moves = gl.broadcast(((kind == _V) | ((kind < _V) & last))[:, None], dims)[0]
            for tap in gl.static_range(_TAPS - 1):
                at = tail + (slot * C + c) * (_TAPS - 1) + tap
                gl.store(at, window[tap].to(tail.dtype.element_ty), mask=moves)


@gluon.jit
def _take_steps(work, norm, eps, states_ring, vectors_ring, rooms, results, HV: gl.constexpr, BRINGERS: gl.constexpr):
    """The delta rule, norm and outputs.

    A state is [WARPS, DIM / WARPS, DIM]: a warp has neighbouring rows, a thread 4 columns of each. Sums over rows go through
    shared memory, where each warp adds up what all have found, in the same order: one barrier, and every warp has it.
    """
    slot_ids, count, q_len, journal_len, verify = work
    ring, full, empty = states_ring
    vectors, gates, v_full, v_empty = vectors_ring
    journal_d, journal_g, out, scales, padded_rows = results
    STAGES: gl.constexpr = ring.shape[0]
    WARPS: gl.constexpr = ring.shape[1]
    ROWS: gl.constexpr = ring.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, ROWS, 4], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    by_columns: gl.constexpr = _by_columns(WARPS, WARPS)
    j = gl.arange(0, _DIM, layout=column)
    gain = gl.load(norm + j)
    for t in range(count):
        seq, head = _item(t) // HV, _item(t) % HV
        slot, place = gl.load(slot_ids + seq).to(gl.int64), t % STAGES
        mbarrier.wait(full.index(place), t // STAGES & 1)
        state = ring.index(place).load(layout)
        for step in range(q_len):
            n = t // BRINGERS * q_len + step  # of its bringer's tokens
            v_place = t % BRINGERS * _PLACES + n % _PLACES
            mbarrier.wait(v_full.index(v_place), n // _PLACES & 1)
            token = seq * q_len + step
            q, k, v, gate = _load_vectors(vectors.index(v_place), WARPS, layout)
            decay = gates.index(v_place).slice(0, 1).load(column)
            beta = gates.index(v_place).slice(1, 1).load(column)
            state = state * decay[None, None, :]
            rooms[0].store(gl.sum(state * k, axis=1))
            found = gl.convert_layout(gl.sum(rooms[0].load(by_columns), axis=0), column, assert_trivial=True)
            written = beta * (v - found)
            state = gl.fma(gl.broadcast(k, state)[0], gl.broadcast(written[None, None, :], state)[0], state)
            rooms[1].store(gl.sum(state * q, axis=1))
            if verify != 0:
                entry = (slot * journal_len + step) * HV + head
                gl.store(journal_d + entry * _DIM + j, written)
                gl.store(journal_g + entry + j, gl.broadcast(decay, j)[0], mask=j == 0)
            else:  # into the place it came from
                ring.index(place).store(state)
                fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(v_empty.index(v_place), count=1)
            # The place is done with: decode has one token, and verify writes nothing back.
            mbarrier.arrive(empty.index(place), count=1, pred=step == 0)
            o = gl.convert_layout(gl.sum(rooms[1].load(by_columns), axis=0), column, assert_trivial=True)
            o = o * gl.rsqrt(gl.sum(o * o, axis=0) / _DIM + eps) * gain * gate
            at = out + (token * HV + head) * _DIM + j
            if scales is None:
                gl.store(at, o.to(out.dtype.element_ty))
            else:  # as `pairs.pair_of`
                scale, inverse = scale_of(gl.max(gl.abs(o), axis=0))
                o = o * inverse
                high = round_e4m3(o)
                low = round_e4m3((o - high) * 16.0)
                gl.store(at, high.to(gl.float8e4nv))
                gl.store(at + padded_rows * (HV * _DIM), low.to(gl.float8e4nv))
                at = scales + head * (2 * padded_rows) + token
                gl.store(at, scale)
                gl.store(at + padded_rows, scale / 16)


@gluon.jit(
    do_not_specialize=["num_seqs", "b_part", "a_part", "q_len", "journal_len", "verify", "padded_rows"],
    do_not_specialize_on_alignment=["slot_ids"],
)
def hopper_step_kernel(
    qkv, qkv_stride, z, z_stride, b, b_part, b_stride, a, a_part, a_stride, a_log, dt_bias, norm, eps, states, journal_d,
    journal_g, slot_ids, num_seqs, q_len, journal_len, verify, out, scales, padded_rows, weight, tail, journal_x,
    journal_k, counters, HK: gl.constexpr, HV: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr,
    STAGES: gl.constexpr, BRINGERS: gl.constexpr, REGISTERS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """`gated_delta_kernels.conv_step_kernel` and `delta_step_kernel` for num_seqs sequences of q_len tokens. See there for
    the arguments; programs: any number up to that of items.

    qkv [n * q_len, C]: what the projection gives. states [S, HV, DIM, DIM] float32, as a descriptor of them as
    [S * HV * WARPS, DIM / WARPS, DIM], for one at a time. counters [num_seqs, HK] int64: 0 before and after. WARPS: of the
    delta rule; BRINGERS: 1 or 2; REGISTERS: of a thread of all other warps.
    """
    ring = gl.allocate_shared_memory(gl.float32, [STAGES, WARPS, _DIM // WARPS, _DIM], states.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    vectors = gl.allocate_shared_memory(gl.float32, [BRINGERS * _PLACES, 4, _DIM], plain)
    gates = gl.allocate_shared_memory(gl.float32, [BRINGERS * _PLACES, 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rooms = (
        gl.allocate_shared_memory(gl.float32, [WARPS, _DIM], plain),
        gl.allocate_shared_memory(gl.float32, [WARPS, _DIM], plain),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [BRINGERS * _PLACES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [BRINGERS * _PLACES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    for s in gl.static_range(BRINGERS * _PLACES):
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=1)
    fence_async_shared()
    items = num_seqs * HV
    count = (items - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    work = (slot_ids, count, q_len, journal_len, verify)
    sources = ((qkv, qkv_stride), (z, z_stride), (b, b_part, b_stride), (a, a_part, a_stride), (a_log, dt_bias),
               (weight, tail, journal_x, journal_k, counters))  # fmt: skip
    states_ring, vectors_ring = (ring, full, empty), (vectors, gates, v_full, v_empty)
    results = (journal_d, journal_g, out, scales, padded_rows)
    if BRINGERS == 1:
        gl.warp_specialize([
            (_take_steps, (work, norm, eps, states_ring, vectors_ring, rooms, results, HV, BRINGERS)),
            (_move_states, (work, states, states_ring, HV)),
            (_bring_vectors, (work, 0, sources, vectors_ring, HK, HV, PARTS, BRINGERS, EARLY)),
        ], [1, _BRINGER_WARPS], [REGISTERS, REGISTERS])  # fmt: skip
    else:
        gl.static_assert(BRINGERS == 2)
        gl.warp_specialize([
            (_take_steps, (work, norm, eps, states_ring, vectors_ring, rooms, results, HV, BRINGERS)),
            (_move_states, (work, states, states_ring, HV)),
            (_bring_vectors, (work, 0, sources, vectors_ring, HK, HV, PARTS, BRINGERS, EARLY)),
            (_bring_vectors, (work, 1, sources, vectors_ring, HK, HV, PARTS, BRINGERS, EARLY)),
        ], [1, _BRINGER_WARPS, _BRINGER_WARPS], [REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
