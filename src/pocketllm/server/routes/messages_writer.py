"""Writes down a generation as Anthropic's message and its events. The whole message is what the events built."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from pocketllm.server.answers import Block, BlockEvent, Blocks
from pocketllm.server.errors import ApiError
from pocketllm.server.generation import Finish, Generation, Usage
from pocketllm.server.http import sse

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageWriter:
    def __init__(self, model: str) -> None:
        self._model = model
        self._blocks = Blocks()
        self._finish = Finish("stop")

    async def whole(self, generation: Generation) -> dict[str, Any]:
        async for _ in self._events(generation):
            pass
        content = [_content(block) for block in self._blocks.all]
        return {**self._message(generation), "content": content, **self._stop(), "usage": _usage(generation.usage)}

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        async for event in self._events(generation):
            yield sse(event, event["type"])

    def failure(self, error: Exception) -> bytes:
        return sse(ApiError.of(error).anthropic(), "error")

    async def _events(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        yield {"type": "message_start", "message": self._message(generation)}
        yield {"type": "ping"}
        async for delta in generation.deltas():
            for change in self._blocks.push(delta.output):
                for event in _change(change):
                    yield event
            self._finish = delta.finish or self._finish
        for change in self._blocks.finish():
            for event in _change(change):
                yield event
        yield {"type": "message_delta", "delta": self._stop(), "usage": _usage(generation.usage)}
        yield {"type": "message_stop"}

    def _message(self, generation: Generation) -> dict[str, Any]:
        return {
            "id": generation.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(generation.usage),
        }

    def _stop(self) -> dict[str, Any]:
        if self._finish.stop is not None and self._finish.reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": self._finish.stop}
        return {"stop_reason": _STOP_REASONS[self._finish.reason], "stop_sequence": None}


def _change(change: BlockEvent) -> Iterator[dict[str, Any]]:
    block = change.block
    if change.kind == "start":
        yield {"type": "content_block_start", "index": block.index, "content_block": _empty(block)}
    elif change.kind == "delta":
        type, field = _DELTAS[block.kind]
        yield {"type": "content_block_delta", "index": block.index, "delta": {"type": type, field: change.text}}
    else:
        if block.kind == "reasoning":  # clients expect a signature, which nobody here checks
            signature = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", "index": block.index, "delta": signature}
        yield {"type": "content_block_stop", "index": block.index}


def _empty(block: Block) -> dict[str, Any]:
    if block.call is not None:
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _content(block: Block) -> dict[str, Any]:
    if block.call is not None:
        return {**_empty(block), "input": _arguments(block.call.arguments)}
    return {**_empty(block), "thinking" if block.kind == "reasoning" else "text": block.text}


def _arguments(text: str) -> Any:
    """Of a call that was cut off by the token limit, as much as can be read: nothing."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts cached prompt tokens apart from the others."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
