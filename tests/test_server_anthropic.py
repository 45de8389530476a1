"""The real `anthropic` client against a live server with a tiny random model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import pytest

from pocketllm import LLM, SamplingParams
from pocketllm.errors import RequestError
from pocketllm.server.routes.messages import message_job
from pocketllm.server.schemas.anthropic import CountRequest
from servers import CHATTY, TINY, LiveServer, live, with_template
from tiny_chat import make_chat

HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOL: Any = {
    "name": "add",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(make_chat("qwen3", tmp_path_factory.mktemp("model")), CHATTY)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with live(folder, {"max_context": 1024}, served_names=("tiny",), api_keys=("secret",)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)


GREEDY = {"temperature": 0}  # the client has no such argument any more


def ask(client: Any, messages: Any = HELLO, **values: Any) -> Any:
    extra = {**GREEDY, **values.pop("extra_body", {})}
    return client.messages.create(model="tiny", messages=messages, extra_body=extra, **{"max_tokens": 16, **values})


def test_an_answer_is_the_offline_engine_s(client: anthropic.Anthropic, folder: Path) -> None:
    offline = LLM(folder, **TINY).chat(
        [{"role": "system", "content": "Be kind."}, *HELLO], SamplingParams(max_tokens=16, temperature=0)
    )[0]
    answer = ask(client, system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}])
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == offline.text
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(offline.prompt_ids), 16)
    assert (answer.stop_reason, answer.role, answer.model) == ("max_tokens", "assistant", "tiny")
    counted = client.messages.count_tokens(model="tiny", messages=HELLO, system="Be kind.")
    assert counted.input_tokens == len(offline.prompt_ids)


def test_a_stream_is_the_same_message(server: LiveServer, client: anthropic.Anthropic) -> None:
    whole = ask(client)
    events = list(ask(client, stream=True))
    assert [event.type for event in events if event.type != "content_block_delta"] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    with client.messages.stream(model="tiny", max_tokens=16, extra_body=GREEDY, messages=HELLO) as stream:
        collected = stream.get_final_message()
    assert collected.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert collected.usage.output_tokens == whole.usage.output_tokens

    async def main() -> str:
        many = anthropic.AsyncAnthropic(base_url=server.url, api_key="secret", max_retries=0)
        values: Any = {"model": "tiny", "max_tokens": 16, "extra_body": GREEDY, "messages": HELLO}
        async with many, many.messages.stream(**values) as stream:
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(main()) == whole.content[0].text


def test_tools_are_called(client: anthropic.Anthropic) -> None:
    for choice in ({"type": "any", "disable_parallel_tool_use": True},
                   {"type": "tool", "name": "add", "disable_parallel_tool_use": True}):  # fmt: skip
        values: Any = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 300, "extra_body": {"temperature": 1.0}}
        answer = ask(client, **values)
        assert answer.stop_reason == "tool_use"
        (block,) = answer.content
        assert (block.type, block.name) == ("tool_use", "add")
        jsonschema.validate(block.input, TOOL["input_schema"])
        with client.messages.stream(model="tiny", messages=HELLO, **values) as stream:
            (streamed,) = stream.get_final_message().content
        assert streamed.type == "tool_use"
        jsonschema.validate(streamed.input, TOOL["input_schema"])


def test_thinking_is_a_block_within_its_budget(client: anthropic.Anthropic) -> None:
    answer = ask(client, thinking={"type": "enabled", "budget_tokens": 5}, max_tokens=60)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    with client.messages.stream(
        model="tiny", max_tokens=60, extra_body=GREEDY, messages=HELLO, thinking={"type": "enabled", "budget_tokens": 5}
    ) as stream:
        collected = stream.get_final_message()
    assert collected.content[0].thinking == answer.content[0].thinking  # type: ignore[union-attr]
    assert collected.content[1].text == answer.content[1].text  # type: ignore[union-attr]
    assert ask(client, thinking={"type": "disabled"}).content[0].type == "text"
    assert ask(client, thinking={"type": "adaptive"}).content[0].type == "thinking"


def test_a_stop_sequence_is_told(client: anthropic.Anthropic) -> None:
    text = ask(client, max_tokens=40).content[0].text
    answer = ask(client, max_tokens=40, stop_sequences=["never", text[8:10]])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", text[8:10])
    assert answer.content[0].text == text[: text.index(text[8:10])]


def test_an_answer_in_a_form(client: anthropic.Anthropic) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": TOOL["input_schema"]}}
    answer = ask(client, output_config=config, max_tokens=200, extra_body={"temperature": 1.0})
    jsonschema.validate(json.loads(answer.content[0].text), TOOL["input_schema"])


def test_a_begun_answer_goes_on(client: anthropic.Anthropic, folder: Path) -> None:
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nI am "
    offline = LLM(folder, **TINY).generate(prompt, SamplingParams(max_tokens=10, temperature=0))[0]
    answer = ask(client, [*HELLO, {"role": "assistant", "content": "I am "}], max_tokens=10)
    assert answer.content[0].text == offline.text


def test_blocks_become_messages() -> None:
    body = CountRequest.model_validate(
        {
            "model": "tiny",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "I count."},
                        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4"}]},
                        {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                        {"type": "text", "text": "Well?"},
                    ],
                },
            ],
        }
    )
    job = message_job(body, SamplingParams())
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert job.messages == (
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "I count.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "4"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "user", "content": "Well?"},
    )
    bad = CountRequest.model_validate(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": [{"type": "tool_use", "id": "", "name": "", "input": {}}]}],
        }
    )
    with pytest.raises(RequestError, match="tool_use"):
        message_job(bad, SamplingParams())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"colour": "red"}, "colour: unknown field"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0..content"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"max_tokens": 5000}, "use max_tokens <="),
    ],
)
def test_errors_have_anthropic_s_form(client: anthropic.Anthropic, server: LiveServer, values: Any, words: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words) as caught:
        ask(client, extra_body=values)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["request_id"] == caught.value.response.headers["x-request-id"]


def test_a_wrong_key_and_a_wrong_model(server: LiveServer, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.AuthenticationError, match="API key"):
        ask(anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0))
    with pytest.raises(anthropic.NotFoundError, match="tiny"):
        client.messages.create(model="other", max_tokens=1, messages=HELLO)
