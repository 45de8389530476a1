"""Writes down a generation as a response and its events. The whole response is what the events built."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from pocketllm.server.answers import Block, BlockEvent, Blocks
from pocketllm.server.chat_job import ChatJob
from pocketllm.server.errors import ApiError
from pocketllm.server.generation import Generation
from pocketllm.server.http import sse
from pocketllm.server.schemas.base import given
from pocketllm.server.schemas.responses import NamedFunction, ResponseRequest

_ITEM_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc"}
_PART_TYPE = {"reasoning": "reasoning_text", "text": "output_text"}


class ResponseWriter:
    """One answer's. An item is a block: reasoning, a message of one part, or a function call."""

    def __init__(self, model: str, body: ResponseRequest, job: ChatJob) -> None:
        self._response: dict[str, Any] = {
            "id": "",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": job.parallel_calls,
            "previous_response_id": None,
            "reasoning": given(body.reasoning) if body.reasoning is not None else None,
            "store": False,
            "temperature": job.params.temperature,
            "text": _text_options(body),
            "tool_choice": _tool_choice(body.tool_choice),
            "tools": [_tool(given(tool)) for tool in body.tools or ()],
            "top_p": job.params.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        self._items: list[dict[str, Any]] = []
        self._sequence = 0

    async def whole(self, generation: Generation) -> dict[str, Any]:
        async for _ in self._events(generation):
            pass
        return self._response

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        async for event in self._events(generation):
            yield sse(event, event["type"])

    def failure(self, error: Exception) -> bytes:
        """response.failed, which says why; then the older event of type error, which some clients raise."""
        told = ApiError.of(error)
        self._response |= {"status": "failed", "error": {"code": "server_error", "message": told.message}}
        failed = self._event("response.failed", response=self._response)
        final = self._event("error", code=told.type, message=told.message, param=None)
        return sse(failed, failed["type"]) + sse(final, final["type"])

    async def _events(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        self._response |= {"id": generation.id, "created_at": generation.created}
        yield self._event("response.created", response=dict(self._response))
        yield self._event("response.in_progress", response=dict(self._response))
        blocks = Blocks()
        reason = "stop"
        async for delta in generation.deltas():
            for change in blocks.push(delta.output):
                for event in self._change(change):
                    yield event
            reason = delta.finish.reason if delta.finish is not None else reason
        for change in blocks.finish():
            for event in self._change(change):
                yield event
        self._response |= {"output": self._items, "usage": _usage(generation), "completed_at": int(time.time())}
        if reason == "length":
            self._response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            if self._items:
                self._items[-1]["status"] = "incomplete"
            yield self._event("response.incomplete", response=self._response)
        else:
            self._response["status"] = "completed"
            yield self._event("response.completed", response=self._response)

    def _change(self, change: BlockEvent) -> Iterator[dict[str, Any]]:
        block = change.block
        if change.kind == "start":
            item = _new_item(block)
            self._items.append(item)
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind != "call":
                yield self._event("response.content_part.added", **self._place(block), part=_part(block))
        elif change.kind == "delta":
            yield self._delta(block, change.text)
        else:
            yield from self._stop(block)

    def _delta(self, block: Block, text: str) -> dict[str, Any]:
        if block.call is not None:
            place = {"item_id": self._items[block.index]["id"], "output_index": block.index}
            return self._event("response.function_call_arguments.delta", **place, delta=text)
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        return self._event(f"response.{_PART_TYPE[block.kind]}.delta", **self._place(block), delta=text, **more)

    def _stop(self, block: Block) -> Iterator[dict[str, Any]]:
        item = self._items[block.index]
        if block.call is not None:
            item["arguments"] = block.call.arguments
            place = {"item_id": item["id"], "output_index": block.index}
            done = {"name": block.call.name, "arguments": block.call.arguments}
            yield self._event("response.function_call_arguments.done", **place, **done)
        else:
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            yield self._event(f"response.{_PART_TYPE[block.kind]}.done", **self._place(block), text=block.text, **more)
            yield self._event("response.content_part.done", **self._place(block), part=_part(block))
            item["content"] = [_part(block)]
        item["status"] = "completed"
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._items[block.index]["id"], "output_index": block.index, "content_index": 0}

    def _event(self, type: str, **values: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": type, "sequence_number": self._sequence - 1, **values}


def _new_item(block: Block) -> dict[str, Any]:
    item: dict[str, Any] = {"id": f"{_ITEM_PREFIX[block.kind]}_{secrets.token_hex(12)}", "status": "in_progress"}
    if block.call is not None:
        call = {"type": "function_call", "call_id": block.call.id, "name": block.call.name, "arguments": ""}
        return item | call
    if block.kind == "reasoning":
        return item | {"type": "reasoning", "summary": [], "content": []}
    return item | {"type": "message", "role": "assistant", "content": []}


def _part(block: Block) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PART_TYPE[block.kind], "text": block.text}
    return part | ({"annotations": [], "logprobs": []} if block.kind == "text" else {})


def _tool_choice(choice: str | NamedFunction | None) -> str | dict[str, Any]:
    return given(choice) if isinstance(choice, NamedFunction) else choice or "auto"


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": None, "strict": None, **tool}


def _text_options(body: ResponseRequest) -> dict[str, Any]:
    format = body.text.format if body.text is not None else None
    return {"format": format.model_dump(exclude_unset=True, by_alias=True) if format is not None else {"type": "text"}}


def _usage(generation: Generation) -> dict[str, Any]:
    usage = generation.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
