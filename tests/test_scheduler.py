"""The scheduler under arbitrary arrivals, aborts and failures: order kept, reservations honoured, nothing lost."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pocketllm.cache.pages import PagedPool
from pocketllm.engine.request import Request, State
from pocketllm.engine.scheduler import Scheduler, StepPlan
from pocketllm.engine.slots import SlotTable, SlotUse
from pocketllm.errors import NoFreeSlot, OutOfPages, QueueFull, RequestError, SlotError
from pocketllm.options import SamplingParams

SLOTS, PAGES, MAX_PAGES, PAGE, CHUNK, QUEUE = 3, 20, 12, 16, 64, 5


def make(has_state: bool = False) -> Scheduler:
    slots = SlotTable(SLOTS, MAX_PAGES * PAGE, PagedPool(SLOTS, PAGES, MAX_PAGES, PAGE))
    return Scheduler(slots, prefill_chunk=CHUNK, max_queue=QUEUE, has_state=has_state)


def request(
    name: str, prompt: int, max_tokens: int | None, bound_slot: int | None = None, parts_at: int = 999
) -> Request:
    """Its prompt begins as all others do, up to token parts_at."""
    ids = [i if i < parts_at else 1000 + i for i in range(prompt)]
    return Request(name, ids, SamplingParams(max_tokens=max_tokens), seed=0, bound_slot=bound_slot)


def play(scheduler: Scheduler, plan: StepPlan) -> list[Request]:
    """What the engine does with a plan: compute, sample one token (number 7), see who ends. The requests that got one."""
    got = []
    items = plan.prefill + plan.decode
    for item, owner in zip(items, plan.prefill_requests + plan.decode_requests, strict=True):
        scheduler.commit(owner, item)
        if item.wants_logits:
            owner.output_ids.append(7)
            got.append(owner)
            if len(owner.output_ids) == owner.params.max_tokens:
                scheduler.finish(owner, "length")
    return got


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make()
        self.all: list[Request] = []
        self.admitted: list[str] = []
        self.held: list[int] = []  # slots a caller acquired

    @rule(prompt=st.integers(1, 210), max_tokens=st.one_of(st.none(), st.integers(1, 60)))
    def add(self, prompt: int, max_tokens: int | None) -> None:
        new = request(f"r{len(self.all)}", prompt, max_tokens)
        limit = MAX_PAGES * PAGE
        try:
            self.scheduler.add(new)
        except QueueFull:
            assert len(self.scheduler.waiting) == QUEUE
            return
        except RequestError:
            assert prompt >= limit or prompt + (max_tokens or 0) > limit
            return
        assert prompt + (max_tokens or 0) <= limit
        self.all.append(new)

    @rule(prompt=st.integers(1, 100), which=st.integers(0, 5), parts_at=st.integers(0, 100))
    def add_to_a_held_slot(self, prompt: int, which: int, parts_at: int) -> None:
        if not self.held or len(self.scheduler.waiting) == QUEUE:
            return
        slot = self.held[which % len(self.held)]
        new = request(f"r{len(self.all)}", prompt, 10, slot, parts_at)
        try:
            self.scheduler.add(new)
        except SlotError:
            assert self.scheduler.slots.use_of(slot) is not SlotUse.ACQUIRED
            return
        self.all.append(new)

    @rule(fail=st.integers(-3, 3))
    def step(self, fail: int) -> None:
        before = list(self.scheduler.waiting)
        plan = self.scheduler.schedule()
        admitted = before[: len(before) - len(self.scheduler.waiting)]
        assert list(self.scheduler.waiting) == before[len(admitted) :], "admission must be first come, first served"
        self.check(plan)
        decoding = [r for r in plan.decode_requests if r.state is State.DECODE]
        if fail >= 0 and plan.decode_requests:
            self.scheduler.finish(plan.decode_requests[0], "error", RuntimeError("injected"))
            plan.decode_requests.pop(0), plan.decode.pop(0)
            decoding.pop(0)
        got = play(self.scheduler, plan)
        assert all(r in got for r in decoding), "every decoding request advances in every step"

    def check(self, plan: StepPlan) -> None:
        slots = [item.slot for item in plan.prefill + plan.decode]
        assert len(set(slots)) == len(slots)
        assert sum(len(item.token_ids) for item in plan.prefill) <= CHUNK
        for item, owner in zip(plan.prefill, plan.prefill_requests, strict=True):
            end = item.start + len(item.token_ids)
            assert end == owner.num_tokens or end % 64 == 0
            assert item.wants_logits == (end == owner.num_tokens)
            assert list(item.token_ids) == owner.tokens_so_far()[item.start : end]
        for item, owner in zip(plan.decode, plan.decode_requests, strict=True):
            assert item.start == owner.num_tokens - 1
            assert list(item.token_ids) == [owner.output_ids[-1]]

    @rule(which=st.integers(0, 50))
    def abort(self, which: int) -> None:
        if self.all:
            self.scheduler.finish(self.all[which % len(self.all)], "abort")

    @rule(tokens=st.integers(1, 100))
    def acquire(self, tokens: int) -> None:
        with contextlib.suppress(NoFreeSlot, OutOfPages):
            self.held.append(self.scheduler.slots.acquire(tokens, SlotUse.ACQUIRED))

    @rule(which=st.integers(0, 5), tokens=st.integers(1, 100))
    def fork(self, which: int, tokens: int) -> None:
        slots = self.scheduler.slots
        parents = [slot for slot in self.held if slots.use_of(slot) is SlotUse.ACQUIRED]
        if parents:
            parent = parents[which % len(parents)]
            with contextlib.suppress(NoFreeSlot, OutOfPages):
                self.held.append(slots.fork(parent, max(tokens, slots.kv_lens[parent]), SlotUse.ACQUIRED))

    @rule(which=st.integers(0, 5))
    def release(self, which: int) -> None:
        if self.held:
            slot = self.held[which % len(self.held)]
            if self.scheduler.slots.use_of(slot) is SlotUse.ACQUIRED:
                self.held.remove(slot)
                self.scheduler.slots.release(slot)

    @invariant()
    def states_agree(self) -> None:
        scheduler = self.scheduler
        for r in self.all:
            assert (r in scheduler.waiting) == (r.state is State.WAITING)
            running = r.slot is not None and scheduler.running.get(r.slot) is r
            assert running == (r.state in (State.PREFILL, State.DECODE))
        used = set(scheduler.running) | set(self.held)
        assert scheduler.slots.num_free == SLOTS - len(used)
        pool = scheduler.slots.pages
        assert isinstance(pool, PagedPool)
        assert pool.available >= 0

    def teardown(self) -> None:
        """Everything comes to an end, in bounded time, and all pages come back."""
        for slot in list(self.held):
            for r in self.all:
                if r.bound_slot == slot:
                    self.scheduler.finish(r, "abort")
            self.scheduler.slots.release(slot)
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            play(self.scheduler, self.scheduler.schedule())
        pool = self.scheduler.slots.pages
        assert isinstance(pool, PagedPool)
        assert not self.scheduler.has_work
        assert pool.available == PAGES
        assert self.scheduler.slots.num_free == SLOTS


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_a_long_prompt_does_not_stall_the_others() -> None:
    scheduler = make()
    short, long = request("short", 10, 30), request("long", 150, 10)
    scheduler.add(short)
    play(scheduler, scheduler.schedule())
    scheduler.add(long)
    for _ in range(3):  # 150 tokens in chunks of 64
        plan = scheduler.schedule()
        assert plan.decode_requests == [short]
        assert plan.prefill_requests == [long]
        play(scheduler, plan)
    assert len(short.output_ids) == 4
    assert len(long.output_ids) == 1


def test_short_prompts_share_a_prefill_pass() -> None:
    scheduler = make()
    for name, length in (("a", 20), ("b", 30), ("c", 40)):
        scheduler.add(request(name, length, 5))
    plan = scheduler.schedule()
    assert [len(item.token_ids) for item in plan.prefill] == [20, 30]  # 14 left: not a whole chunk of 64 for c
    play(scheduler, plan)
    assert [len(item.token_ids) for item in scheduler.schedule().prefill] == [40]


def test_admission_reserves_the_worst_case_and_keeps_the_order() -> None:
    scheduler = make()
    big, bigger, small = request("big", 100, 60), request("bigger", 150, 42), request("small", 5, 5)
    for r in (big, bigger, small):
        scheduler.add(r)
    scheduler.schedule()
    assert [r.state for r in (big, bigger, small)] == [State.PREFILL, State.WAITING, State.WAITING]
    scheduler.finish(big, "abort")
    play(scheduler, scheduler.schedule())
    assert [r.state for r in (bigger, small)] == [State.PREFILL, State.PREFILL]


def test_without_max_tokens_a_request_ends_when_its_share_is_full_and_takes_no_others() -> None:
    scheduler = make()
    open_ended, other = request("open", 40, None), request("other", 40, 140)
    scheduler.add(open_ended)
    scheduler.add(other)
    while open_ended.state is not State.FINISHED:
        play(scheduler, scheduler.schedule())
    assert open_ended.finish_reason == "length"
    assert open_ended.error is None
    # 20 pages: `other` was promised 12, so this one grew from its share of 6 to the 8 that were free
    assert open_ended.num_tokens == 8 * PAGE + 1
    while scheduler.has_work:
        play(scheduler, scheduler.schedule())
    assert len(other.output_ids) == 140


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (192, 1, "the prompt has 192 tokens; a slot holds 192 and needs room for one more"),
        (190, 3, r"use max_tokens <= 2"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(prompt: int, max_tokens: int, message: str) -> None:
    scheduler = make()
    with pytest.raises(RequestError, match=message):
        scheduler.add(request("r", prompt, max_tokens))
    assert not scheduler.has_work


def test_a_turn_that_parts_from_shared_pages_waits_for_their_copies() -> None:
    """A fork goes back into pages it shares while the pool is promised to others: it waits, and takes nobody's."""
    scheduler = make()
    slots, pool = scheduler.slots, scheduler.slots.pages
    parent = slots.acquire(96, SlotUse.ACQUIRED)
    scheduler.add(request("history", 80, 1, parent))
    play(scheduler, scheduler.schedule())
    play(scheduler, scheduler.schedule())
    assert slots.kv_lens[parent] == 80
    child = slots.fork(parent, 96, SlotUse.ACQUIRED)
    other = request("other", 10, 182)
    scheduler.add(other)
    play(scheduler, scheduler.schedule())
    assert isinstance(pool, PagedPool)
    assert pool.available < 5
    turn = request("turn", 80, 10, child, parts_at=10)
    scheduler.add(turn)
    while other.state is not State.FINISHED:
        play(scheduler, scheduler.schedule())
        assert turn.state is State.WAITING
    while scheduler.has_work:
        play(scheduler, scheduler.schedule())
    assert (turn.finish_reason, turn.num_cached, len(turn.output_ids)) == ("length", 10, 10)


def test_a_full_queue_refuses_in_words() -> None:
    scheduler = make()
    for i in range(QUEUE):
        scheduler.add(request(f"r{i}", 5, 5))
    with pytest.raises(QueueFull, match="5 requests are waiting and max_queue is 5"):
        scheduler.add(request("one more", 5, 5))
    assert len(scheduler.waiting) == QUEUE
