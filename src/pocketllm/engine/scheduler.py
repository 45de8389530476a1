"""`Scheduler`: which tokens of which requests each step computes. Pure Python, ordered, no tensors.

Admission is first come, first served, and reserves a request's worst case, so an admitted request is never evicted. A
step is at most one prefill pass within a token budget and one decode pass, so a long prompt never stalls the others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pocketllm.engine.inputs import SlotTokens
from pocketllm.engine.request import FinishReason, Request, State
from pocketllm.engine.slots import SlotTable, SlotUse
from pocketllm.errors import QueueFull, RequestError
from pocketllm.options import CHUNK_ALIGNMENT


@dataclass(frozen=True)
class StepPlan:
    """One step: a prefill pass, then a decode pass, over different requests. Items and requests correspond by index."""

    prefill: list[SlotTokens] = field(default_factory=list)
    prefill_requests: list[Request] = field(default_factory=list)
    decode: list[SlotTokens] = field(default_factory=list)
    decode_requests: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)  # ended while planning: their slot's share of the pool is full

    @property
    def empty(self) -> bool:
        return not (self.prefill or self.decode or self.ended)


class Scheduler:
    """Requests and their slots. `has_state`: the model has recurrent state, which can't be cut at a token."""

    def __init__(self, slots: SlotTable, *, prefill_chunk: int, max_queue: int, has_state: bool) -> None:
        self.slots = slots
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # by slot, in order of admission
        self._prefill_chunk = prefill_chunk
        self._max_queue = max_queue
        self._has_state = has_state

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request. RequestError if it can never be served; QueueFull if too many wait. Nothing kept then."""
        if len(self.waiting) >= self._max_queue:
            raise QueueFull(f"{len(self.waiting)} requests are waiting and max_queue is {self._max_queue}: try later")
        prompt, limit = len(request.prompt_ids), self.slots.max_context
        if prompt >= limit:
            raise RequestError(f"the prompt has {prompt} tokens; a slot holds {limit} and needs room for one more")
        if request.params.max_tokens is not None and prompt + request.params.max_tokens > limit:
            raise RequestError(
                f"prompt of {prompt} + max_tokens of {request.params.max_tokens} tokens pass the {limit} a slot holds: "
                f"use max_tokens <= {limit - prompt}"
            )
        if request.bound_slot is not None:
            self.slots.expect(request.bound_slot, SlotUse.ACQUIRED)
            request.num_cached = self._reusable_prefix(request.bound_slot, request.prompt_ids)  # nobody changes it now
            self.slots.set_use(request.bound_slot, SlotUse.QUEUED)
        self.waiting.append(request)

    def schedule(self) -> StepPlan:
        """The next step. Reserves and assigns pages; for each item `commit` or `finish` must follow before the next call."""
        plan = StepPlan()
        self._admit()
        budget = self._prefill_chunk
        for slot, request in list(self.running.items()):
            if request.state is State.DECODE:
                self._plan_decode(plan, slot, request)
            elif budget > 0:
                budget -= self._plan_prefill(plan, slot, request, budget)
        return plan

    def _plan_decode(self, plan: StepPlan, slot: int, request: Request) -> None:
        end = request.num_computed + 1
        if end > self.slots.max_context or not self.slots.pages.extend(slot, end):
            self.finish(request, "length")
            plan.ended.append(request)
            return
        start = self.slots.prepare_write(slot, 1)
        plan.decode.append(SlotTokens(slot, start, request.tokens(start, start + 1)))
        plan.decode_requests.append(request)

    def _plan_prefill(self, plan: StepPlan, slot: int, request: Request, budget: int) -> int:
        start = self.slots.kv_lens[slot]
        end = min(start + budget, request.num_tokens)
        if end < request.num_tokens:
            end -= end % CHUNK_ALIGNMENT  # sums over a chunk then run in one order whatever the load
        if end <= start:
            return budget  # the rest of the budget is too small for a whole chunk: keep the order, wait a step
        self.slots.prepare_write(slot, end - start)
        plan.prefill.append(SlotTokens(slot, start, request.tokens(start, end), end == request.num_tokens))
        plan.prefill_requests.append(request)
        return end - start

    def commit(self, request: Request, item: SlotTokens) -> None:
        """A planned item's tokens are in the cache now."""
        self.slots.kv_lens[item.slot] = request.num_computed = item.start + len(item.token_ids)
        if request.num_computed == request.num_tokens:
            request.state = State.DECODE

    def finish(self, request: Request, reason: FinishReason, error: Exception | None = None) -> None:
        """End a request in any state and give its slot back (a bound slot: to its caller, with its tokens)."""
        if request.state is State.FINISHED:
            return
        if request.state is State.WAITING:
            self.waiting.remove(request)
            if request.bound_slot is not None:
                self.slots.set_use(request.bound_slot, SlotUse.ACQUIRED)
        request.state, request.finish_reason, request.error = State.FINISHED, reason, error
        slot = request.slot
        if slot is None:
            return
        del self.running[slot]
        if request.bound_slot is None:
            self.slots.release(slot)
            return
        self.slots.set_use(slot, SlotUse.ACQUIRED)
        self.slots.token_ids[slot] = request.tokens(0, request.num_computed)
        self.slots.truncate(slot, request.num_computed)

    # -- admission ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            admitted = self._admit_bound(request) if request.bound_slot is not None else self._admit_fresh(request)
            if not admitted:
                return  # strictly in order: a small request never overtakes a large one
            self.waiting.popleft()
            request.state = State.PREFILL
            assert request.slot is not None
            self.running[request.slot] = request

    def _reservation(self, request: Request) -> int:
        """Tokens promised to a request: all it can need, or without max_tokens an equal share of the pool."""
        prompt = len(request.prompt_ids)
        if request.params.max_tokens is not None:
            return prompt + request.params.max_tokens
        share = self.slots.pages.fair_share(self.slots.num_slots)
        return min(max(prompt + 1, share), self.slots.max_context)

    def _admit_fresh(self, request: Request) -> bool:
        tokens = self._reservation(request)
        if not self.slots.can_acquire(tokens):
            return False
        request.slot = self.slots.acquire(tokens, SlotUse.RUNNING)
        return True

    def _admit_bound(self, request: Request) -> bool:
        slot = request.bound_slot
        assert slot is not None
        if not self.slots.pages.extend(slot, self._reservation(request), keep=request.num_cached):
            return False
        if request.num_cached == 0:
            self.slots.restart(slot)
        else:
            self.slots.truncate(slot, request.num_cached)
        request.num_computed = request.num_cached
        request.slot = slot
        self.slots.set_use(slot, SlotUse.RUNNING)
        return True

    def _reusable_prefix(self, slot: int, prompt: list[int]) -> int:
        """Tokens of the slot that the prompt begins with; at least one prompt token is left to compute.

        Recurrent state can only go forward: with it the slot's tokens are reused whole or not at all.
        """
        held = self.slots.token_ids[slot]
        common = 0
        for a, b in zip(held, prompt[:-1], strict=False):
            if a != b:
                break
            common += 1
        return common if common == len(held) or not self._has_state else 0
