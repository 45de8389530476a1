"""The real `openai` client against a live server with a tiny random model: chat and completions."""

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
from servers import CHATTY, TINY, LiveServer, live, with_template
from tiny_chat import make_chat

HELLO: Any = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {
    "type": "function",
    "function": {"name": "time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
SCHEMA: Any = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(make_chat("qwen3", tmp_path_factory.mktemp("model")), CHATTY)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with live(folder, {"max_context": 1024}, served_names=("tiny", "alias")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, **{**TINY, "max_context": 1024})


def ask(client: openai.OpenAI, messages: Any = HELLO, **values: Any) -> Any:
    """One chat completion of at most 24 tokens, with the fields the client does not know among the others."""
    known = {"max_completion_tokens": 24, "seed": 5, **values}
    extra = {name: known.pop(name) for name in list(known) if name in EXTRA}
    return client.chat.completions.create(model="tiny", messages=messages, extra_body=extra, **known)


def no_space(llm: LLM) -> dict[str, float]:
    """A logit_bias: a random model may write white space between the parts of a JSON text until its tokens run out."""
    assert llm.tokenizer is not None
    return {str(token): -30.0 for token in llm.tokenizer.encode(" \n\t\r")}


EXTRA = {
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "min_tokens", "ignore_eos", "structured_outputs",
    "enable_thinking", "thinking_token_budget", "chat_template_kwargs", "continue_final_message",
    "add_generation_prompt",
}  # fmt: skip


def join(chunks: Any) -> tuple[str, list[Any]]:
    chunks = list(chunks)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks


def test_an_answer_is_the_offline_engine_s(client: openai.OpenAI, llm: LLM) -> None:
    offline = llm.chat(HELLO, SamplingParams(max_tokens=24, temperature=1.0, seed=5))[0]
    answer = ask(client)
    assert answer.choices[0].message.content == offline.text
    assert answer.choices[0].finish_reason == offline.finish_reason
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(offline.prompt_ids), len(offline.token_ids))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert answer.model == "tiny"


def test_a_stream_is_the_same_answer(client: openai.OpenAI) -> None:
    whole = ask(client)
    text, chunks = join(ask(client, stream=True, stream_options={"include_usage": True}))
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in join(ask(client, stream=True))[1])


