"""The page pool under arbitrary sequences of operations: no leak, no double use, reservations kept, copies exact."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pocketllm.cache.pages import PagedPool, PageEdits, SlotPages
from pocketllm.errors import OutOfPages

SLOTS, PAGES, MAX_PAGES, PAGE = 4, 14, 6, 16


class PoolMachine(RuleBasedStateMachine):
    """Mirrors the pool with real contents: each token is a unique number, kept per page like a device would."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagedPool(SLOTS, PAGES, MAX_PAGES, PAGE)
        self.memory = [[0] * PAGE for _ in range(PAGES)]  # what the device's pages hold
        self.table = [[-1] * MAX_PAGES for _ in range(SLOTS)]  # what the device's block table says
        self.tokens: dict[int, list[int]] = {}  # what each acquired slot must read back
        self.reserved: dict[int, int] = {}
        self.next_token = 1

    def apply(self, edits: PageEdits) -> None:
        for slot, index, page in edits.entries:
            self.table[slot][index] = page
        for source, target in edits.copies:
            self.memory[target] = list(self.memory[source])

    @rule(slot=st.integers(0, SLOTS - 1), tokens=st.integers(1, MAX_PAGES * PAGE))
    def acquire(self, slot: int, tokens: int) -> None:
        if slot in self.tokens:
            return
        fits = self.pool.can_reserve(tokens)
        try:
            self.pool.acquire(slot, tokens)
        except OutOfPages:
            assert not fits
            return
        assert fits
        self.tokens[slot], self.reserved[slot] = [], tokens

    @rule(slot=st.integers(0, SLOTS - 1), count=st.integers(1, 40))
    def write(self, slot: int, count: int) -> None:
        if slot not in self.tokens:
            return
        start = len(self.tokens[slot])
        count = min(count, MAX_PAGES * PAGE - start)
        within = start + count <= self.reserved[slot]
        try:
            edits = self.pool.prepare_write(slot, start, start + count)
        except OutOfPages:
            assert not within, "a write within the reservation must never fail"
            return
        self.apply(edits)
        for position in range(start, start + count):
            page = self.table[slot][position // PAGE]
            self.memory[page][position % PAGE] = self.next_token
            self.tokens[slot].append(self.next_token)
            self.next_token += 1

    @rule(parent=st.integers(0, SLOTS - 1), child=st.integers(0, SLOTS - 1), extra=st.integers(0, 40))
    def fork(self, parent: int, child: int, extra: int) -> None:
        if parent not in self.tokens or child in self.tokens:
            return
        held = len(self.tokens[parent])
        total = min(held + extra, MAX_PAGES * PAGE)
        try:
            self.apply(self.pool.fork(parent, child, held, total))
        except OutOfPages:
            return
        self.tokens[child], self.reserved[child] = list(self.tokens[parent]), total

    @rule(slot=st.integers(0, SLOTS - 1), cut=st.integers(0, 20))
    def truncate_a_little(self, slot: int, cut: int) -> None:
        """As after a verify pass; a slot cut into pages it shares has no promise for their copies."""
        if slot not in self.tokens:
            return
        kept = max(len(self.tokens[slot]) - cut, 0)
        shared = [p for p in self.pool.pages_of(slot)[kept // PAGE :] if self.shares(p) > 1]
        self.pool.truncate(slot, kept)
        del self.tokens[slot][kept:]
        if shared:
            self.reserved[slot] = 0

    @rule(slot=st.integers(0, SLOTS - 1), tokens=st.integers(1, MAX_PAGES * PAGE))
    def extend(self, slot: int, tokens: int) -> None:
        if slot in self.tokens and self.pool.extend(slot, tokens) and self.reserved[slot]:
            self.reserved[slot] = max(self.reserved[slot], tokens)

    @rule(slot=st.integers(0, SLOTS - 1), keep=st.integers(0, MAX_PAGES * PAGE), more=st.integers(1, 60))
    def go_back_and_extend(self, slot: int, keep: int, more: int) -> None:
        """As for a turn that parts from what its slot holds: all it will write is promised, copies included."""
        keep = min(keep, len(self.tokens.get(slot, ())))
        total = min(keep + more, MAX_PAGES * PAGE)
        if slot in self.tokens and self.pool.extend(slot, total, keep=keep):
            self.pool.truncate(slot, keep)
            del self.tokens[slot][keep:]
            self.reserved[slot] = total

    @rule(slot=st.integers(0, SLOTS - 1))
    def release(self, slot: int) -> None:
        if slot in self.tokens:
            self.pool.release(slot)
            del self.tokens[slot], self.reserved[slot]

    def shares(self, page: int) -> int:
        return sum(page in self.pool.pages_of(slot) for slot in range(SLOTS))

    @invariant()
    def contents_are_right(self) -> None:
        for slot, tokens in self.tokens.items():
            read = [self.memory[self.table[slot][p // PAGE]][p % PAGE] for p in range(len(tokens))]
            assert read == tokens

    @invariant()
    def nothing_leaks(self) -> None:
        used = {page for slot in range(SLOTS) for page in self.pool.pages_of(slot)}
        promised = sum(self.pool._promised)
        assert self.pool.available == PAGES - len(used) - promised
        assert self.pool.available >= 0
        for page in range(PAGES):
            assert self.pool._ref_counts[page] == self.shares(page)

    def teardown(self) -> None:
        for slot in list(self.tokens):
            self.release(slot)
        assert self.pool.available == PAGES
        assert self.pool.can_reserve(MAX_PAGES * PAGE)


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_pool_refuses_in_words() -> None:
    pool = PagedPool(2, 4, 4, PAGE)
    pool.acquire(0, 3 * PAGE)
    with pytest.raises(OutOfPages, match=r"slot 1 asks for 2 more pages .* 1 of 4 are free"):
        pool.acquire(1, 2 * PAGE)
    assert pool.available == 1
    with pytest.raises(OutOfPages, match="already holds"):
        pool.acquire(0, PAGE)


def test_pool_shares_equally_and_within_a_slot() -> None:
    assert PagedPool(4, 14, 6, PAGE).fair_share(4) == 3 * PAGE
    assert PagedPool(1, 14, 6, PAGE).fair_share(1) == 6 * PAGE
    assert PagedPool(4, 2, 2, PAGE).fair_share(4) == PAGE


def test_slot_layout_owns_its_pages() -> None:
    pages = SlotPages(3, 4, PAGE)
    assert pages.can_reserve(4 * PAGE)
    with pytest.raises(OutOfPages, match="a slot holds 64"):
        pages.acquire(0, 4 * PAGE + 1)
    with pytest.raises(OutOfPages, match="a slot holds 64"):
        pages.prepare_write(0, 60, 65)
    assert pages.prepare_write(1, 0, 64).entries == []
    assert pages.fork(0, 2, 17, 64).copies == [(0, 8), (1, 9)]
