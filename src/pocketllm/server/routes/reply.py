"""One way to answer a generation, whole or as a stream; the APIs differ in their writers only."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Protocol

from fastapi import Request, Response

from pocketllm.server.errors import ApiError
from pocketllm.server.generation import Generation
from pocketllm.server.http import CLIENT_CLOSED_REQUEST, EventStream, JsonResponse, sse, unless_gone
from pocketllm.server.service import Service


class Writer(Protocol):
    """How an API writes down a generation."""

    async def whole(self, generation: Generation) -> dict[str, Any]: ...

    def events(self, generation: Generation) -> AsyncGenerator[bytes, None]: ...

    def failure(self, error: Exception) -> bytes:
        """The event that ends a stream in which something failed."""


async def reply(
    service: Service,
    request: Request,
    starting: Coroutine[Any, Any, Generation],
    writer: Writer,
    *,
    stream: bool,
) -> Response:
    """Whatever happens, no work is left running for a client that is gone.

    An error before the first event, such as a full queue, is an answer with its own status even if a stream was asked for.
    """
    generation = await unless_gone(request, starting)
    if generation is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if stream:
        return EventStream(
            writer.events(generation),
            failure=writer.failure,
            close=generation.close,
            keep_alive=service.options.keep_alive,
        )
    try:
        body = await unless_gone(request, writer.whole(generation))
    finally:
        generation.close()
    return Response(status_code=CLIENT_CLOSED_REQUEST) if body is None else JsonResponse(body)


def openai_failure(error: Exception) -> bytes:
    return sse(ApiError.of(error).openai())
