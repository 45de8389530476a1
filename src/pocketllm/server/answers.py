"""Deltas put together: whole answers, and answers as a sequence of blocks (what Anthropic's and the Responses API write)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from pocketllm.engine.sampled import TokenLogprobs
from pocketllm.server.generation import Finish, Generation
from pocketllm.text.output_parser import OutputDelta

BlockKind = Literal["reasoning", "text", "call"]


@dataclass
class Call:
    """One call of a tool; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Answer:
    """One choice, whole."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish = field(default_factory=lambda: Finish("stop"))

    def add(self, output: OutputDelta) -> None:
        self.content += output.content
        self.reasoning += output.reasoning
        for delta in output.tool_calls:
            if delta.index == len(self.calls):
                self.calls.append(Call(delta.id or "", delta.name or ""))
            self.calls[delta.index].arguments += delta.arguments


async def collect(generation: Generation) -> list[Answer]:
    """All choices of a generation, in order."""
    answers = [Answer() for _ in range(generation.num_choices)]
    async for delta in generation.deltas():
        answer = answers[delta.choice]
        answer.add(delta.output)
        answer.tokens += delta.tokens
        answer.logprobs += delta.logprobs
        if delta.finish is not None:
            answer.finish = delta.finish
    return answers


@dataclass
class Block:
    """A stretch of one kind. `call` is set for a tool call, whose text is its arguments."""

    index: int
    kind: BlockKind
    text: str = ""
    call: Call | None = None


@dataclass(frozen=True)
class BlockEvent:
    """start: a block begins, empty; delta: `text` was added to it; stop: it is complete."""

    kind: Literal["start", "delta", "stop"]
    block: Block
    text: str = ""


class Blocks:
    """Turns the deltas of one choice into blocks, one open at a time."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._calls = 0

    def push(self, output: OutputDelta) -> Iterator[BlockEvent]:
        if output.reasoning:
            yield from self._add("reasoning", output.reasoning)
        if output.content:
            yield from self._add("text", output.content)
        for delta in output.tool_calls:
            if delta.index == self._calls:
                self._calls += 1
                yield from self._begin("call", Call(delta.id or "", delta.name or ""))
            if delta.arguments:
                yield from self._add("call", delta.arguments)

    def finish(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            yield BlockEvent("stop", self._open)
            self._open = None

    def _add(self, kind: BlockKind, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.text += text
        if self._open.call is not None:
            self._open.call.arguments += text
        yield BlockEvent("delta", self._open, text)

    def _begin(self, kind: BlockKind, call: Call | None = None) -> Iterator[BlockEvent]:
        yield from self.finish()
        self._open = Block(len(self.all), kind, call=call)
        self.all.append(self._open)
        yield BlockEvent("start", self._open)
