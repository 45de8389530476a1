"""Fields and bodies that are refused, each by name, and those that are accepted without an effect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pocketllm.server.schemas import no_effect
from servers import LiveServer, live
from tiny_chat import make_chat

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = make_chat("qwen3", tmp_path_factory.mktemp("model"))
    with live(folder, max_body=200_000, max_choices=8, served_names=("tiny",)) as running:
        yield running


def chat(server: LiveServer, **values: Any) -> httpx.Response:
    return server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, **values})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"colour": "red"}, "colour: unknown field"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood: unknown field"),
        ({"messages": []}, "messages: "),
        ({"messages": None}, "messages: "),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "needs 'content'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate"),
        ({"temperature": "0.5"}, "temperature: "),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 9}, "at most 8"),
        ({"n": 10**9}, "at most 8"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, "100000"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "two names"),
        ({"max_tokens": 5000}, "use max_tokens <="),
        ({"stop": ""}, "non-empty"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"store": True}, "store"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"functions": []}, "functions"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "one form"),
        ({"structured_outputs": {"regex": "("}}, "can't be used"),
        ({"structured_outputs": {"json": "{"}}, "no JSON"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "contradicts"),
        ({"thinking_token_budget": 5}, "needs a model that thinks"),
        ({"continue_final_message": True}, "role assistant"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(server: LiveServer, values: Any, words: str) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 4, **values})
    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + "/v1/chat/completions", content=body, headers=headers, timeout=30)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_fields_without_effect_are_accepted(server: LiveServer) -> None:
    plain = chat(server, temperature=0).json()["choices"]
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "audio": None,
                "safety_identifier": "s", "prompt_cache_key": "k", "modalities": ["text"]}  # fmt: skip
    assert chat(server, temperature=0, **harmless).json()["choices"] == plain
    nothing = dict.fromkeys(("stop", "seed", "tools", "tool_choice", "response_format", "n", "logprobs", "logit_bias"))
    assert chat(server, temperature=0, **nothing).json()["choices"] == plain


@pytest.mark.parametrize(
    "content", [b'{"messages": ', b"", b"[]", b'"x"', b"null", b'{"messages": "\xff"}', b"[" * 100_000]
)
def test_a_body_that_is_no_json_object_is_a_400(server: LiveServer, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/tokenize"):
        answer = httpx.post(server.url + path, content=content, headers=headers, timeout=30)
        assert answer.status_code == 400, (path, answer.text)
        assert answer.json()["error"]["message"]


def test_other_content_types_and_paths(server: LiveServer) -> None:
    text = httpx.post(
        server.url + "/v1/chat/completions",
        content=json.dumps({"messages": HELLO}),
        headers={"content-type": "text/plain"},
    )
    assert text.status_code == 400  # a web page can send this without asking the browser's user
    assert "content-type" in text.json()["error"]["message"]
    assert server.get("/v1/nothing").status_code == 404
    assert server.get("/v1/chat/completions").status_code == 405
    assert "error" in server.get("/v1/chat/completions").json()


def test_bodies_are_limited(server: LiveServer) -> None:
    big = "x" * 250_000

    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(25):
            yield b"x" * 10_000
        yield b'"}'

    headers = {"content-type": "application/json"}
    known = server.post("/tokenize", {"prompt": big})
    unknown = httpx.post(server.url + "/tokenize", content=pieces(), headers=headers, timeout=30)
    assert (known.status_code, unknown.status_code) == (413, 413)
    assert "200000" in known.json()["error"]["message"]
    assert "200000" in unknown.json()["error"]["message"]
    assert server.post("/tokenize", {"prompt": big[:150_000]}).json()["count"] == 150_000


def test_the_documentation_has_every_field_without_effect() -> None:
    text = (Path(__file__).parent.parent / "docs" / "server.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    for name, table in (("chat completions", no_effect.CHAT), ("completions", no_effect.COMPLETION),
                        ("responses", no_effect.RESPONSE), ("messages", no_effect.MESSAGE)):  # fmt: skip
        for field, values in table.items():
            assert (field in re.findall(r"\w+", rows[name])) == (values != no_effect.NOTHING), field
