"""`SharedPrompt`: the prompt of several choices, computed once.

Its beginning runs in a slot of its own; each choice gets a fork of that slot and computes the rest. The cut is at a whole
chunk, so every sum runs as in a request that came alone, and the tokens are the same.

Slots are taken only while nobody waits for one: a choice in a slot of ours needs no free slot, so it is admitted as soon as
it is first in the queue; an idle slot of ours behind somebody who waits for it could block both for ever. If there is no
slot, a choice is a request like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pocketllm.engine.async_engine import AsyncEngine
from pocketllm.engine.engine import Engine
from pocketllm.errors import SlotError
from pocketllm.options import CHUNK_ALIGNMENT, SamplingParams


class _Busy(Exception):
    """No slot for it."""


class SharedPrompt:
    """`compute`, then `lend` a slot to each choice; `give_back` and `close` may be called at any time."""

    def __init__(self, engine: AsyncEngine, request_id: str, prompt_ids: Sequence[int], max_tokens: int | None) -> None:
        """request_id: for computing it. max_tokens: of each choice, as `SamplingParams` has it."""
        self._engine, self._request_id = engine, request_id
        self._prompt_ids, self._max_tokens = prompt_ids, max_tokens
        self.length = (len(prompt_ids) - 1) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT  # tokens that are shared
        # Of the engine's thread:
        self._slot: int | None = None  # holds the beginning
        self._lent: dict[str, int] = {}  # request -> slot

    async def compute(self) -> None:
        """Does nothing if the prompt is short, or if there is no slot to spare. QueueFull and RequestError as a request."""
        if self.length == 0:
            return
        beginning = self._prompt_ids[: self.length]
        params = SamplingParams(
            max_tokens=1, ignore_eos=True
        )  # the token is not wanted, but there is no request without
        try:
            _, outputs = await self._engine.submit(beginning, params, request_id=self._request_id, slot=self._claim)
        except _Busy:
            return
        async for _ in outputs:
            pass

    def lend(self, request_id: str, *, last: bool) -> Callable[[Engine], int | None]:
        """For `AsyncEngine.submit`: a fork for this request; the last one gets the slot itself."""

        def take(engine: Engine) -> int | None:
            if self._slot is None or any(request.bound_slot is None for request in engine.scheduler.waiting):
                return None
            if last:
                self._lent[request_id], self._slot = self._slot, None
            else:
                try:
                    self._lent[request_id] = engine.fork_slot(self._slot, self._reservation(engine))
                except SlotError:
                    return None
            return self._lent[request_id]

        return take

    def give_back(self, request_id: str) -> None:
        """The request has ended, or was abandoned just now."""

        def release(engine: Engine) -> None:
            slot = self._lent.pop(request_id, None)
            if slot is not None:
                engine.release_slot(slot)

        self._engine.post(release)

    def close(self) -> None:
        """No more slots are lent; those that are stay with their requests."""

        def release(engine: Engine) -> None:
            slot, self._slot = self._slot, None
            if slot is not None:
                engine.release_slot(slot)

        self._engine.abandon(self._request_id)
        self._engine.post(release)

    def _claim(self, engine: Engine) -> int:
        tokens = self._reservation(engine)
        slots = engine.slots
        if engine.scheduler.waiting or slots.num_free < 2 or not slots.can_acquire(tokens):
            raise _Busy
        if tokens > slots.max_context:  # the choices will be refused: nothing is computed for them
            raise _Busy
        self._slot = engine.acquire_slot(tokens)
        return self._slot

    def _reservation(self, engine: Engine) -> int:
        """As the scheduler's: all a choice can need, or without max_tokens an equal share of the pool."""
        prompt, slots = len(self._prompt_ids), engine.slots
        if self._max_tokens is not None:
            return prompt + self._max_tokens
        return max(prompt + 1, slots.pages.fair_share(slots.num_slots))