def test_async_streams_side_by_side(server: LiveServer, client: openai.OpenAI) -> None:
    async def stream(seed: int) -> str:
        answer = await many.chat.completions.create(
            model="alias", messages=HELLO, seed=seed, max_tokens=24, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

    async def main() -> list[str]:
        async with many:
            return await asyncio.gather(*(stream(seed) for seed in range(8)))

    many = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    texts = asyncio.run(main())
    assert texts == [ask(client, seed=seed).choices[0].message.content for seed in range(8)]
    assert len(set(texts)) == 8


def test_n_choices_use_following_seeds(client: openai.OpenAI) -> None:
    answer = ask(client, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    single = [ask(client, seed=5 + i) for i in range(3)]
    assert [c.message.content for c in answer.choices] == [s.choices[0].message.content for s in single]
    assert answer.usage.completion_tokens == sum(s.usage.completion_tokens for s in single)
    assert answer.usage.prompt_tokens == single[0].usage.prompt_tokens
    texts = ["", "", ""]
    ended = set()
    for chunk in ask(client, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        if chunk.choices[0].finish_reason is not None:
            ended.add(chunk.choices[0].index)
    assert texts == [c.message.content for c in answer.choices]
    assert ended == {0, 1, 2}


def test_logprobs_have_an_entry_for_each_token(client: openai.OpenAI) -> None:
    plain = {"logit_bias": {"256": -100, "257": -100}}  # no control tokens, which are no text
    answer = ask(client, logprobs=True, top_logprobs=3, **plain)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    data = b"".join(bytes(entry.bytes) for entry in entries)
    assert data.decode(errors="replace") == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
    streamed = [e for c in ask(client, logprobs=True, top_logprobs=3, stream=True, **plain) if c.choices[0].logprobs
                for e in c.choices[0].logprobs.content]  # fmt: skip
    assert streamed == entries
    assert ask(client).choices[0].logprobs is None


def test_stops_end_the_engine_s_work(client: openai.OpenAI) -> None:
    whole = ask(client, temperature=0, max_completion_tokens=40)
    text = whole.choices[0].message.content
    stop = text[10:12]
    stopped = ask(client, temperature=0, max_completion_tokens=40, stop=[stop, "never seen"])
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens < whole.usage.completion_tokens
    by_id = ask(client, temperature=0, logit_bias={"65": 100}, stop_token_ids=[65])
    assert (by_id.usage.completion_tokens, by_id.choices[0].finish_reason) == (1, "stop")


def test_sampling_fields_reach_the_engine(client: openai.OpenAI) -> None:
    text = client.completions.create(model="tiny", prompt="x", max_tokens=6, temperature=0, logit_bias={"64": 100})
    assert text.choices[0].text == "aaaaaa"  # token 64 of the tiny tokenizer
    punished = ask(client, temperature=0, max_completion_tokens=6, logit_bias={"64": 8.0}, frequency_penalty=2.0,
                   presence_penalty=2.0, repetition_penalty=1.5, ignore_eos=True, min_tokens=2)  # fmt: skip
    assert punished.choices[0].message.content != "aaaaaa"
    greedy = ask(client, temperature=0, ignore_eos=True)
    for name, value in (("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0)):
        assert (
            ask(client, ignore_eos=True, **{name: value}).choices[0].message.content
            == greedy.choices[0].message.content
        )


def test_completions_take_texts_and_ids(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    assert llm.tokenizer is not None
    offline = [g.text for g in llm.generate(["One", "two"], params)]
    for prompt in (["One", "two"], [llm.tokenizer.encode("One"), llm.tokenizer.encode("two")]):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, seed=3)
        assert [choice.text for choice in answer.choices] == offline
    for prompt in ("One", llm.tokenizer.encode("One")):
        echoed = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, seed=3, echo=True)
        assert echoed.choices[0].text == "One" + offline[0]
    many = client.completions.create(model="tiny", prompt=["One", "two"], n=2, max_tokens=8, seed=3)
    assert [choice.text for choice in many.choices][::2] == offline
    assert many.usage is not None
    assert many.usage.prompt_tokens == len("Onetwo")
    texts = ["", ""]
    for chunk in client.completions.create(model="tiny", prompt=["One", "two"], max_tokens=8, seed=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == offline


def test_completion_logprobs_are_parallel_lists(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="One", max_tokens=8, temperature=0, logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert len(found.tokens) == len(found.token_logprobs or ()) == len(found.top_logprobs or ())
    offsets = found.text_offset or []
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert all(answer.choices[0].text[at:].startswith(token) for at, token in zip(offsets, found.tokens, strict=True)
               if token.isprintable() and "bytes:" not in token and "<|" not in token)  # fmt: skip
    assert all(
        max(top.values()) == chosen for top, chosen in zip(found.top_logprobs, found.token_logprobs, strict=True)
    )


@pytest.mark.parametrize("temperature", [0, 2])
def test_required_tools_are_called(client: openai.OpenAI, llm: LLM, temperature: int) -> None:
    fields: Any = {"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": False,
                   "enable_thinking": False, "logit_bias": no_space(llm)}  # fmt: skip
    answer = ask(client, **fields, max_completion_tokens=300, temperature=temperature)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    tool = {"weather": WEATHER, "time": TIME}[call.function.name]
    jsonschema.validate(json.loads(call.function.arguments), tool["function"]["parameters"])
    assert call.id.startswith("call_")


def test_a_named_tool_is_called_in_a_stream(client: openai.OpenAI, llm: LLM) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    chunks = list(ask(client, tools=[TIME, WEATHER], tool_choice=named, max_completion_tokens=300, stream=True,
                      parallel_tool_calls=False, enable_thinking=False, logit_bias=no_space(llm)))  # fmt: skip
    deltas = [delta for c in chunks for delta in c.choices[0].delta.tool_calls or ()]
    assert deltas[0].function.name == "weather"
    assert deltas[0].id
    assert all(delta.index == 0 and delta.id is None and delta.function.name is None for delta in deltas[1:])
    arguments = json.loads("".join(delta.function.arguments for delta in deltas))
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_tool_choice_none_hides_the_tools(server: LiveServer, client: openai.OpenAI) -> None:
    plain = ask(client)
    assert (
        ask(client, tools=[WEATHER], tool_choice="none").choices[0].message.content == plain.choices[0].message.content
    )
    assert ask(client, tools=[WEATHER]).usage.prompt_tokens > plain.usage.prompt_tokens


@pytest.mark.parametrize("temperature", [0, 2])
def test_answers_in_a_form(client: openai.OpenAI, llm: LLM, temperature: int) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    answer = ask(client, response_format=schema, logit_bias=no_space(llm), enable_thinking=False, max_completion_tokens=200,
                 temperature=temperature)  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    for outputs, texts in (
        ({"choice": ["yes", 'a "no"']}, {"yes", 'a "no"'}),
        ({"regex": "[ab]{2}"}, {"aa", "ab", "ba", "bb"}),
        ({"grammar": 'start: "x" | "yz"'}, {"x", "yz"}),
    ):
        answer = ask(client, structured_outputs=outputs, enable_thinking=False, temperature=temperature)
        assert answer.choices[0].message.content in texts
    text = client.completions.create(
        model="tiny", prompt="q", temperature=temperature, extra_body={"structured_outputs": {"regex": "[0-9]{3}"}}
    ).choices[0].text  # fmt: skip
    assert len(text) == 3
    assert text.isdigit()


def test_json_after_thinking_within_a_budget(client: openai.OpenAI, llm: LLM) -> None:
    bias = no_space(llm)
    fields: Any = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
                   "enable_thinking": True, "thinking_token_budget": 10, "max_completion_tokens": 200,
                   "logit_bias": bias}  # fmt: skip
    answer = ask(client, **fields)
    message = answer.choices[0].message
    jsonschema.validate(json.loads(message.content), SCHEMA)
    assert message.reasoning
    assert message.reasoning == message.reasoning_content
    tokens = answer.usage.completion_tokens_details.reasoning_tokens
    assert (
        10 <= tokens <= 10 + len("\n</think>\n\n")
    )  # a token a byte; the end counts as reasoning until it is complete
    chunks = list(ask(client, **fields, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(d, "reasoning", None) or "" for d in deltas) == message.reasoning
    assert "".join(d.content or "" for d in deltas) == message.content


def test_thinking_is_switched_in_three_ways(server: LiveServer) -> None:
    def count(**values: Any) -> int:
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 1, **values}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    plain, thinking = count(), count(enable_thinking=True)
    assert thinking == plain + len("<think>\n")
    assert count(chat_template_kwargs={"enable_thinking": True}) == thinking
    assert count(reasoning_effort="high") == thinking
    assert count(reasoning_effort="none") == count(enable_thinking=False) == plain


def test_the_prompt_is_what_the_template_writes(server: LiveServer) -> None:
    def prompt(**body: Any) -> str:
        tokens = server.post("/tokenize", body).json()["tokens"]
        return str(server.post("/detokenize", {"tokens": tokens}).json()["prompt"])

    asked = "<|im_start|>user\nHello<|im_end|>\n"
    assert prompt(messages=HELLO) == asked + "<|im_start|>assistant\n"
    assert prompt(messages=HELLO, add_generation_prompt=False) == asked
    begun = [*HELLO, {"role": "assistant", "content": "I am "}]
    assert prompt(messages=begun, continue_final_message=True) == asked + "<|im_start|>assistant\nI am "
    history = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind"}]},
        {"role": "assistant", "content": "Sure.", "reasoning": "hm",
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]  # fmt: skip
    text = prompt(messages=history, chat_template_kwargs={"enable_thinking": True})
    assert text == (
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nSure."
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|im_end|>\n<|im_start|>tool\n42<|im_end|>\n'
        "<|im_start|>assistant\n<think>\n"
    )


def test_a_message_is_continued(client: openai.OpenAI, llm: LLM) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I am "}]
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nI am "
    offline = llm.generate(prompt, SamplingParams(max_tokens=10, temperature=0))[0]
    answer = ask(client, begun, continue_final_message=True, temperature=0, max_completion_tokens=10)
    assert answer.choices[0].message.content == offline.text


def test_models_and_tokens(server: LiveServer, client: openai.OpenAI) -> None:
    cards = client.models.list().data
    assert [card.id for card in cards] == ["tiny", "alias"]
    assert client.models.retrieve("alias").model_dump()["max_model_len"] == 1024
    with pytest.raises(openai.NotFoundError, match="tiny, alias"):
        client.models.retrieve("other/model")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=HELLO)
    answer = server.post("/tokenize", {"prompt": "añ", "return_token_strs": True}).json()
    assert answer["count"] == 3
    assert answer["token_strs"][0] == "a"
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "añ"}
