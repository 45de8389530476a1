"""A live server on a free port, in a thread of the test's process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from pocketllm import LLM
from pocketllm.options import ServerOptions
from pocketllm.server.run import Server
from pocketllm.server.service import Service

TINY = {"max_batch_size": 4, "max_context": 512, "page_size": 16, "kernels": "reference"}


class LiveServer:
    """held: while it is True the engine computes nothing, but takes requests and ends them: no test races with it.
    allowed: steps that it computes even so. Streams have an event a token unless the options say otherwise."""

    def __init__(self, llm: LLM, **options: Any) -> None:
        self.llm, self.held, self.allowed = llm, False, 0
        step = llm.engine.step

        def held_step() -> Any:
            if not self.held or self.allowed > 0:
                outputs = step()
                self.allowed = max(self.allowed - 1, 0)
                return outputs
            time.sleep(0.002)
            return []

        llm.engine.step = held_step  # type: ignore[method-assign]
        started = threading.Event()
        self.service = Service(
            llm, ServerOptions(port=0, **{"shutdown_timeout": 5.0, "stream_interval": 0.0, **options})
        )
        self.server = Server(self.service, on_start=lambda url: started.set())
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        assert started.wait(20), "the server did not start"
        self.url = "http://{}:{}".format(*self.server.address)

    def get(self, path: str, **values: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **values)

    def post(self, path: str, body: Any = None, **values: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, **values)

    def slots(self) -> dict[str, Any]:
        return dict(self.get("/slots").json())

    @property
    def busy(self) -> int:
        """Requests that run or wait."""
        stats = self.slots()["stats"]
        return int(stats["running"] + stats["waiting"])

    def stop(self) -> None:
        """As a signal would; returns at once."""
        self.server.should_exit = True

    def join(self, seconds: float = 30) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the server did not end"


@contextmanager
def live(model: Path, engine: dict[str, Any] | None = None, **options: Any) -> Iterator[LiveServer]:
    """engine: options of a tiny engine that differ from `TINY`; options: of the server."""
    server = LiveServer(LLM(model, **{**TINY, **(engine or {})}), **options)
    try:
        yield server
    finally:
        server.held = False
        server.stop()
        server.join()


@contextmanager
def held_request(server: LiveServer, steps: int) -> Iterator[None]:
    """A completion that has been given so many steps and then stays as it is; it is left at the end."""
    server.held, server.allowed = True, steps
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
    with (
        httpx.Client(timeout=30) as client,
        client.stream("POST", server.url + "/v1/completions", json=body),
    ):
        eventually(lambda: server.allowed == 0)
        yield
    eventually(lambda: server.busy == 0)
    server.held = False


def eventually(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Waits until it holds; fails after a time that only a hang can take."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.02)


def with_template(folder: Path, template: str) -> Path:
    """The same model with another chat template."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return folder


CHATTY = (  # thinks if asked to, and writes tool calls in the hermes form
    "{% if tools %}<|im_start|>system\nCall: <tool_call>{\"name\": NAME, \"arguments\": OBJECT}</tool_call>\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)  # fmt: skip
