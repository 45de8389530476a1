"""`AsyncEngine`: an engine in a thread of its own, used from asyncio.

Thread rule: the engine's thread alone touches the engine. Others send it functions to run between two steps; results and
tokens come back on the caller's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from pocketllm.engine.constraint import TokenConstraint
from pocketllm.engine.engine import Engine
from pocketllm.engine.request import FinishReason, RequestOutput
from pocketllm.errors import PocketLLMError
from pocketllm.options import SamplingParams

T = TypeVar("T")


@dataclass(frozen=True)
class _Listener:
    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[RequestOutput | Exception]


def _send(loop: asyncio.AbstractEventLoop, news: Sequence[tuple[_Listener, RequestOutput | Exception]]) -> None:
    """Wakes the loop once, however much there is to tell: at many streams the wake-ups would cost more than the news."""

    def deliver() -> None:
        for listener, item in news:
            listener.outputs.put_nowait(item)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
        loop.call_soon_threadsafe(deliver)


class AsyncEngine:
    """Starts the engine's thread at construction; `close` ends it and aborts what still runs."""

    def __init__(self, engine: Engine, *, interval: float = 0.0) -> None:
        """interval: seconds between two wake-ups of the event loop, at least: each takes a core from the engine for a while.
        What steps produce meanwhile comes as one output a request; first tokens and ends wait for nothing. 0: every step is
        told at once."""
        self._engine = engine
        self._interval = interval
        self._held: dict[str, list[RequestOutput]] = {}  # of the engine's thread, as are the listeners
        self._told = 0.0  # when the event loop was last woken
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, _Listener] = {}  # of the engine's thread
        self._failure: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="pocketllm-engine", daemon=True)
        self._thread.start()

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function(engine)` between two steps; its result or exception comes back here."""
        if self._closed or self._failure is not None:
            raise PocketLLMError("the engine is closed" if self._closed else f"the engine has failed: {self._failure}")
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():  # the caller was cancelled before its turn
                return
            try:
                future.set_result(function(self._engine))
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(run)
        if not self._thread.is_alive():  # it ended just now: nobody else would answer
            self._run_left_over()
        return await asyncio.wrap_future(future)

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        slot: int | Callable[[Engine], int | None] | None = None,
        constraint: TokenConstraint | None = None,
    ) -> tuple[str, AsyncIterator[RequestOutput]]:
        """Queue a request; returns its id and the stream of its outputs. Errors as `Engine.add_request`.

        slot: a function is called in the engine's thread, with nothing between it and the queueing.

        Closing the stream before its end (leaving `async for`, a cancelled task) aborts the request.
        """
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())

        def add(engine: Engine) -> str:
            bound = slot(engine) if callable(slot) else slot
            added = engine.add_request(prompt_ids, params, request_id=request_id, slot=bound, constraint=constraint)
            self._listeners[added] = listener
            return added

        added = await self.call(add)
        return added, self._stream(added, listener)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, *, slot: int | None = None
    ) -> AsyncIterator[RequestOutput]:
        """`submit` as one asynchronous iterator."""
        _, stream = await self.submit(prompt_ids, params, slot=slot)
        async for output in stream:
            yield output

    async def end_request(self, request_id: str, reason: FinishReason = "abort") -> None:
        """End a request early; its stream gets a last output with the reason."""

        def end(engine: Engine) -> None:
            output = engine.end_request(request_id, reason)
            if output is not None:
                self._dispatch([output])

        await self.call(end)

    def abandon(self, request_id: str) -> None:
        """Abort a request without waiting for it; its stream gets nothing more. From any thread; unknown ids are fine."""
        self.post(lambda engine: self._abandon(request_id))

    def post(self, function: Callable[[Engine], None]) -> None:
        """Run `function(engine)` between two steps, after what was sent before, without waiting. It must not raise."""
        self._inbox.put(lambda: function(self._engine))

    @property
    def alive(self) -> bool:
        """Whether it still takes requests: not closed, and not failed (a rank may while nothing runs)."""
        failed = self._failure is not None or self._engine.failure is not None
        return self._thread.is_alive() and not self._closed and not failed

    async def close(self) -> None:
        """Abort everything and end the thread."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    async def _stream(self, request_id: str, listener: _Listener) -> AsyncIterator[RequestOutput]:
        finished = False
        try:
            while not finished:
                item = await listener.outputs.get()
                finished = isinstance(item, Exception) or item.finished
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if not finished:  # the reader left: no await here, its task may be cancelled
                self.abandon(request_id)

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _loop(self) -> None:
        engine = self._engine
        engine.kernels.set_num_threads(engine.options.num_threads())  # torch keeps it per thread
        try:
            while self._drain():
                self._dispatch(engine.step())
        except Exception as error:  # not of one request (those are results): the engine's own state is in doubt
            self._failure = error
        self._end_all()

    def _drain(self) -> bool:
        """Run what was sent; False once the engine is to close. With nothing to compute, sleeps until something is sent."""
        while True:
            wait = not self._engine.has_work or self._engine.stalled
            if wait:
                self._tell()
            try:
                function = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if function is None:
                return False
            function()

    def _dispatch(self, outputs: Sequence[RequestOutput]) -> None:
        urgent = False
        for output in outputs:
            held = self._held.setdefault(output.request_id, [])
            if held and output.error is None and output.finish_reason != "abort":
                held[-1] = held[-1].then(output)
            else:  # what was generated before a request failed is told apart from that
                held.append(output)
            urgent |= output.finished or output.num_output_tokens == len(output.new_token_ids)
        if urgent or time.perf_counter() - self._told >= self._interval:
            self._tell()

    def _tell(self) -> None:
        """Everything that is held, to those who listen."""
        if not self._held:
            return
        news: dict[asyncio.AbstractEventLoop, list[tuple[_Listener, RequestOutput | Exception]]] = {}
        for request_id, outputs in self._held.items():
            listener = self._listeners.get(request_id)
            if listener is not None:
                news.setdefault(listener.loop, []).extend((listener, output) for output in outputs)
                if outputs[-1].finished:
                    del self._listeners[request_id]
        self._held.clear()
        for loop, items in news.items():
            _send(loop, items)
        self._told = time.perf_counter()

    def _abandon(self, request_id: str) -> None:
        self._listeners.pop(request_id, None)
        self._held.pop(request_id, None)
        self._engine.end_request(request_id)

    def _end_all(self) -> None:
        self._tell()
        for request_id, listener in list(self._listeners.items()):
            output = self._engine.end_request(request_id) if self._failure is None else None
            item = output or PocketLLMError(f"the engine has failed: {self._failure}")
            _send(listener.loop, [(listener, item)])
        self._listeners.clear()
        self._run_left_over()

    def _run_left_over(self) -> None:
        while not self._inbox.empty():
            function = self._inbox.get()
            if function is not None:
                function()
