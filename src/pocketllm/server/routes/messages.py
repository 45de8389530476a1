"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API.

Thinking is off unless the request's `thinking` switches it on, as in Anthropic's own service.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from pocketllm.errors import RequestError
from pocketllm.options import SamplingParams
from pocketllm.server.chat_job import ChatJob, Thinking, ToolChoice, ToolMode
from pocketllm.server.http import CLIENT_CLOSED_REQUEST, JsonResponse, unless_gone
from pocketllm.server.routes.messages_writer import MessageWriter
from pocketllm.server.routes.reply import reply
from pocketllm.server.schemas import anthropic as schema
from pocketllm.server.schemas.base import Json, stop_strings
from pocketllm.server.service import Service
from pocketllm.text.grammar import JsonSchema

_MODES: dict[str, ToolMode] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/messages", response_model=None)
    async def messages(body: schema.MessageRequest, request: Request) -> Response:
        service.check_model(body.model)
        starting = service.start_chat(message_job(body, message_params(body, service.defaults)), "msg_")
        return await reply(service, request, starting, MessageWriter(service.model), stream=body.stream is True)

    @routes.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(body: schema.CountRequest, request: Request) -> Response:
        service.check_model(body.model)
        counted = await unless_gone(request, service.prompts.chat(message_job(body, SamplingParams())))
        if counted is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JsonResponse({"input_tokens": len(counted[1])})

    return routes


def message_params(body: schema.MessageRequest, defaults: dict[str, float]) -> SamplingParams:
    values: dict[str, Any] = {**defaults, "max_tokens": body.max_tokens, "stop": stop_strings(body.stop_sequences)}
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    return SamplingParams.of(**values)


def message_job(body: schema.CountRequest, params: SamplingParams) -> ChatJob:
    choice = body.tool_choice or schema.ToolChoice(type="auto")
    if (choice.type == "tool") != (choice.name is not None):
        raise RequestError("tool_choice of type tool needs the tool's name, the other types have none")
    format = body.output_config.format if body.output_config is not None else None
    messages = tuple(_messages(body))
    unfinished = messages[-1]["role"] == "assistant"  # the answer goes on where the last message ends
    return ChatJob(
        messages=messages,
        params=params,
        tools=tuple(_tool(tool) for tool in body.tools or ()),
        tool_choice=ToolChoice(_MODES[choice.type], choice.name),
        parallel_calls=choice.disable_parallel_tool_use is not True,
        form=JsonSchema(format.schema_) if format is not None else None,
        thinking=_thinking(body),
        add_generation_prompt=not unfinished,
        continue_final_message=unfinished,
    )


def _thinking(body: schema.CountRequest) -> Thinking:
    thinking, effort = body.thinking, body.output_config.effort if body.output_config is not None else None
    if thinking is None or thinking.type == "disabled":
        if thinking is not None and thinking.budget_tokens is not None:
            raise RequestError("thinking.budget_tokens was given, but thinking is disabled")
        return Thinking(enabled=False, effort=effort)
    if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        raise RequestError("thinking of type enabled needs budget_tokens, adaptive has none")
    return Thinking(enabled=True, effort=effort, budget=thinking.budget_tokens)


def _tool(tool: schema.ClientTool) -> Json:
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _messages(body: schema.CountRequest) -> list[Json]:
    """In OpenAI's form: a message of several kinds of blocks becomes several messages, in their order."""
    messages: list[Json] = []
    if body.system is not None:
        system = body.system if isinstance(body.system, str) else "".join(block.text for block in body.system)
        messages.append({"role": "system", "content": system})
    for message in body.messages:
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "user":
            messages += _user(message.content)
        else:
            messages.append(_assistant(message.content))
    return messages


def _user(blocks: Sequence[schema.AnyBlock]) -> list[Json]:
    messages: list[Json] = []
    for block in blocks:
        match block:
            case schema.TextBlock() if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += block.text
            case schema.TextBlock():
                messages.append({"role": "user", "content": block.text})
            case schema.ToolResultBlock():
                text = block.content or ""
                text = text if isinstance(text, str) else "".join(part.text for part in text)
                text = f"Error: {text}" if block.is_error else text
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            case _:
                raise RequestError(f"a message of role user can't have a block of type {block.type!r}")
    return messages or [{"role": "user", "content": ""}]


def _assistant(blocks: Sequence[schema.AnyBlock]) -> Json:
    message: Json = {"role": "assistant", "content": ""}
    for block in blocks:
        match block:
            case schema.TextBlock():
                message["content"] += block.text
            case schema.ThinkingBlock():
                message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
            case schema.RedactedThinkingBlock():
                pass
            case schema.ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                message.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
            case _:
                raise RequestError(f"a message of role assistant can't have a block of type {block.type!r}")
    return message
