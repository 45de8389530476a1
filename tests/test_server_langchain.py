"""LangChain's OpenAI client, as agents use it, against a live server with a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from servers import CHATTY, LiveServer, live, with_template
from tiny_chat import make_chat


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=5)
    days: int = Field(le=9, ge=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = with_template(make_chat("qwen3", tmp_path_factory.mktemp("model")), CHATTY)
    with live(folder, {"max_context": 1024}, served_names=("tiny",)) as running:
        yield running


def chat(server: LiveServer, **values: Any) -> ChatOpenAI:
    values = {"temperature": 0, "extra_body": {"enable_thinking": False}, **values}  # a random model thinks for long
    return ChatOpenAI(base_url=server.url + "/v1", api_key="none", model="tiny", max_retries=0, **values)  # type: ignore[arg-type]


def test_whole_and_streamed_answers_agree(server: LiveServer) -> None:
    model = chat(server, max_tokens=12, stream_usage=True)
    whole = model.invoke("Hello")
    pieces = list(model.stream("Hello"))
    assert "".join(str(piece.content) for piece in pieces) == whole.content
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == whole.response_metadata["token_usage"]["completion_tokens"] <= 12
    usage = [piece.usage_metadata for piece in pieces if piece.usage_metadata]  # type: ignore[attr-defined]
    assert [u["output_tokens"] for u in usage] == [whole.usage_metadata["output_tokens"]]


def test_a_tool_is_called_and_its_result_is_read(server: LiveServer) -> None:
    model = chat(server, max_tokens=200).bind_tools([Weather], tool_choice="required")
    answer = model.invoke("How is the weather in Rome?")
    assert isinstance(answer, AIMessage)
    assert answer.tool_calls
    for call in answer.tool_calls:
        assert call["name"] == "Weather"
        Weather.model_validate(call["args"])
    history = [HumanMessage("How is the weather in Rome?"), answer]
    history += [ToolMessage("sunny", tool_call_id=call["id"]) for call in answer.tool_calls]
    assert chat(server, max_tokens=5).invoke(history).response_metadata["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_has_its_schema(server: LiveServer, method: Any) -> None:
    model = chat(server, max_tokens=200, temperature=1, seed=3).with_structured_output(Weather, method=method)
    assert isinstance(model.invoke("Rome"), Weather)


def test_a_batch_runs_in_several_slots(server: LiveServer) -> None:
    model = chat(server, max_tokens=6)
    prompts = [f"number {i}" for i in range(6)]
    assert [m.content for m in model.batch(prompts)] == [model.invoke(p).content for p in prompts]
