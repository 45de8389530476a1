"""`create_app`: routes, errors and the gate put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from pocketllm.errors import PocketLLMError
from pocketllm.server.errors import ApiError
from pocketllm.server.gate import Gate, error_response
from pocketllm.server.routes import chat, completions, info, messages, page, responses
from pocketllm.server.service import Service
from pocketllm.server.validation import describe


def create_app(service: Service) -> FastAPI:
    """The application of one service, which it closes when the server ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = FastAPI(title="PocketLLM", lifespan=lifespan)
    for module in (chat, completions, responses, messages, info, page):
        app.include_router(module.router(service))

    async def answer(request: Request, error: Exception) -> Response:
        return error_response(request.scope, ApiError.of(error, retry_after=service.retry_after()))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, field = describe(error.errors())
        return error_response(request.scope, ApiError(400, message, param=field))

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        type = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        told = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", type=type)
        return error_response(request.scope, told)

    for kind in (ApiError, PocketLLMError):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, unknown)
    options = service.options
    app.add_middleware(Gate, keys=options.keys(), max_body=options.max_body, metrics=service.metrics)
    return app
