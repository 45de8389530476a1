"""`SlotTable`: which slots are in use, by whom, and how many tokens each holds. Pure Python, no tensors."""

from __future__ import annotations

from enum import Enum

from pocketllm.cache.pages import PageEdits, PageTable
from pocketllm.errors import NoFreeSlot, SlotError


class SlotUse(Enum):
    FREE = "free"
    ACQUIRED = "acquired"  # by a caller, idle
    QUEUED = "queued"  # acquired; a request waits to run in it
    RUNNING = "running"  # by a request of the scheduler
    VERIFYING = "verifying"  # acquired; a verify pass waits for its commit


class SlotTable:
    """Slots of one engine. Changes that the device must see collect in `edits` and `resets` until `take_changes`."""

    def __init__(self, num_slots: int, max_context: int, pages: PageTable) -> None:
        self.num_slots = num_slots
        self.max_context = max_context
        self.pages = pages
        self.kv_lens = [0] * num_slots
        self.token_ids: list[list[int]] = [[] for _ in range(num_slots)]  # what acquired slots hold
        self._use = [SlotUse.FREE] * num_slots
        self._edits = PageEdits()
        self._resets: list[int] = []

    def use_of(self, slot: int) -> SlotUse:
        if isinstance(slot, bool) or not isinstance(slot, int) or not 0 <= slot < self.num_slots:
            raise SlotError(f"slot {slot!r}: slots are 0 to {self.num_slots - 1}")
        return self._use[slot]

    def expect(self, slot: int, *uses: SlotUse) -> None:
        """SlotError unless the slot is in one of these uses."""
        use = self.use_of(slot)
        if use not in uses:
            hint = {
                SlotUse.FREE: "acquire it first",
                SlotUse.ACQUIRED: "no request runs in it",
                SlotUse.QUEUED: "a request waits for it: abort it or let it run",
                SlotUse.RUNNING: "a request is running in it: abort it or wait",
                SlotUse.VERIFYING: "its verify pass awaits commit()",
            }[use]
            raise SlotError(f"slot {slot} is {use.value}: {hint}")

    @property
    def num_free(self) -> int:
        return self._use.count(SlotUse.FREE)

    def can_acquire(self, num_tokens: int) -> bool:
        return self.num_free > 0 and self.pages.can_reserve(num_tokens)

    def acquire(self, num_tokens: int, use: SlotUse) -> int:
        """Lowest free slot with num_tokens reserved; NoFreeSlot or OutOfPages."""
        slot = self._lowest_free()
        self.pages.acquire(slot, num_tokens)
        self._start(slot, use)
        self._resets.append(slot)
        return slot

    def fork(self, parent: int, num_tokens: int, use: SlotUse) -> int:
        """A new slot that holds the parent's tokens, reserved up to num_tokens. The recurrent state is the caller's."""
        child = self._lowest_free()
        self._edits.extend(self.pages.fork(parent, child, self.kv_lens[parent], num_tokens))
        self._start(child, use)
        self.kv_lens[child] = self.kv_lens[parent]
        self.token_ids[child] = list(self.token_ids[parent])
        return child

    def _lowest_free(self) -> int:
        if SlotUse.FREE not in self._use:
            raise NoFreeSlot(f"all {self.num_slots} slots are in use: release one, or build with more max_batch_size")
        return self._use.index(SlotUse.FREE)

    def _start(self, slot: int, use: SlotUse) -> None:
        self._use[slot] = use
        self.kv_lens[slot] = 0
        self.token_ids[slot] = []

    def set_use(self, slot: int, use: SlotUse) -> None:
        self._use[slot] = use

    def release(self, slot: int) -> None:
        self.pages.release(slot)
        self._start(slot, SlotUse.FREE)

    def prepare_write(self, slot: int, num_tokens: int) -> int:
        """Make room for num_tokens after those the slot holds; returns the position of the first. OutOfPages if full."""
        start = self.kv_lens[slot]
        if start + num_tokens > self.max_context:
            raise SlotError(
                f"slot {slot} holds {start} tokens; {num_tokens} more would pass max_context = {self.max_context}"
            )
        self._edits.extend(self.pages.prepare_write(slot, start, start + num_tokens))
        return start

    def truncate(self, slot: int, kv_len: int) -> None:
        """Forget the tokens from kv_len on."""
        self.pages.truncate(slot, kv_len)
        self.kv_lens[slot] = kv_len
        del self.token_ids[slot][kv_len:]

    def restart(self, slot: int) -> None:
        """Forget all tokens and the recurrent state; the reservation stays."""
        self.truncate(slot, 0)
        self._resets.append(slot)

    def take_changes(self) -> tuple[PageEdits, list[int]]:
        """Page edits and slots whose recurrent state must be cleared, since the last call."""
        changes = self._edits, self._resets
        self._edits, self._resets = PageEdits(), []
        return changes
