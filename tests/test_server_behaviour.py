"""How the server behaves when clients leave, errors happen, limits are met, or it has to end."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pocketllm.server.logs import JsonFormatter, TextFormatter
from servers import LiveServer, eventually, live
from tiny_chat import make_chat

HELLO: Any = [{"role": "user", "content": "Hello"}]
LONG: dict[str, Any] = {"messages": HELLO, "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with live(folder) as running:
        yield running


def chat(server: LiveServer, **values: Any) -> httpx.Response:
    return server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, **values})


def test_request_ids_come_back(server: LiveServer) -> None:
    assert server.get("/health", headers={"x-request-id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
    made = server.get("/health", headers={"x-request-id": "bad id\twith tab"}).headers["x-request-id"]
    assert made != server.get("/health").headers["x-request-id"]
    assert made.isalnum()


def test_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCKETLLM_API_KEY", "one, two")
    with live(folder) as server:
        assert server.get("/health").status_code == server.get("/ready").status_code == 200
        for path in ("/v1/models", "/metrics", "/slots", "/openapi.json"):
            assert server.get(path).status_code == 401
            assert server.get(path, headers={"authorization": "Bearer three"}).status_code == 401
            assert server.get(path, headers={"authorization": "Bearer two"}).status_code == 200
            assert server.get(path, headers={"x-api-key": "one"}).status_code == 200
        assert server.get("/v1/models", headers={b"x-api-key": "é".encode()}).status_code == 401


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(server: LiveServer, stream: bool) -> None:
    body = {**LONG, "n": 6, "stream": stream}  # 4 run, 2 wait
    with httpx.Client(timeout=30) as client:
        if stream:
            with client.stream("POST", server.url + "/v1/chat/completions", json=body) as answer:
                lines = answer.iter_lines()
                for _ in range(40):  # 6 chunks of roles, then tokens
                    next(lines)
                server.held = True
                assert server.busy == 6
        else:
            server.held = True
            with pytest.raises(httpx.ReadTimeout):
                client.post(server.url + "/v1/chat/completions", json=body, timeout=0.5)
    eventually(lambda: server.busy == 0)
    assert all(slot["use"] == "free" for slot in server.slots()["slots"])
    server.held = False
    assert chat(server).status_code == 200


def test_a_client_that_leaves_while_it_waits(folder: Path) -> None:
    body = {**LONG, "stream": True}
    with live(folder, {"max_batch_size": 1}, keep_alive=0.05) as server, httpx.Client(timeout=30) as client:
        server.held = True
        with client.stream("POST", server.url + "/v1/chat/completions", json=body) as first:
            ahead = first.iter_lines()
            assert '"role"' in next(ahead)
            with client.stream("POST", server.url + "/v1/chat/completions", json=body) as second:
                later = second.iter_lines()  # kept: a stream ends with its iterator
                lines = [line for line, _ in zip(later, range(8), strict=False) if line]
                assert lines[1:] == [": waiting"] * 3  # the connection is kept while another has the slot
                assert server.busy == 2
            eventually(lambda: server.busy == 1)
        eventually(lambda: server.busy == 0)


def test_a_full_queue_is_429(folder: Path) -> None:
    with live(folder, {"max_batch_size": 1, "max_queue": 1}, served_names=("tiny",)) as server:
        url = server.url + "/v1/chat/completions"
        with httpx.Client(timeout=30) as client:
            with client.stream("POST", url, json={**LONG, "stream": True}) as first:
                running = first.iter_lines()
                for _ in range(4):
                    next(running)  # it has its first token, and so the slot
                server.held = True
                with client.stream("POST", url, json={**LONG, "stream": True}) as second:
                    waiting = second.iter_lines()
                    next(waiting)
                    for stream in (True, False):
                        refused = chat(server, stream=stream)
                        assert refused.status_code == 429
                        assert int(refused.headers["retry-after"]) >= 1
                        assert refused.json()["error"]["type"] == "rate_limit_error"
                    message = {"model": "tiny", "messages": HELLO, "max_tokens": 1}
                    assert server.post("/v1/messages", message).json()["error"]["type"] == "rate_limit_error"
                    assert server.busy == 2
            eventually(lambda: server.busy == 0)
            assert chat(server, n=2).status_code == 429  # of several choices none is left behind
            eventually(lambda: server.busy == 0)
            server.held = False
        patient = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=5)
        assert patient.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1).choices


def events(lines: Iterator[str]) -> list[str]:
    return [line for line in lines if line.startswith("data:")]


def test_running_streams_finish_at_shutdown(folder: Path) -> None:
    with live(folder) as server, httpx.Client(timeout=30) as client:
        with client.stream("POST", server.url + "/v1/chat/completions", json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.held = True
            server.stop()
            eventually(lambda: not server.service.accepting)
            server.held = False
            found = events(lines)
        assert found[-1] == "data: [DONE]"
        assert json.loads(found[-2][5:])["choices"][0]["finish_reason"] == "length"
        server.join()


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_streams_that_take_too_long_are_told_at_shutdown(folder: Path, path: str) -> None:
    body: dict[str, Any] = {"model": "tiny", "stream": True}
    body |= {"input": "x"} if path == "responses" else {"messages": HELLO, "max_tokens": 400}
    with live(folder, shutdown_timeout=0.2, served_names=("tiny",)) as server, httpx.Client(timeout=30) as client:
        server.held = True
        with client.stream("POST", f"{server.url}/v1/{path}", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.stop()
            found = events(lines)
        assert "the server is shutting down" in found[-1]
        server.join()


@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages", "responses"])
def test_a_broken_engine_ends_streams_with_an_error(folder: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body: dict[str, Any] = {"model": "tiny", "stream": True}
    body |= {"input": "x"} if path == "responses" else {"prompt": "x"} if path == "completions" else {"messages": HELLO}
    body |= {"max_output_tokens": 50} if path == "responses" else {"max_tokens": 50}
    with live(folder, served_names=("tiny",)) as server:
        monkeypatch.setattr(type(server.llm.engine.scheduler), "schedule", lambda self: 1 / 0)
        with httpx.Client(timeout=30) as client, client.stream("POST", f"{server.url}/v1/{path}", json=body) as answer:
            found = events(answer.iter_lines())
        assert "the engine has failed" in found[-1]
        assert server.get("/health").status_code == server.get("/ready").status_code == 503
        assert server.post(f"/v1/{path}", {**body, "stream": False}).status_code == 503
        assert server.get("/slots").status_code == 503
        assert "pocketllm:http_requests_total" in server.get("/metrics").text


def test_a_bug_is_a_500_without_its_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(folder) as server:
        monkeypatch.setattr(server.service, "check_model", lambda name: {}["secret"])
        answer = chat(server)
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert answer.json()["error"]["type"] == "internal_error"
        assert "x-request-id" in answer.headers


def test_many_connections_come_and_go(server: LiveServer) -> None:
    """40 connections on 4 slots; some leave at random. Those that stay get the tokens they would get alone."""
    dice = random.Random(0)
    plans = [(seed % 5, dice.choice((None, None, 0, 1, 5))) for seed in range(40)]
    alone = {
        seed: chat(server, seed=seed, max_tokens=24).json()["choices"][0]["message"]["content"] for seed in range(5)
    }

    async def one(client: httpx.AsyncClient, seed: int, leave_after: int | None) -> None:
        body = {"messages": HELLO, "max_tokens": 24, "seed": seed, "stream": True}
        text, chunks = "", 0
        async with client.stream("POST", server.url + "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if leave_after is not None and chunks >= leave_after:
                    return
                if line.startswith("data: {"):
                    chunks += 1
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        assert text == alone[seed]

    async def main() -> None:
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            await asyncio.gather(*(one(client, seed, leave) for seed, leave in plans))

    asyncio.run(main())
    eventually(lambda: server.busy == 0)
    assert all(slot["use"] == "free" for slot in server.slots()["slots"])


def test_a_slow_reader_delays_nobody(server: LiveServer) -> None:
    body = json.dumps(
        {**LONG, "logprobs": True, "top_logprobs": 20, "n": 3, "max_tokens": 150, "stream": True}
    ).encode()
    lines = ("POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json",
             f"Content-Length: {len(body)}", "", "")  # fmt: skip
    head = "\r\n".join(lines)
    host, port = server.server.address
    with socket.create_connection((host, port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(head.encode() + body)  # and reads nothing
        eventually(lambda: server.busy == 3)
        assert chat(server, max_tokens=30).status_code == 200
        eventually(lambda: server.busy == 0, 60)  # its tokens were computed, and its slots are free again
    assert chat(server).status_code == 200


def test_a_request_that_never_ends_is_no_work(server: LiveServer) -> None:
    host, port = server.server.address
    for data in (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"\x16\x03\x01",
        b"GET /\r\n",
    ):
        with socket.create_connection((host, port)) as connection:
            connection.sendall(data)
    assert chat(server).status_code == 200
    assert server.busy == 0


def test_metrics_and_slots_show_what_runs(folder: Path) -> None:
    with live(folder, served_names=("tiny",)) as server, httpx.Client(timeout=30) as client:
        with client.stream("POST", server.url + "/v1/chat/completions", json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            for _ in range(8):
                next(lines)
            server.held = True
            (slot,) = [slot for slot in server.slots()["slots"] if slot["use"] == "running"]
            assert slot["request_id"].startswith("chatcmpl-")
            assert (slot["state"], slot["max_tokens"]) == ("decode", 400)
            assert slot["tokens"] >= slot["prompt_tokens"] > 0
            text = server.get("/metrics").text
            assert 'pocketllm:num_requests_running{model_name="tiny"} 1.0' in text
            assert 'pocketllm:slots{model_name="tiny",use="free"} 3.0' in text
        eventually(lambda: server.busy == 0)
        server.held = False
        chat(server, max_tokens=3, ignore_eos=True)
        text = server.get("/metrics").text
        for line in (
            'pocketllm:num_requests_running{model_name="tiny"} 0.0',
            'pocketllm:request_success_total{finished_reason="abort",model_name="tiny"} 1.0',
            'pocketllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0',
            'pocketllm:time_to_first_token_seconds_count{model_name="tiny"} 2.0',
            'pocketllm:http_requests_total{status="200"}',
            'pocketllm:pages_total{model_name="tiny"} 128.0',
        ):
            assert line in text


def test_log_lines() -> None:
    record = logging.LogRecord("pocketllm.server", logging.INFO, "", 0, "request", (), None)
    record.fields = {"path": "/x", "status": 200}  # what `extra` does
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["message"], line["path"], line["status"]) == ("info", "request", "/x", 200)
    assert TextFormatter().format(record).endswith("INFO request path=/x status=200")


def test_each_answer_is_logged(server: LiveServer) -> None:
    seen: list[Any] = []
    done = threading.Event()

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(getattr(record, "fields", {}))
            done.set()

    logger, handler = logging.getLogger("pocketllm.server.access"), Collect()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        server.get("/v1/nothing", headers={"x-request-id": "abc"})
        assert done.wait(10)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert {name: seen[0][name] for name in ("method", "path", "status", "request_id")} == {
        "method": "GET", "path": "/v1/nothing", "status": 404, "request_id": "abc",
    }  # fmt: skip
