"""`Gate`: what every request passes first and every answer last: id, key, size of the body, a line in the log.

A plain ASGI layer, because the usual middleware classes stand between a stream and the news that its client has left.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pocketllm.server.errors import ApiError
from pocketllm.server.http import JsonResponse
from pocketllm.server.metrics import Metrics

logger = logging.getLogger("pocketllm.server.access")

# Need no key: the status page, which asks for one itself, and what watches the process. They tell nothing.
_OPEN_PATHS = ("/", "/health", "/ready")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Gate:
    def __init__(self, app: ASGIApp, *, keys: tuple[str, ...], max_body: int, metrics: Metrics) -> None:
        self._app, self._max_body, self._metrics = app, max_body, metrics
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, headers = time.perf_counter(), Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0  # none was sent: the client left first

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                await error_response(scope, refusal)(scope, receive, send_marked)
            else:
                await self._app(scope, self._limited(receive), send_marked)
        except Exception as error:  # a bug: logged, and told without its text
            if status:
                raise  # the answer has begun
            await error_response(scope, ApiError.of(error))(scope, receive, send_marked)
        finally:
            self._metrics.on_answer(status)
            seconds = round(time.perf_counter() - begin, 4)
            values = {"method": scope["method"], "path": scope["path"], "status": status, "seconds": seconds}
            logger.info("request", extra={"fields": {**values, "request_id": request_id}})

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if self._keys and path not in _OPEN_PATHS and not self._has_key(headers):
            hint = "send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            return ApiError(401, f"no valid API key: {hint}", type="authentication_error", code="invalid_api_key")
        length = headers.get("content-length", "0")
        return self._too_large() if length.isdigit() and int(length) > self._max_body else None

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        sent = [headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
        matches = [hmac.compare_digest(key, text.encode()) for key in self._keys for text in sent]
        return any(matches)

    def _limited(self, receive: Receive) -> Receive:
        """For bodies that come in pieces, without a length in front."""
        size = 0

        async def receive_counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body:
                raise HTTPException(413, self._too_large().message)  # the one class that a body's reader lets through
            return message

        return receive_counted

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than the {self._max_body} bytes this server reads")


def error_response(scope: Scope, error: ApiError) -> JsonResponse:
    """In the form of the API whose path was called."""
    if scope["path"].startswith("/v1/messages"):
        body = error.anthropic(scope.get("state", {}).get("request_id"))
    else:
        body = error.openai()
    return JsonResponse(body, status_code=error.status, headers=error.headers)
