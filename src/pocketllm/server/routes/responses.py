"""POST /v1/responses, without a store: a conversation is sent whole, previous_response_id is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from pocketllm.errors import RequestError
from pocketllm.options import SamplingParams
from pocketllm.server.chat_job import ChatJob, Thinking, ToolChoice
from pocketllm.server.routes.reply import reply
from pocketllm.server.routes.responses_writer import ResponseWriter
from pocketllm.server.schemas.base import Json, Part, given
from pocketllm.server.schemas.responses import (
    INPUT_ITEMS,
    FunctionCall,
    FunctionCallOutput,
    InputMessage,
    NamedFunction,
    ReasoningItem,
    ResponseRequest,
    TextFormat,
)
from pocketllm.server.service import Service
from pocketllm.server.validation import describe
from pocketllm.text.grammar import AnswerForm, JsonObject, JsonSchema


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses", response_model=None)
    async def responses(body: ResponseRequest, request: Request) -> Response:
        service.check_model(body.model)
        job = response_job(body, service.defaults)
        writer = ResponseWriter(service.model, body, job)
        starting = service.start_chat(job, "resp_")
        return await reply(service, request, starting, writer, stream=body.stream is True)

    return routes


def response_job(body: ResponseRequest, defaults: dict[str, float]) -> ChatJob:
    values: dict[str, Any] = {**defaults, "max_tokens": body.max_output_tokens}
    values |= {name: value for name in ("temperature", "top_p") if (value := getattr(body, name)) is not None}
    choice = body.tool_choice
    return ChatJob(
        messages=_messages(body),
        params=SamplingParams.of(**values),
        tools=tuple(
            {"type": "function", "function": {k: v for k, v in given(tool).items() if k != "type"}}
            for tool in body.tools or ()
        ),
        tool_choice=ToolChoice("named", choice.name) if isinstance(choice, NamedFunction) else ToolChoice(choice or "auto"),
        parallel_calls=body.parallel_tool_calls is not False,
        form=_form(body.text.format if body.text is not None else None),
        thinking=Thinking.of(None, body.reasoning.effort if body.reasoning is not None else None, None),
    )  # fmt: skip


def _form(format: TextFormat | None) -> AnswerForm | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return JsonObject()
    if format.schema_ is None:
        raise RequestError("text.format of type json_schema needs a schema")
    return JsonSchema(format.schema_)


def _messages(body: ResponseRequest) -> tuple[Json, ...]:
    """The items of the input as messages of a chat. What the assistant thought, said and called in one turn is one."""
    messages: list[Json] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
        return tuple(messages)
    for i, values in enumerate(body.input):
        _add_item(messages, _item(values, i), f"input[{i}]")
    for message in messages:
        if message["role"] == "assistant":
            message.setdefault("content", "")
    return tuple(messages)


def _item(values: Json, index: int) -> Part:
    kind = values.get("type", "message")
    if not isinstance(kind, str) or kind not in INPUT_ITEMS:
        raise RequestError(f"input[{index}] is of type {kind!r}: supported are {', '.join(INPUT_ITEMS)}")
    try:
        return INPUT_ITEMS[kind].model_validate(values)
    except ValidationError as error:
        message, path = describe(error.errors())
        raise RequestError(f"input[{index}]{'.' if path else ': '}{message}") from None


def _add_item(messages: list[Json], item: Part, where: str) -> None:
    match item:
        case InputMessage(role="assistant"):
            _turn(messages, without=("content", "tool_calls"))["content"] = _text(item.content, where)
        case InputMessage():
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _text(item.content, where)})
        case ReasoningItem():
            text = _text(item.content or item.summary, where)
            _turn(messages, without=("reasoning_content", "content", "tool_calls"))["reasoning_content"] = text
        case FunctionCall():
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _turn(messages).setdefault("tool_calls", []).append(call)
        case FunctionCallOutput():
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output, where)})


def _turn(messages: list[Json], without: Sequence[str] = ()) -> Json:
    """The assistant's message at the end, a new one if there is none or if it has one of these fields."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in without):
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: str | Sequence[Json], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        kind, text = part.get("type"), part.get("text")
        if kind not in ("input_text", "output_text", "reasoning_text", "summary_text") or not isinstance(text, str):
            raise RequestError(f"{where} has a part of type {kind!r}: only text is read")
        texts.append(text)
    return "".join(texts)
