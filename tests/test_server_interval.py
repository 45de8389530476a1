"""`stream_interval`: several tokens in an event change nothing but the number of events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from servers import CHATTY, live, with_template
from tiny_chat import make_chat

PROMPTS: list[Any] = ["one", "two", "and a third one"]
COMMON: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "temperature": 1.5, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(make_chat("qwen3", tmp_path_factory.mktemp("model")), CHATTY)


def streamed(client: openai.OpenAI, prompt: str, seed: int, **more: Any) -> dict[str, Any]:
    values = COMMON | more
    text, events, ids, finish, usage = "", 0, [], None, None
    options: Any = {"include_usage": True}
    for chunk in client.completions.create(
        prompt=prompt, seed=seed, stream=True, logprobs=0, stream_options=options, **values
    ):
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.text
            events += 1
            finish = choice.finish_reason or finish
            ids += choice.logprobs.token_logprobs or [] if choice.logprobs is not None else []
    assert usage is not None
    return {"text": text, "events": events, "logprobs": ids, "finish": finish, "tokens": usage.completion_tokens}


def test_an_interval_joins_events_and_changes_nothing_else(folder: Path) -> None:
    results: list[list[dict[str, Any]]] = []
    stop = ""
    for interval in (0.0, 3600.0):
        with live(folder, served_names=("tiny",), stream_interval=interval) as server:
            client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
            found = [streamed(client, prompt, seed) for seed, prompt in enumerate(PROMPTS)]
            stop = stop or found[0]["text"][12:14]
            found.append(streamed(client, PROMPTS[0], 0, stop=[stop]))
            results.append(found)
    each, together = results
    for one, other in zip(each, together, strict=True):
        assert one["events"] > other["events"] <= 4
        assert {**one, "events": 0} == {**other, "events": 0}
    assert each[-1]["finish"] == "stop"
    assert stop not in each[-1]["text"]
    assert len(each[-1]["logprobs"]) == each[-1]["tokens"] < 40  # not what was computed beyond the stop string
