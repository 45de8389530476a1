"""Which page holds which part of which slot: pure bookkeeping, no tensors.

Two layouts with one interface (`PageTable`). `SlotPages`: every slot owns max_pages pages for good, the block table is the
identity. `PagedPool`: one pool; a slot reserves what its request may need and takes pages as it grows; forks share full
pages, which are reference-counted and copied when written.

Methods that change what the device must see return `PageEdits`; rank 0 decides, every rank applies the same edits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pocketllm.errors import OutOfPages


@dataclass
class PageEdits:
    """Changes for the device: block table entries (slot, index, page) to set, then pages (source, target) to copy."""

    entries: list[tuple[int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def extend(self, other: PageEdits) -> None:
        self.entries += other.entries
        self.copies += other.copies


class PageTable(Protocol):
    page_size: int

    def can_reserve(self, num_tokens: int) -> bool:
        """Whether a fresh slot could reserve num_tokens now."""

    def fair_share(self, num_slots: int) -> int:
        """Tokens a slot gets when the storage is shared equally by num_slots."""

    def acquire(self, slot: int, num_tokens: int) -> None:
        """Reserve num_tokens for a slot that holds nothing; OutOfPages if they can't be promised."""

    def extend(self, slot: int, num_tokens: int, keep: int | None = None) -> bool:
        """Raise the slot's reservation to num_tokens if free pages allow; otherwise change nothing, return False.

        keep: the slot is going to be truncated to so many tokens, perhaps into pages it shares; what it then writes up to
        num_tokens is promised too, the copy of a shared page included.
        """

    def prepare_write(self, slot: int, start: int, end: int) -> PageEdits:
        """Make tokens start..end-1 of a slot writable. Never fails within the reservation of a slot that has not been
        truncated into shared pages; OutOfPages (and nothing changed) otherwise."""

    def fork(self, parent: int, child: int, kv_len: int, num_tokens: int) -> PageEdits:
        """Acquire `child` with the parent's first kv_len tokens and a reservation of num_tokens in all."""

    def truncate(self, slot: int, kv_len: int) -> None:
        """Give back pages that hold only tokens from kv_len on; they stay promised to the slot."""

    def release(self, slot: int) -> None:
        """Give back everything the slot holds or was promised."""


