"""The embedded model behind HTTP, and the command that serves."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest
from typer.testing import CliRunner

from pocketllm import LLM, SamplingParams
from pocketllm.cli.flags import QUEUE_FLAG, SERVER_FLAGS
from pocketllm.cli.main import app
from pocketllm.options import ServerOptions
from servers import LiveServer, live
from tiny_chat import make_chat

PARIS: Any = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
SCHEMA: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
ENGINE = {"max_batch_size": 4, "max_context": 512, "kernels": "auto", "page_size": 256}


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[LiveServer]:
    with live(embedded_model, ENGINE, served_names=("smol",)) as running:
        yield running


@pytest.mark.real_model
def test_the_model_answers_over_http_as_it_does_offline(server: LiveServer, embedded_model: Path) -> None:
    offline = LLM(embedded_model, **ENGINE).chat(PARIS, SamplingParams(max_tokens=30))[0]
    assert "Paris" in offline.text
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    values: Any = {"model": "smol", "messages": PARIS, "max_completion_tokens": 30, "temperature": 0}
    answer = client.chat.completions.create(**values)
    assert answer.choices[0].message.content == offline.text
    assert answer.choices[0].finish_reason == "stop"
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**values, stream=True)]
    assert "".join(pieces) == offline.text
    assert len([piece for piece in pieces if piece]) > 3
    messages = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).messages
    claude = messages.create(model="smol", max_tokens=30, messages=PARIS, extra_body={"temperature": 0})
    assert claude.content[0].text == offline.text  # type: ignore[union-attr]
    assert claude.stop_reason == "end_turn"
    response = client.responses.create(model="smol", input=PARIS, max_output_tokens=30, temperature=0)
    assert response.output_text == offline.text
    assert response.status == "completed"


@pytest.mark.real_model
def test_the_model_writes_json(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    format: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    for seed in range(2):
        answer = client.chat.completions.create(
            model="smol", messages=PARIS, response_format=format, max_completion_tokens=400, seed=seed, temperature=1
        )
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


def test_the_command_serves_until_a_signal(tmp_path: Path) -> None:
    folder = make_chat("qwen3", tmp_path)
    flags = ["--port", "0", "--kernels", "reference", "--context", "512", "--page-size", "16", "--max-queue", "3",
             "--served-model-name", "tiny", "--api-key", "k", "--log-format", "json", "--slots", "2"]  # fmt: skip
    start = [sys.executable, "-c", "from pocketllm.cli.main import main; main()", "serve", str(folder), *flags]
    process = subprocess.Popen(start, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"})
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if "http://" in line)
        assert "tiny · 2 slots of 512 tokens · http://127.0.0.1:" in line
        url = line.split()[-1]
        body = {"messages": PARIS, "max_tokens": 100, "stream": True, "temperature": 0, "ignore_eos": True}
        headers = {"authorization": "Bearer k", "x-request-id": "r1"}
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", url + "/v1/chat/completions", json=body, headers=headers) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [text for text in lines if text]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        logged = [json.loads(line) for line in process.stderr if line.startswith("{")]
        assert process.wait(30) == -signal.SIGTERM
    finally:
        process.kill()
    (request,) = [entry for entry in logged if entry.get("request_id") == "r1"]
    assert (request["method"], request["path"], request["status"]) == ("POST", "/v1/chat/completions", 200)


def test_the_command_s_flags() -> None:
    names = {flag.option for flag in (*SERVER_FLAGS, QUEUE_FLAG)}
    assert names == {field.name for field in dataclasses.fields(ServerOptions)} | {"max_queue"}
    for arguments, message in (
        (["--port", "70000"], "error: --port 70000: must be a whole number below 65536"),
        (["--max-body", "1 lorry"], "memory size '1 lorry'"),
    ):
        result = CliRunner().invoke(app, ["serve", *arguments])
        assert result.exit_code == 2
        assert message in result.stderr.replace("\n", " ")
