"""Answers in JSON, streams of server-sent events, and what happens when the client leaves: its work is cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499  # nginx's number, seen in logs only: nobody is there to read the answer


def to_json(value: Any) -> bytes:
    """Half a surrogate pair, which JSON can carry and UTF-8 can't, comes out as '?'."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", errors="replace")


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def sse(data: Mapping[str, Any], event: str | None = None) -> bytes:
    """One server-sent event; OpenAI's streams of chat chunks have no names, the others do."""
    name = f"event: {event}\n".encode() if event is not None else b""
    return name + b"data: " + to_json(data) + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def _gone(receive: Receive) -> None:
    """Returns when the client has left. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None, with the work cancelled, if the client leaves first."""
    task, watcher = asyncio.create_task(work), asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel(task, watcher)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """A stream of server-sent events with two promises: it always ends, and leaving it ends the work behind it.

    events      whole events, as bytes; closed when the client leaves
    failure     an exception of `events` -> the event that tells the client
    close       called at the end, however it comes, even if `events` was never begun
    keep_alive  seconds of silence before a comment line is sent, so that proxies keep the connection
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        failure: Callable[[Exception], bytes],
        close: Callable[[], None],
        keep_alive: float,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._events, self._failure, self._close, self._interval = events, failure, close, keep_alive
        self._silent = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [asyncio.create_task(work) for work in (self._produce(send), self._keep_alive(send), _gone(receive))]
        try:
            await asyncio.wait({tasks[0], tasks[2]}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close()
            await _cancel(*tasks)
            await self._events.aclose()

    async def _produce(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events:
                self._silent = False
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except OSError:
            return  # the client is gone
        except Exception as error:
            await send({"type": "http.response.body", "body": self._failure(error), "more_body": True})
        self._silent = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._interval)
            if self._silent:
                await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
            self._silent = True