class SlotPages:
    """kv_layout="slots": slot s owns pages s * max_pages ... (s + 1) * max_pages - 1 for good."""

    def __init__(self, num_slots: int, max_pages: int, page_size: int) -> None:
        self.num_slots = num_slots
        self.max_pages = max_pages
        self.page_size = page_size

    def can_reserve(self, num_tokens: int) -> bool:
        return num_tokens <= self.max_pages * self.page_size

    def fair_share(self, num_slots: int) -> int:
        return self.max_pages * self.page_size

    def acquire(self, slot: int, num_tokens: int) -> None:
        if not self.can_reserve(num_tokens):
            raise OutOfPages(f"{num_tokens} tokens asked for, a slot holds {self.max_pages * self.page_size}")

    def extend(self, slot: int, num_tokens: int, keep: int | None = None) -> bool:
        return self.can_reserve(num_tokens)

    def prepare_write(self, slot: int, start: int, end: int) -> PageEdits:
        if not self.can_reserve(end):
            raise OutOfPages(f"write up to token {end}, a slot holds {self.max_pages * self.page_size}")
        return PageEdits()

    def fork(self, parent: int, child: int, kv_len: int, num_tokens: int) -> PageEdits:
        self.acquire(child, num_tokens)
        used = -(-kv_len // self.page_size)
        return PageEdits(copies=[(parent * self.max_pages + i, child * self.max_pages + i) for i in range(used)])

    def truncate(self, slot: int, kv_len: int) -> None:
        pass

    def release(self, slot: int) -> None:
        pass


class PagedPool:
    """kv_layout="paged": one pool of pages with reference counts and reservations.

    Invariant: free pages >= the sum of what slots were promised and have not taken yet. So `prepare_write` within a
    reservation can't fail, and an admitted request is never evicted.
    """

    def __init__(self, num_slots: int, num_pages: int, max_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.max_pages = max_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))  # popped from the end: lowest page first
        self._ref_counts = [0] * num_pages
        self._pages: list[list[int]] = [[] for _ in range(num_slots)]
        self._promised = [0] * num_slots  # pages a slot may still take

    @property
    def available(self) -> int:
        """Pages neither taken nor promised."""
        return len(self._free) - sum(self._promised)

    def pages_of(self, slot: int) -> Sequence[int]:
        return tuple(self._pages[slot])

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def can_reserve(self, num_tokens: int) -> bool:
        return self._pages_for(num_tokens) <= min(self.available, self.max_pages)

    def fair_share(self, num_slots: int) -> int:
        return min(max(self.num_pages // num_slots, 1), self.max_pages) * self.page_size

    def acquire(self, slot: int, num_tokens: int) -> None:
        if self._pages[slot] or self._promised[slot]:
            raise OutOfPages(f"slot {slot} already holds pages: release it first")
        self._promise(slot, self._pages_for(num_tokens))

    def extend(self, slot: int, num_tokens: int, keep: int | None = None) -> bool:
        pages = self._pages[slot]
        kept = pages if keep is None else pages[: self._pages_for(keep)]
        own = sum(self._ref_counts[page] == 1 for page in pages[len(kept) :])  # `truncate` promises these anew
        cut = keep is not None and keep % self.page_size > 0
        copies = sum(self._ref_counts[page] > 1 for page in kept[-1:]) if cut else 0
        more = max(self._pages_for(num_tokens) - len(kept), 0) + copies - own - self._promised[slot]
        if more > 0:
            if more > self.available or self._pages_for(num_tokens) > self.max_pages:
                return False
            self._promised[slot] += more
        return True

    def _promise(self, slot: int, pages: int) -> None:
        if pages > self.available or len(self._pages[slot]) + pages > self.max_pages:
            raise OutOfPages(
                f"slot {slot} asks for {pages} more pages of {self.page_size} tokens: {self.available} of "
                f"{self.num_pages} are free, and a slot may hold {self.max_pages}"
            )
        self._promised[slot] += pages

    def prepare_write(self, slot: int, start: int, end: int) -> PageEdits:
        pages = self._pages[slot]
        first, last = start // self.page_size, self._pages_for(end)  # page indices [first, last)
        shared = [i for i in range(first, min(last, len(pages))) if self._ref_counts[pages[i]] > 1]
        needed = len(shared) + max(last - len(pages), 0)
        if needed > self._promised[slot]:
            self._promise(slot, needed - self._promised[slot])
        edits = PageEdits()
        for index in shared:
            page = self._take(slot)
            edits.copies.append((pages[index], page))
            self._drop(pages[index])
            pages[index] = page
            edits.entries.append((slot, index, page))
        while len(pages) < last:
            pages.append(self._take(slot))
            edits.entries.append((slot, len(pages) - 1, pages[-1]))
        return edits

    def fork(self, parent: int, child: int, kv_len: int, num_tokens: int) -> PageEdits:
        if self._pages[child] or self._promised[child]:
            raise OutOfPages(f"slot {child} already holds pages: release it first")
        full = kv_len // self.page_size
        self._promise(child, self._pages_for(max(num_tokens, kv_len)) - full)
        edits = PageEdits()
        for index, page in enumerate(self._pages[parent][: self._pages_for(kv_len)]):
            if index < full:
                self._ref_counts[page] += 1
                target = page
            else:  # the last, partly filled page: both will write to it, so the child gets its own now
                target = self._take(child)
                edits.copies.append((page, target))
            self._pages[child].append(target)
            edits.entries.append((child, index, target))
        return edits

    def truncate(self, slot: int, kv_len: int) -> None:
        pages = self._pages[slot]
        while len(pages) > self._pages_for(kv_len):
            if self._drop(pages.pop()):
                self._promised[slot] += 1

    def release(self, slot: int) -> None:
        self._promised[slot] = 0
        while self._pages[slot]:
            self._drop(self._pages[slot].pop())

    def _take(self, slot: int) -> int:
        page = self._free.pop()
        self._ref_counts[page] = 1
        self._promised[slot] -= 1
        return page

    def _drop(self, page: int) -> bool:
        """One reference less; True if the page became free."""
        self._ref_counts[page] -= 1
        if self._ref_counts[page] == 0:
            self._free.append(page)
        return self._ref_counts[page] == 0
