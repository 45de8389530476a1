"""Several choices of one prompt: it is computed once, and nothing else differs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from servers import LiveServer, eventually, live
from tiny_chat import make_chat

PROMPT = "An old silent pond. A frog jumps into the pond: splash! Silence again. " * 3  # 213 tokens
LENGTH = len(PROMPT)
SHARED = (LENGTH - 1) // 64 * 64


def complete(server: LiveServer, **values: Any) -> httpx.Response:
    return server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "seed": 3, "ignore_eos": True, **values})


def texts(answer: httpx.Response) -> list[str]:
    return [choice["text"] for choice in answer.json()["choices"]]


def computed(server: LiveServer) -> int:
    return int(server.slots()["stats"]["prompt_tokens"])


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("max_tokens", [12, None])
def test_the_prompt_is_computed_once(tmp_path: Path, kind: str, max_tokens: int | None) -> None:
    with live(make_chat(kind, tmp_path), {"max_context": 256}) as server:
        single = [texts(complete(server, seed=3 + i, max_tokens=max_tokens))[0] for i in range(4)]
        before = computed(server)
        answer = complete(server, n=4, max_tokens=max_tokens)
        assert texts(answer) == single
        assert computed(server) - before == SHARED + 4 * (LENGTH - SHARED)
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] == LENGTH
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert server.slots()["stats"]["free_slots"] == 4


def test_more_choices_than_slots(tmp_path: Path) -> None:
    with live(make_chat("qwen3", tmp_path), {"max_batch_size": 2}) as server:
        single = [texts(complete(server, seed=3 + i))[0] for i in range(5)]
        assert texts(complete(server, n=5)) == single
        assert server.slots()["stats"]["free_slots"] == 2


def test_a_refused_request_computes_nothing(tmp_path: Path) -> None:
    with live(make_chat("qwen3", tmp_path)) as server:
        assert complete(server, n=2, max_tokens=5000).status_code == 400
        assert complete(server, n=2, logit_bias={"100000": 1}).status_code == 400
        assert server.slots()["stats"]["free_slots"] == 4


def test_slots_are_not_hoarded(tmp_path: Path) -> None:
    """Many requests of several choices and single ones at once, on few slots: each gets its answer."""
    with live(make_chat("qwen3", tmp_path), {"max_batch_size": 3}) as server:
        many, one = texts(complete(server, n=3)), texts(complete(server))
        answers: list[bool] = []

        def ask(n: int) -> None:
            answers.append(texts(complete(server, n=n)) == (many if n == 3 else one))

        threads = [threading.Thread(target=ask, args=(3 if i % 2 else 1,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert answers == [True] * 16
        assert server.slots()["stats"]["free_slots"] == 3


@pytest.mark.parametrize("tokens", [0, 8])
def test_a_client_that_leaves_gives_all_slots_back(tmp_path: Path, tokens: int) -> None:
    """It leaves while the prompt is computed, or while the choices run."""
    body = {"prompt": PROMPT, "max_tokens": 200, "n": 3, "stream": True, "ignore_eos": True}
    with live(make_chat("qwen3", tmp_path)) as server, httpx.Client(timeout=30) as client:
        if tokens:
            with client.stream("POST", server.url + "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                for _ in range(tokens):
                    next(lines)
                server.held = True
                assert server.slots()["stats"]["free_slots"] == 1
        else:
            server.held = True
            with pytest.raises(httpx.ReadTimeout):
                client.post(server.url + "/v1/completions", json=body, timeout=0.5)
        eventually(lambda: server.slots()["stats"]["free_slots"] == 4)
        server.held = False
        assert complete(server).status_code == 200
