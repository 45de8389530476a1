"""`Engine`: a `SlotEngine` with a queue, a scheduler and a sampler. The loop, in token ids.

`add_request` queues, `step` computes one step for all requests that have a slot, `end_request` ends one early. Explicit
slots can be used beside it: a caller's slot can be lent to requests, one after the other (a conversation's turns).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pocketllm.engine.ahead import DecodeAhead
from pocketllm.engine.constraint import TokenConstraint
from pocketllm.engine.inputs import SlotTokens
from pocketllm.engine.payoff import Payoff
from pocketllm.engine.rank import Launch
from pocketllm.engine.ranks import start_ranks
from pocketllm.engine.request import EngineStats, FinishReason, Request, RequestOutput, State
from pocketllm.engine.sampled import SampleResult, TokenLogprobs
from pocketllm.engine.sampler import Sampler, uniform
from pocketllm.engine.scheduler import Scheduler
from pocketllm.engine.slot_engine import SlotEngine
from pocketllm.engine.speculation import DRAFTERS, Speculation
from pocketllm.errors import PocketLLMError, RankError, RequestError
from pocketllm.kernels.protocol import Kernels
from pocketllm.layers.batch import Kind
from pocketllm.models.registry import Checkpoint
from pocketllm.options import EngineOptions, SamplingParams

_NOTHING_LEFT = (
    "no token is left to choose: everything that the request's constraint allows is forbidden by min_tokens or logit_bias "
    "(or logit_bias forbids every token)"
)


class Engine(SlotEngine):
    """See the module. An error of one request is that request's result; the engine and the other requests go on."""

    def __init__(
        self,
        model: str | Path | Checkpoint | None = None,
        options: EngineOptions | None = None,
        *,
        vocab_limit: int | None = None,
        backend: Kernels | None = None,
        launch: Launch = start_ranks,
        **option_values: Any,
    ) -> None:
        """As `SlotEngine`. vocab_limit: token ids from here on are never sampled (a model may have more rows than its
        tokenizer has tokens)."""
        super().__init__(model, options, backend=backend, launch=launch, **option_values)
        self.sampler = Sampler(self.plan.kv.num_slots, self.config.vocab_size, self.device, vocab_limit)
        self.scheduler = Scheduler(
            self.slots,
            prefill_chunk=self.options.chunk_tokens(self.device.type),
            max_queue=self.options.max_queue,
            has_state=self.has_state,
        )
        self._ahead = DecodeAhead(self.passes, self.slots, self.has_state)
        self._speculation: Speculation | None = None
        if self.options.drafter == "mtp":
            most = self.options.max_draft_tokens
            self._speculation = Speculation(self.slots, most, draft_all=self._own_drafts, payoff=Payoff())
        elif self.options.drafter != "none":
            make = DRAFTERS[self.options.drafter]
            self._speculation = Speculation(self.slots, self.options.max_draft_tokens, make)
        # A CPU has nothing to wait for: it is the device and the host. And drafts are made of tokens that the host has seen.
        self.looks_ahead = self.device.type == "cuda" and self._speculation is None
        self.stalled = False  # at the last step requests waited, and none can run until a caller releases a slot
        self._requests: dict[str, Request] = {}  # not finished yet
        self._steps = self._prompt_tokens = self._output_tokens = self._num_requests = 0

    # -- requests ----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        slot: int | None = None,
        constraint: TokenConstraint | None = None,
    ) -> str:
        """Queue one generation and return its id.

        slot        run in this acquired slot, reusing the tokens it holds as far as the prompt begins with them; the slot
                    stays the caller's afterwards
        constraint  limits which tokens are chosen; this request's own, used by no other

        RequestError, QueueFull or SlotError if it is refused; nothing is queued then.
        """
        params = params or SamplingParams()
        prompt = self.check_tokens(prompt_ids)
        for token in (*params.logit_bias, *params.stop_token_ids):
            if token >= self.sampler.vocab_limit:
                raise RequestError(f"token id {token}: this model's ids are 0 to {self.sampler.vocab_limit - 1}")
        request_id = request_id if request_id is not None else f"request-{self._num_requests}"
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use: choose another")
        seed = params.seed if params.seed is not None else int(uniform(self.options.seed, self._num_requests) * 2**53)
        request = Request(request_id, prompt, params, seed, bound_slot=slot, constraint=constraint)
        self.scheduler.add(request)
        self._num_requests += 1
        self._requests[request_id] = request
        return request_id

    def end_request(self, request_id: str, reason: FinishReason = "abort") -> RequestOutput | None:
        """End a request now, whatever it is doing; its slot is free at once. None if no such request is unfinished.

        reason "stop": the text layer saw a stop string. A caller's slot keeps the request's tokens; but on a GPU, with a
        model that has recurrent state, it is empty after a request that nothing but its length could have ended
        (`engine.ahead`): the next one computes them anew.
        """
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, reason)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        return EngineStats(
            self._steps,
            self._prompt_tokens,
            self._output_tokens,
            len(scheduler.waiting),
            len(scheduler.running),
            self.slots.num_free,
            0 if self._speculation is None else self._speculation.drafted_tokens,
            0 if self._speculation is None else self._speculation.accepted_tokens,
        )

    def step(self) -> list[RequestOutput]:
        """One step for all admitted requests: returns what is new for each that produced a token or ended."""
        plan = self.scheduler.schedule()
        self.stalled = plan.empty and self.has_work
        if plan.empty:
            return []
        self._steps += 1
        outputs = [self._finish(request, "length") for request in plan.ended]
        outputs += self._run("prefill", plan.prefill, plan.prefill_requests)
        outputs += self._decode_or_verify(plan.decode, plan.decode_requests, timed=not plan.prefill)
        self._prompt_tokens += sum(len(item.token_ids) for item in plan.prefill)
        return outputs

    def _decode_or_verify(
        self, items: list[SlotTokens], requests: list[Request], *, timed: bool
    ) -> list[RequestOutput]:
        """timed: nothing else is on the device, so that the pass's time says whether drafts pay."""
        if self._speculation is None or not items:
            return self._run("decode", items, requests)
        start = time.perf_counter()
        planned = self._speculation.plan(items, requests)
        if planned is None:
            outputs = self._run("decode", items, requests)
        else:
            outputs = self._verify(self._speculation, planned, items, requests)
        tokens = sum(len(output.new_token_ids) for output in outputs)
        if timed:
            self._speculation.took(len(items), planned is not None, time.perf_counter() - start, tokens)
        return outputs

    def _verify(
        self, speculation: Speculation, planned: list[SlotTokens], items: list[SlotTokens], requests: list[Request]
    ) -> list[RequestOutput]:
        """A verify pass, and a token for each row of its logits as long as drafts are right. items: as for decode."""
        passed = self.passes.run("verify", planned, [request.tokens_so_far for request in requests])
        rows: list[tuple[Request, SlotTokens, Tensor]] = []
        failed: list[int] = []  # perhaps because of what was drafted
        for i, (item, request, result) in enumerate(zip(planned, requests, passed, strict=True)):
            if result.logits is None:
                failed.append(i)
            else:
                rows.append((request, item, result.logits))
        again = self._run("decode", [items[i] for i in failed], [requests[i] for i in failed])
        outputs = {output.request_id: output for output in again}
        kept = {item.slot: 0 for _, item, _ in rows}  # tokens of the pass
        chosen = self._sample_at_once(rows)
        left = rows
        while left:
            found: list[RequestOutput] = []
            open_rows: list[tuple[Request, Tensor]] = []
            for request, item, logits in left:
                at = kept[item.slot]
                self.scheduler.commit(request, SlotTokens(item.slot, item.start + at, item.token_ids[at : at + 1]))
                kept[item.slot] += 1
                if item.slot in chosen:
                    samples, first = chosen[item.slot]
                    found.append(self._outcome(request, samples, first + at))
                else:
                    open_rows.append((request, logits[at]))
            for output in found + (self._sample(open_rows) if open_rows else []):
                before = outputs.get(output.request_id)
                outputs[output.request_id] = output if before is None else before.then(output)
            left = [row for row in left if self._is_right(row[0], row[1], kept[row[1].slot])]
        if kept:
            self.runner.commit(list(kept), list(kept.values()))
        for item, request in zip(planned, requests, strict=True):
            speculation.note(request, max(kept.get(item.slot, 0) - 1, 0))
        return list(outputs.values())

    def _own_drafts(self, newest: Sequence[SlotTokens]) -> list[list[int]]:
        """The model's own, of slots whose newest tokens are given (see `MtpDrafts.propose`)."""
        self.runner.apply(*self.slots.take_changes())
        try:
            drafts: list[list[int]] = self.runner.propose(newest).tolist()
        except RankError:
            raise
        except Exception as error:  # no answer needs a draft
            text = f"no drafts from now on, and slower answers: {type(error).__name__}: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=1)
            assert self._speculation is not None
            self._speculation.stopped = True
            return [[] for _ in newest]
        return drafts

    @staticmethod
    def _is_right(request: Request, item: SlotTokens, at: int) -> bool:
        """Whether the request goes on with what was computed as the pass's token number `at`."""
        drafted = request.state is not State.FINISHED and at < len(item.token_ids)
        return drafted and request.output_ids[-1] == item.token_ids[at]

    def _run(self, kind: Kind, items: list[SlotTokens], requests: list[Request]) -> list[RequestOutput]:
        """One pass: forward, advance, sample, see who has ended."""
        if not items:
            return []
        histories = [request.tokens_so_far for request in requests]
        outputs: list[RequestOutput] = []
        ready: list[tuple[Request, Tensor]] = []
        results = [self._ahead.take(*pair) if kind == "decode" else None for pair in zip(items, requests, strict=True)]
        left = [i for i, result in enumerate(results) if result is None]
        if left:
            passed = self.passes.run(kind, [items[i] for i in left], [histories[i] for i in left])
            for i, found in zip(left, passed, strict=True):
                results[i] = found
        for item, request, result in zip(items, requests, results, strict=True):
            assert result is not None
            if result.error is not None:
                outputs.append(self._finish(request, "error", result.error))
                continue
            self.scheduler.commit(request, item)
            if result.logits is not None:
                ready.append((request, result.logits))
        return outputs + (self._sample(ready) if ready else [])

    def _sample(self, ready: list[tuple[Request, Tensor]]) -> list[RequestOutput]:
        """Choose the next token of each request from its logits row [V]."""
        ready, allowed, outputs = self._ask_constraints(ready)
        if not ready:
            return outputs
        requests = [request for request, _ in ready]
        slots = []
        for request in requests:
            assert request.slot is not None
            slots.append(request.slot)
            if not request.output_ids:
                self.sampler.start(
                    request.slot, request.params, request.prompt_ids, self.config.eos_token_ids, request.seed
                )
        result = self.sampler.sample(
            torch.stack([logits for _, logits in ready]),
            slots,
            [request.num_tokens for request in requests],
            [len(request.output_ids) for request in requests],
            allowed,
        )
        if self.looks_ahead and result.simple and len(requests) == len(self.scheduler.running):
            result.send()
            self._ahead.launch(requests, result.tokens)
        bad = result.bad
        self.check_ranks()  # one that died while this was computed
        good = [i for i in range(len(requests)) if i not in bad]
        self.sampler.record([slots[i] for i in good], result.tokens[good] if bad else result.tokens)
        return outputs + [self._outcome(request, result, i) for i, request in enumerate(requests)]

    def _sample_at_once(self, rows: list[tuple[Request, SlotTokens, Tensor]]) -> dict[int, tuple[SampleResult, int]]:
        """Choose from all rows of a verify pass, for the requests whose choices do not depend on the ones before: the host
        waits for the device once, not for each token. By slot, the result and which of its rows is the first."""
        some = [row for row in rows if row[0].constraint is None and self.sampler.at_once(row[1].slot)]
        if not some:
            return {}
        firsts: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        generated: list[int] = []
        for request, item, logits in some:
            firsts.append(len(slots))
            slots += [item.slot] * len(logits)
            positions += range(request.num_tokens, request.num_tokens + len(logits))
            generated += range(len(request.output_ids), len(request.output_ids) + len(logits))
        result = self.sampler.sample(torch.cat([logits for _, _, logits in some]), slots, positions, generated)
        _ = result.token_ids
        self.check_ranks()
        return {item.slot: (result, first) for (_, item, _), first in zip(some, firsts, strict=True)}

    def _outcome(self, request: Request, result: SampleResult, row: int) -> RequestOutput:
        """The request has its next token, or fails."""
        if row not in result.bad:
            return self._append(request, result.token_ids[row], result.logprobs.get(row))
        if row in result.forbidden:
            return self._finish(request, "error", RequestError(_NOTHING_LEFT))
        problem = RequestError(f"the model's logits after token {request.num_tokens - 1} are not finite")
        output = self._finish(request, "error", problem)
        if request.bound_slot is not None:  # what the caller's slot holds now would spoil its next turn
            self.slots.restart(request.bound_slot)
        return output

    def _ask_constraints(
        self, ready: list[tuple[Request, Tensor]]
    ) -> tuple[list[tuple[Request, Tensor]], dict[int, Tensor], list[RequestOutput]]:
        """Those whose constraint answers (or that have none), its answers by row, and the ends of the others."""
        kept: list[tuple[Request, Tensor]] = []
        allowed: dict[int, Tensor] = {}
        failed: list[RequestOutput] = []
        for request, logits in ready:
            try:
                mask = request.constraint.allowed() if request.constraint is not None else None
            except Exception as error:
                failed.append(self._finish(request, "error", _of_constraint(error)))
                continue
            if mask is not None:
                allowed[len(kept)] = mask
            kept.append((request, logits))
        return kept, allowed, failed

    def _append(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> RequestOutput:
        request.output_ids.append(token)
        request.mark_token()
        self._output_tokens += 1
        new = ((token,), (logprobs,) if logprobs is not None else ())
        params, generated = request.params, len(request.output_ids)
        stops = (not params.ignore_eos and token in self.config.eos_token_ids) or token in params.stop_token_ids
        if stops and generated >= params.min_tokens:
            return self._finish(request, "stop", None, *new)
        if request.constraint is not None:
            try:
                request.constraint.accept(token)
                complete = request.constraint.finished
            except Exception as error:
                return self._finish(request, "error", _of_constraint(error), *new)
            if complete and generated >= params.min_tokens:
                return self._finish(request, "stop", None, *new)
        if generated == params.max_tokens:
            return self._finish(request, "length", None, *new)
        return self._output(request, *new)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        error: Exception | None = None,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> RequestOutput:
        spoiled = self._ahead.drop(request)
        if request.slot is not None:
            self.sampler.stop(request.slot)
        if request.state is not State.FINISHED:
            self.scheduler.finish(request, reason, error)
        if spoiled and request.bound_slot is not None:
            self.slots.restart(request.bound_slot)
        self._requests.pop(request.request_id, None)
        if self._speculation is not None:
            self._speculation.forget(request)
        request.mark_end()
        return self._output(request, tokens, logprobs)

    @staticmethod
    def _output(request: Request, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            slot=request.slot,
            new_token_ids=tokens,
            logprobs=logprobs,
            finish_reason=request.finish_reason,
            error=request.error,
            num_prompt_tokens=len(request.prompt_ids),
            num_cached_tokens=request.num_cached,
            num_output_tokens=len(request.output_ids),
        )


def _of_constraint(error: Exception) -> Exception:
    if isinstance(error, PocketLLMError):
        return error
    described = RequestError(f"the request's constraint failed: {type(error).__name__}: {error}")
    described.__cause__ = error
    return described
