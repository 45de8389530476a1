"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from pocketllm.errors import RequestError
from pocketllm.server.answers import collect
from pocketllm.server.generation import Generation
from pocketllm.server.http import DONE, sse
from pocketllm.server.routes.openai_json import CompletionLogprobs, head, usage_json
from pocketllm.server.routes.reply import openai_failure, reply
from pocketllm.server.schemas.openai import CompletionRequest
from pocketllm.server.service import Service
from pocketllm.server.structure import form_of


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        service.check_model(body.model)
        prompts = _prompts(body)
        if body.echo and body.logprobs is not None:
            raise RequestError("echo with logprobs: log-probabilities of the prompt are not supported")
        generation = service.start_completion(
            prompts,
            body.sampling(service.defaults, max_tokens=body.max_tokens, logprobs=body.logprobs),
            n=body.n or 1,
            form=form_of(None, body.structured_outputs),
            add_special=body.add_special_tokens is not False,
        )
        writer = _Writer(service, body, prompts)
        return await reply(service, request, generation, writer, stream=body.stream is True)

    return routes


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """A batch, whether one prompt or several were sent."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is empty: give a text, token ids, or a list of them")
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


class _Writer:
    def __init__(self, service: Service, body: CompletionRequest, prompts: list[str | list[int]]) -> None:
        self._tokenizer, self._model, self._include_usage = service.tokenizer, service.model, body.include_usage
        self._n = body.n or 1
        self._prompts = prompts if body.echo else None

    async def whole(self, generation: Generation) -> dict[str, Any]:
        choices = []
        for i, answer in enumerate(await collect(generation)):
            logprobs = CompletionLogprobs(self._tokenizer)
            choices.append(
                {
                    "index": i,
                    "text": self._echo(i) + answer.content,
                    "logprobs": logprobs.push(answer.tokens, answer.logprobs),
                    "finish_reason": answer.finish.reason,
                }
            )
        start = head(generation, "text_completion", self._model)
        return {**start, "choices": choices, "usage": usage_json(generation.usage)}

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        start = head(generation, "text_completion", self._model)
        more = {"usage": None} if self._include_usage else {}
        logprobs = [CompletionLogprobs(self._tokenizer) for _ in range(generation.num_choices)]

        def chunk(index: int, text: str, reason: str | None = None, logprobs: dict[str, Any] | None = None) -> bytes:
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
            return sse({**start, "choices": [choice], **more})

        for index in range(generation.num_choices):
            if echo := self._echo(index):
                yield chunk(index, echo)
        async for delta in generation.deltas():
            news = logprobs[delta.choice].push(delta.tokens, delta.logprobs)
            if delta.output.content or news is not None or delta.finish is not None:
                reason = delta.finish.reason if delta.finish is not None else None
                yield chunk(delta.choice, delta.output.content, reason, news)
        if self._include_usage:
            yield sse({**start, "choices": [], "usage": usage_json(generation.usage)})
        yield DONE

    def failure(self, error: Exception) -> bytes:
        return openai_failure(error)

    def _echo(self, choice: int) -> str:
        if self._prompts is None:
            return ""
        prompt = self._prompts[choice // self._n]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special=False)
