"""`Generation`: the running choices of one HTTP request, as a stream of text deltas.

Every route, streaming or not, reads the same deltas; what differs between the APIs is how they are written down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from pocketllm.engine.async_engine import AsyncEngine
from pocketllm.engine.constraint import TokenConstraint
from pocketllm.engine.request import RequestOutput
from pocketllm.engine.sampled import TokenLogprobs
from pocketllm.options import SamplingParams
from pocketllm.server.errors import generation_failed, shutting_down
from pocketllm.server.shared_prompt import SharedPrompt
from pocketllm.text.output_parser import OutputDelta, OutputParser
from pocketllm.text.stream import TextStream

T = TypeVar("T")
Reason = Literal["stop", "length", "tool_calls"]


class Observer(Protocol):
    """Who is told how a request goes (the metrics)."""

    def on_token(self, seconds: float, *, first: bool) -> None:
        """seconds: since the request's start if first, else since its token before."""

    def on_end(self, reason: str, seconds: float, usage: Usage) -> None: ...


@dataclass(frozen=True)
class Choice:
    """What is asked for one answer. prompt: number of its prompt in the HTTP request."""

    prompt: int
    prompt_ids: list[int]
    params: SamplingParams
    text: TextStream
    parser: OutputParser
    constraint: TokenConstraint | None = None
    max_calls: int | None = None  # end before one more tool call

    def exceeded(self, output: OutputDelta) -> bool:
        return self.max_calls is not None and any(call.index >= self.max_calls for call in output.tool_calls)


@dataclass(frozen=True)
class Finish:
    """stop: the stop string that was met."""

    reason: Reason
    stop: str | None = None


@dataclass(frozen=True)
class Delta:
    """News of one choice. `tokens` and `logprobs` are those of the step, whose text may be held back for later."""

    choice: int
    output: OutputDelta
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish: Finish | None


