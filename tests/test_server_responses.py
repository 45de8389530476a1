"""OpenAI's /v1/responses through the real client, and how its items become a conversation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from pocketllm import LLM, SamplingParams
from pocketllm.errors import RequestError
from pocketllm.server.routes.responses import response_job
from pocketllm.server.schemas.responses import ResponseRequest
from servers import CHATTY, TINY, LiveServer, live, with_template
from tiny_chat import make_chat

TOOL: Any = {
    "type": "function",
    "name": "add",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(make_chat("qwen3", tmp_path_factory.mktemp("model")), CHATTY)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with live(folder, {"max_context": 1024}, served_names=("tiny",)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_a_response_is_the_offline_engine_s_answer(client: openai.OpenAI, folder: Path) -> None:
    offline = LLM(folder, **TINY).chat(
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}],
        SamplingParams(max_tokens=12, temperature=0),
    )[0]
    answer = client.responses.create(
        model="tiny", input="Hello", instructions="Be kind.", max_output_tokens=12, temperature=0, metadata={"a": "b"}
    )
    assert answer.output_text == offline.text
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.metadata == {"a": "b"}
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(offline.prompt_ids), 12)


def test_events_build_the_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="tiny", input="Hello", max_output_tokens=12, temperature=0)
    events = list(
        client.responses.create(model="tiny", input="Hello", max_output_tokens=12, temperature=0, stream=True)
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events if event.type != "response.output_text.delta"]
    assert types == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last: Any = events[-1]
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage


def test_the_client_s_own_collector_reads_the_stream(server: LiveServer) -> None:
    async def main() -> Any:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            format = {"type": "json_schema", "name": "s", "schema": TOOL["parameters"]}
            values: Any = {"model": "tiny", "input": "Hello", "max_output_tokens": 200, "temperature": 0,
                           "text": {"format": format}, "reasoning": {"effort": "none"}}  # fmt: skip
            async with client.responses.stream(**values) as stream:
                async for _ in stream:
                    pass
                return await stream.get_final_response(), await client.responses.create(**values)

    collected, whole = asyncio.run(main())
    assert collected.output_text == whole.output_text


def test_reasoning_and_calls_are_items(client: openai.OpenAI) -> None:
    values: Any = {"model": "tiny", "input": "Hello", "tools": [TOOL], "temperature": 2, "parallel_tool_calls": False}
    forced = client.responses.create(**values, tool_choice="required", reasoning={"effort": "none"},
                                     max_output_tokens=300)  # fmt: skip
    assert forced.status == "completed"
    (item,) = forced.output
    assert item.type == "function_call"
    assert item.name == "add"
    jsonschema.validate(json.loads(item.arguments), TOOL["parameters"])
    events = list(client.responses.create(**values, tool_choice={"type": "function", "name": "add"}, stream=True,
                                          reasoning={"effort": "none"}, max_output_tokens=300))  # fmt: skip
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert [event.arguments for event in done] == ["".join(deltas)]
    thinking = client.responses.create(model="tiny", input="Hello", reasoning={"effort": "high"}, max_output_tokens=20)
    assert thinking.output[0].type == "reasoning"
    assert thinking.usage is not None
    assert thinking.usage.output_tokens_details.reasoning_tokens == 20


def test_an_answer_in_a_form(client: openai.OpenAI) -> None:
    format: Any = {"type": "json_schema", "name": "s", "schema": TOOL["parameters"], "strict": True}
    answer = client.responses.create(model="tiny", input="Hello", text={"format": format}, temperature=2,
                                     reasoning={"effort": "none"}, max_output_tokens=200)  # fmt: skip
    jsonschema.validate(json.loads(answer.output_text), TOOL["parameters"])


def job(**values: Any) -> Any:
    return response_job(ResponseRequest.model_validate(values), {"temperature": 1.0})


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be "}, {"type": "input_text", "text": "kind"}]},
        {"role": "user", "content": "2 + 2?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}", "id": "fc_1", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "5"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "4.", "annotations": []}]},
        {"role": "user", "content": "Sure?"},
    ]  # fmt: skip
    assert job(input=items, instructions="Short.").messages == (
        {"role": "system", "content": "Short."},
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "2 + 2?"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "tool", "tool_call_id": "c2", "content": "5"},
        {"role": "assistant", "content": "4."},
        {"role": "user", "content": "Sure?"},
    )


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "web_search_call", "id": "1"}, "input.0. is of type 'web_search_call'"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input_image"),
        ({"role": "user", "content": "x", "colour": "red"}, "input.0..colour: unknown field"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "input.0..arguments: this field is missing"),
    ],
)
def test_items_that_can_t_be_read_are_named(item: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        job(input=[item])


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools.0..type"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
def test_what_needs_a_store_or_more_is_refused(client: openai.OpenAI, values: Any, field: str) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        client.responses.create(model="tiny", input="Hello", **values)
