"""What a server is and does: models, tokens, health, metrics, slots."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from pocketllm.errors import PocketLLMError, RequestError
from pocketllm.options import SamplingParams
from pocketllm.server.chat_job import ChatJob
from pocketllm.server.errors import ApiError
from pocketllm.server.http import JsonResponse
from pocketllm.server.routes.chat import template_message
from pocketllm.server.schemas.base import given
from pocketllm.server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from pocketllm.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    started, begin = int(time.time()), time.monotonic()

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "pocketllm",
            "max_model_len": service.max_context,
        }

    @routes.get("/v1/models", response_model=None)
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [card(name) for name in service.names]})

    @routes.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        service.check_model(name)
        return JsonResponse(card(name))

    @routes.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        service.check_model(body.model)
        tokens = await _tokens(service, body)
        strings = [service.tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]
        more = {"token_strs": strings} if body.return_token_strs else {}
        return JsonResponse({"count": len(tokens), "max_model_len": service.max_context, "tokens": tokens, **more})

    @routes.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest) -> Response:
        service.check_model(body.model)
        text = await service.prompts.run(lambda: service.tokenizer.decode(body.tokens, skip_special=False))
        return JsonResponse({"prompt": text})

    @routes.get("/health", response_model=None)
    async def health() -> Response:
        """200: the engine runs. 503: it has failed or is closed, and the process should be replaced."""
        return JsonResponse({"status": "ok"}) if service.healthy else _unavailable("the engine has stopped")

    @routes.get("/ready", response_model=None)
    async def ready() -> Response:
        """200: new requests are welcome. 503: the server is shutting down, or the engine has stopped."""
        if service.healthy and service.accepting:
            return JsonResponse({"status": "ready"})
        return _unavailable("no new requests are taken")

    @routes.get("/metrics", response_model=None)
    async def metrics(request: Request) -> Response:
        try:
            state = await service.state()
        except PocketLLMError:
            state = None
        return Response(service.metrics.render(state), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/slots", response_model=None)
    async def slots() -> Response:
        """uptime: seconds since the server's start, when the state was read. Counters over it give rates."""
        state = await service.state()
        uptime = round(time.monotonic() - begin, 3)
        return JsonResponse({"model": service.model, "uptime": uptime, **state.as_json()})

    return routes


def _unavailable(message: str) -> Response:
    error = ApiError(503, message, type="service_unavailable_error", retry_after=5)
    return JsonResponse(error.openai(), status_code=503, headers=error.headers)


async def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages")
    if body.messages is None:
        assert body.prompt is not None
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            if getattr(body, name) is not None:
                raise RequestError(f"{name} goes with messages, not with prompt")
        return await service.prompts.encode(body.prompt, add_special=body.add_special_tokens is not False)
    if body.add_special_tokens:
        raise RequestError("add_special_tokens goes with prompt: a chat template writes its own special tokens")
    job = ChatJob(
        messages=tuple(template_message(message) for message in body.messages),
        params=SamplingParams(),
        tools=tuple(given(tool) for tool in body.tools or ()),
        variables=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt is not False and body.continue_final_message is not True,
        continue_final_message=body.continue_final_message is True,
    )
    return (await service.prompts.chat(job))[1]
