"""What a client is told when something fails: an HTTP status, and one error object in the shape of the API it speaks."""

from __future__ import annotations

import logging
from typing import Any

from pocketllm.errors import ModelError, OptionError, PocketLLMError, QueueFull, RequestError, SlotError

logger = logging.getLogger("pocketllm.server")

# (class, status, OpenAI's error type): the first that fits. Errors of the last line are ours, not the client's.
_STATUS: tuple[tuple[type[Exception], int, str], ...] = (
    (QueueFull, 429, "rate_limit_error"),
    (RequestError, 400, "invalid_request_error"),
    (OptionError, 400, "invalid_request_error"),
    (SlotError, 400, "invalid_request_error"),
    (ModelError, 400, "invalid_request_error"),  # the model has no chat template, ...
    (PocketLLMError, 503, "service_unavailable_error"),
)
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer other than 200. param: the field at fault; retry_after: seconds after which to try again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type = status, message, type
        self.param, self.code, self.retry_after = param, code, retry_after

    @classmethod
    def of(cls, error: Exception, *, retry_after: int = 1) -> ApiError:
        """The answer to any exception. What is not raised on purpose is logged and not shown."""
        if isinstance(error, ApiError):
            return error
        for kind, status, type in _STATUS:
            if isinstance(error, kind):
                return cls(status, str(error), type=type, retry_after=retry_after if status in (429, 503) else None)
        logger.error("unexpected error", exc_info=error)
        return cls(500, "internal error: the server's log has the details", type="internal_error")

    def openai(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic(self, request_id: str | None = None) -> dict[str, Any]:
        type = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": type, "message": self.message}, "request_id": request_id}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after is not None else {}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def generation_failed(error: Exception) -> ApiError:
    """A request that was accepted and then failed: the server's fault, whatever the class of the error."""
    return ApiError(500, f"the generation failed: {error}", type="generation_error")


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", type="service_unavailable_error", retry_after=5)
