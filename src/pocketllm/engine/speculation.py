"""`Speculation`: when a decode step becomes a verify pass, and of which tokens.

A verify pass computes a slot's last token and some drafted ones at once; each row of its logits is what decode would have
given. So tokens are sampled from one row after the other for as long as the drafts turn out to be what is sampled: with the
same random numbers, penalties and constraints, an answer is the same with drafts or without, whatever the temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pocketllm.engine.drafters import Drafter, NgramDrafter
from pocketllm.engine.graphs import padded_size
from pocketllm.engine.inputs import SlotTokens
from pocketllm.engine.payoff import Payoff
from pocketllm.engine.request import Request
from pocketllm.engine.slots import SlotTable
from pocketllm.parallel import SMALL_BATCH

DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}  # of one request; "mtp" drafts for all at once
DraftForAll = Callable[[Sequence[SlotTokens]], list[list[int]]]  # see `engine.mtp.MtpDrafts.propose`
_LONGEST_PAUSE = 16  # steps


@dataclass
class _Guesses:
    """Of one request. Drafts that are wrong from the first token on are followed by a pause, each twice as long as the one
    before, until a draft is right."""

    drafter: Drafter
    pause: int = 0
    left: int = 0  # steps of the pause


@dataclass
class Speculation:
    """most: drafted tokens of a slot, at most. Drafts are made by a drafter of each request's own, or for all at once."""

    slots: SlotTable
    most: int
    make: Callable[[], Drafter] | None = None
    draft_all: DraftForAll | None = None
    payoff: Payoff | None = None  # of drafts that cost time; None: they are always made
    stopped: bool = False  # drafts can't be made
    drafted_tokens: int = 0  # since construction
    accepted_tokens: int = 0
    _guesses: dict[str, _Guesses] = field(default_factory=dict)  # by request
    _drafted: dict[str, int] = field(default_factory=dict)  # tokens of drafts that are being verified

    def plan(self, items: Sequence[SlotTokens], requests: Sequence[Request]) -> list[SlotTokens] | None:
        """The items of a decode pass with drafts behind them, all of one length; each must be noted then. None where
        decoding is as good: fewer than half of the slots have a draft, one has no room for it, or drafts have not paid.
        Nor are there more rows than those whose results do not depend on their number."""
        size = padded_size(len(items))
        if self.stopped:
            return None
        if size * (1 + self.most) > SMALL_BATCH or (self.payoff is not None and not self.payoff.drafts_pay(size)):
            return None
        if self.draft_all is None:
            drafts = [self._draft(request) for request in requests]
            if 2 * sum(map(bool, drafts)) < len(items) or not self._make_room(items):
                return None
        else:
            wanted = sum(self._limit(request) > 0 for request in requests)
            if 2 * wanted < len(items) or not self._make_room(items):
                return None
            drafts = self._draft_all(self.draft_all, items, requests)
            if 2 * sum(map(bool, drafts)) < len(items):
                return None
        planned = []
        for item, request, draft in zip(items, requests, drafts, strict=True):
            padding = [0] * (self.most - len(draft))
            planned.append(SlotTokens(item.slot, item.start, [*item.token_ids, *draft, *padding]))
            self._drafted[request.request_id] = len(draft)
        return planned

    def _draft_all(
        self, draft: DraftForAll, items: Sequence[SlotTokens], requests: Sequence[Request]
    ) -> list[list[int]]:
        newest = []
        for item, request in zip(items, requests, strict=True):
            start = max(item.start - self.most, 0)
            newest.append(SlotTokens(item.slot, start, request.tokens(start, item.start + 1)))
        found = draft(newest)
        return [tokens[: self._limit(request)] for tokens, request in zip(found, requests, strict=True)]

    def _limit(self, request: Request) -> int:
        """Tokens of a draft that the request has use for."""
        if request.params.max_tokens is None:
            return self.most
        return min(self.most, request.params.max_tokens - len(request.output_ids) - 1)

    def _draft(self, request: Request) -> list[int]:
        assert self.make is not None
        if request.request_id not in self._guesses:
            self._guesses[request.request_id] = _Guesses(self.make())
        guesses = self._guesses[request.request_id]
        if guesses.left > 0:
            guesses.left -= 1
            return []
        return guesses.drafter.propose(request.tokens, request.num_tokens, self._limit(request))

    def _make_room(self, items: Sequence[SlotTokens]) -> bool:
        """Whether each slot has room for its item and drafts; it is promised then, and pages are there."""
        if not all(map(self._reserve, items)):
            return False
        for item in items:
            self.slots.prepare_write(item.slot, 1 + self.most)
        return True

    def _reserve(self, item: SlotTokens) -> bool:
        end = item.start + 1 + self.most
        return end <= self.slots.max_context and self.slots.pages.extend(item.slot, end)

    def note(self, request: Request, accepted: int) -> None:
        """Of a planned item, so many drafted tokens were right. (More than were drafted: padding can be, too.)"""
        drafted = self._drafted.pop(request.request_id)
        accepted = min(accepted, drafted)
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        guesses = self._guesses.get(request.request_id)
        if guesses is None:  # it has ended
            return
        if accepted:
            guesses.pause = 0
        elif drafted:
            guesses.pause = guesses.left = min(max(2 * guesses.pause, 1), _LONGEST_PAUSE)

    def took(self, num_slots: int, verified: bool, seconds: float, tokens: int) -> None:
        """A pass of so many slots, with all that belongs to it, and the tokens it gave."""
        if self.payoff is not None:
            self.payoff.note(padded_size(num_slots), verified, seconds, tokens / num_slots)

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._guesses.pop(request.request_id, None)