@dataclass
class Usage:
    """prompt tokens count once a prompt, however many choices it has; cached ones were not computed again."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass
class _Running:
    choice: Choice
    request_id: str
    usage: Usage
    outputs: AsyncIterator[RequestOutput] | None = None
    last_token: float | None = None
    ended: bool = False


@dataclass(eq=False)
class Generation:
    """Iterate over `deltas()` once. `close` ends what still runs: safe at any time, from the event loop, repeatedly."""

    id: str
    engine: AsyncEngine
    observer: Observer
    created: int = field(default_factory=lambda: int(time.time()))
    _started: float = field(default_factory=time.perf_counter)
    _running: list[_Running] = field(default_factory=list)
    _shared: SharedPrompt | None = None

    @property
    def num_choices(self) -> int:
        return len(self._running)

    async def start(self, choices: Sequence[Choice]) -> None:
        """Queue them all, or none: QueueFull or RequestError if the engine refuses one. Several of one prompt share it."""
        try:
            if len(choices) > 1 and len({choice.prompt for choice in choices}) == 1:
                ids, max_tokens = choices[0].prompt_ids, choices[0].params.max_tokens
                self._shared = SharedPrompt(self.engine, f"{self.id}-prompt", ids, max_tokens)
                await self._shared.compute()
            for choice in choices:
                await self._add(choice, last=choice is choices[-1])
        except BaseException:
            self.close()
            raise
        finally:
            if self._shared is not None:
                self._shared.close()

    async def _add(self, choice: Choice, *, last: bool) -> None:
        request_id = f"{self.id}-{len(self._running)}"
        running = _Running(choice, request_id, Usage(prompt_tokens=len(choice.prompt_ids)))
        self._running.append(running)  # first: a cancelled submit may have queued the request
        _, running.outputs = await self.engine.submit(
            choice.prompt_ids,
            choice.params,
            request_id=request_id,
            slot=self._shared.lend(request_id, last=last) if self._shared is not None else None,
            constraint=choice.constraint,
        )

    def close(self) -> None:
        for running in self._running:
            self._end(running, "abort")

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """ApiError if the engine fails a choice, or shuts down; the others are ended then."""
        try:
            async for delta in _merge([self._read(i, running) for i, running in enumerate(self._running)]):
                yield delta
        finally:
            self.close()

    @property
    def usage(self) -> Usage:
        """Of all choices so far."""
        total, prompts = Usage(), set[int]()
        for running in self._running:
            if running.choice.prompt not in prompts:
                prompts.add(running.choice.prompt)
                total.prompt_tokens += running.usage.prompt_tokens
                total.cached_tokens += running.usage.cached_tokens
            total.completion_tokens += running.usage.completion_tokens
            total.reasoning_tokens += running.usage.reasoning_tokens
        return total

    async def _read(self, index: int, running: _Running) -> AsyncGenerator[Delta, None]:
        assert running.outputs is not None
        async for output in running.outputs:
            delta = self._advance(index, running, output)
            if delta.finish is not None:
                self._end(running, delta.finish.reason)
            yield delta
            if delta.finish is not None:
                return

    def _advance(self, index: int, running: _Running, output: RequestOutput) -> Delta:
        choice, usage, tokens = running.choice, running.usage, output.new_token_ids
        if output.error is not None:
            self._end(running, "error")
            raise generation_failed(output.error)
        if output.finish_reason == "abort":
            raise shutting_down()
        parts: list[OutputDelta] = []
        for (
            token
        ) in tokens:  # one by one: what comes after a stop string, in the same step or held back, does not count
            usage.reasoning_tokens += choice.parser.in_reasoning
            parts.append(choice.parser.push(choice.text.push((token,))))
            if choice.text.stopped is not None or choice.exceeded(parts[-1]):
                break
        used = len(parts)
        self._count(running, output, used)
        stopped = choice.text.stopped is not None
        reason: Reason | None = "stop" if stopped else _reason(output) if used == len(tokens) else None
        if reason is not None:
            parts += [choice.parser.push(choice.text.finish()), choice.parser.finish()]
        parsed = _join(*parts)
        if choice.exceeded(parsed):
            calls = tuple(call for call in parsed.tool_calls if call.index < (choice.max_calls or 0))
            parsed, reason = OutputDelta(parsed.content, parsed.reasoning, calls), "stop"
        if reason == "stop" and choice.parser.has_tool_calls:
            reason = "tool_calls"
        finish = Finish(reason, choice.text.stopped) if reason is not None else None
        return Delta(index, parsed, tokens[:used], output.logprobs[:used], finish)

    def _count(self, running: _Running, output: RequestOutput, used: int) -> None:
        if self._shared is None:  # what the choices share was computed for this very request
            running.usage.cached_tokens = output.num_cached_tokens
        running.usage.completion_tokens += used
        now, before = time.perf_counter(), running.last_token
        if used and before is None:
            self.observer.on_token(now - self._started, first=True)
        elif used and before is not None:
            for _ in range(used):
                self.observer.on_token((now - before) / used, first=False)
        running.last_token = now if used else before

    def _end(self, running: _Running, reason: str) -> None:
        if not running.ended:
            running.ended = True
            self.engine.abandon(running.request_id)  # does nothing if the engine has ended it
            if self._shared is not None:
                self._shared.give_back(running.request_id)
            self.observer.on_end(reason, time.perf_counter() - self._started, running.usage)


def _reason(output: RequestOutput) -> Reason | None:
    return "length" if output.finish_reason == "length" else "stop" if output.finish_reason == "stop" else None


def _join(*parts: OutputDelta) -> OutputDelta:
    return OutputDelta(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(call for part in parts for call in part.tool_calls),
    )


async def _merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all streams as they come. The first exception of any is raised."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield item
        return
    items: asyncio.Queue[T | Exception | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        try:
            async for item in stream:
                items.put_nowait(item)
        except Exception as error:
            items.put_nowait(error)
        items.put_nowait(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            news = await items.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                left -= 1
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
