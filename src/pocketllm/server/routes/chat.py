"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from pocketllm.errors import RequestError
from pocketllm.server.answers import Answer, collect
from pocketllm.server.chat_job import ChatJob, Thinking, ToolChoice, ToolMode
from pocketllm.server.generation import Delta, Finish, Generation
from pocketllm.server.http import DONE, sse
from pocketllm.server.routes.openai_json import chat_logprobs, head, usage_json
from pocketllm.server.routes.reply import openai_failure, reply
from pocketllm.server.schemas.base import given
from pocketllm.server.schemas.openai import ChatMessage, ChatRequest, NamedTool
from pocketllm.server.service import Service
from pocketllm.server.structure import form_of
from pocketllm.text.output_parser import OutputDelta
from pocketllm.text.tokenizer import Tokenizer


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        service.check_model(body.model)
        generation = service.start_chat(chat_job(body, service.defaults), "chatcmpl-")
        writer = _Writer(service.tokenizer, service.model, body)
        return await reply(service, request, generation, writer, stream=body.stream is True)

    return routes


def chat_job(body: ChatRequest, defaults: dict[str, float]) -> ChatJob:
    if body.top_logprobs is not None and body.logprobs is not True:
        raise RequestError("top_logprobs needs logprobs = true")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise RequestError("max_tokens and max_completion_tokens differ: they are two names of one limit, give one")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return ChatJob(
        messages=tuple(template_message(message) for message in body.messages),
        params=body.sampling(defaults, max_tokens=max_tokens, logprobs=logprobs),
        n=body.n or 1,
        tools=tuple(given(tool) for tool in body.tools or ()),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_calls=body.parallel_tool_calls is not False,
        form=form_of(body.response_format, body.structured_outputs),
        thinking=Thinking.of(body.enable_thinking, body.reasoning_effort, body.thinking_token_budget),
        variables=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt is not False and body.continue_final_message is not True,
        continue_final_message=body.continue_final_message is True,
    )


def template_message(message: ChatMessage) -> dict[str, Any]:
    """As chat templates know it: developer is the newer name of system, reasoning of reasoning_content."""
    values = message.model_dump(
        exclude_unset=True, exclude={"reasoning", "refusal", "audio", "function_call", "annotations"}
    )
    if message.reasoning is not None:
        values["reasoning_content"] = message.reasoning
    if message.role == "developer":
        values["role"] = "system"
    return values


def _tool_choice(choice: ToolMode | NamedTool | None) -> ToolChoice:
    if isinstance(choice, NamedTool):
        return ToolChoice("named", choice.function.name)
    return ToolChoice("auto" if choice is None else choice)


class _Writer:
    """Writes down a generation in OpenAI's form."""

    def __init__(self, tokenizer: Tokenizer, model: str, body: ChatRequest) -> None:
        self._tokenizer, self._model, self._include_usage = tokenizer, model, body.include_usage

    async def whole(self, generation: Generation) -> dict[str, Any]:
        answers = await collect(generation)
        return {
            **head(generation, "chat.completion", self._model),
            "choices": [
                {
                    "index": i,
                    "message": _message(answer),
                    "logprobs": chat_logprobs(self._tokenizer, answer.tokens, answer.logprobs),
                    "finish_reason": answer.finish.reason,
                }
                for i, answer in enumerate(answers)
            ],
            "usage": usage_json(generation.usage),
        }

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        start = head(generation, "chat.completion.chunk", self._model)
        more = {"usage": None} if self._include_usage else {}

        def chunk(
            index: int, delta: dict[str, Any], finish: Finish | None = None, logprobs: dict[str, Any] | None = None
        ) -> bytes:
            reason = finish.reason if finish is not None else None
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return sse({**start, "choices": [choice], **more})

        for index in range(generation.num_choices):
            yield chunk(index, {"role": "assistant", "content": ""})
        async for delta in generation.deltas():
            news = _news(delta.output)
            if news or delta.logprobs:
                yield chunk(delta.choice, news, None, self._logprobs(delta))
            if delta.finish is not None:
                yield chunk(delta.choice, {}, delta.finish)
        if self._include_usage:
            yield sse({**start, "choices": [], "usage": usage_json(generation.usage)})
        yield DONE

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, delta.tokens, delta.logprobs)

    def failure(self, error: Exception) -> bytes:
        return openai_failure(error)


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.content if answer.content or not answer.calls else None,
        "refusal": None,
    }
    if answer.reasoning:  # clients are split between the two names
        message |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message


def _news(output: OutputDelta) -> dict[str, Any]:
    news: dict[str, Any] = {}
    if output.reasoning:
        news |= {"reasoning": output.reasoning, "reasoning_content": output.reasoning}
    if output.content:
        news["content"] = output.content
    if output.tool_calls:
        calls: list[dict[str, Any]] = []
        for call in output.tool_calls:
            function: dict[str, Any] = {"arguments": call.arguments}
            if call.name is None:
                calls.append({"index": call.index, "function": function})
            else:
                function = {"name": call.name, **function}
                calls.append({"index": call.index, "id": call.id, "type": "function", "function": function})
        news["tool_calls"] = calls
    return news
