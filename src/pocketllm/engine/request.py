"""A user's job and what comes back from it, in token ids; and counts of all of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from pocketllm.engine.constraint import TokenConstraint
from pocketllm.engine.sampled import TokenLogprobs
from pocketllm.options import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class State(Enum):
    WAITING = "waiting"  # in the queue
    PREFILL = "prefill"  # has a slot, its prompt is not computed yet
    DECODE = "decode"  # generating
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One generation. `slot` is None while it waits; a request bound to a caller's slot keeps it after the end."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    bound_slot: int | None = None
    constraint: TokenConstraint | None = None
    state: State = State.WAITING
    slot: int | None = None
    num_computed: int = 0  # tokens of prompt and output in the cache
    num_cached: int = 0  # prompt tokens that were in the bound slot already
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None  # perf_counter seconds
    finished: float | None = None

    def tokens_so_far(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    def mark_token(self) -> None:
        if self.first_token is None:
            self.first_token = time.perf_counter()

    def mark_end(self) -> None:
        self.finished = time.perf_counter()

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens start..end-1 of prompt and output, without joining the two."""
        split = len(self.prompt_ids)
        return self.prompt_ids[start:end] + self.output_ids[max(start - split, 0) : max(end - split, 0)]


@dataclass(frozen=True)
class RequestOutput:
    """What one step produced for one request."""

    request_id: str
    slot: int | None
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    error: Exception | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def then(self, later: RequestOutput) -> RequestOutput:
        """This output and the one of the request's next step as one."""
        tokens, logprobs = self.new_token_ids + later.new_token_ids, self.logprobs + later.logprobs
        return replace(later, new_token_ids=tokens, logprobs=logprobs)


@dataclass(frozen=True)
class EngineStats:
    """Counters since construction, and the state of slots and pages now."""

    steps: int
    prompt_tokens: int  # computed by prefill passes, recomputation included
    output_tokens: int
    waiting: int
    running: int
    free_slots: int
    drafted_tokens: int = 0  # by the engine's drafter, and verified
    accepted_tokens: int = 0  # of those, the ones that were right
