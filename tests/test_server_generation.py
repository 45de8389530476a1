"""What a generation makes of an engine's tokens, with a scripted engine: calls, reasoning, stops, failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from pocketllm.engine.request import FinishReason, RequestOutput
from pocketllm.errors import RequestError
from pocketllm.options import SamplingParams
from pocketllm.server.answers import Answer, Blocks, collect
from pocketllm.server.chat_job import ChatJob
from pocketllm.server.errors import ApiError
from pocketllm.server.generation import Generation, Usage
from pocketllm.server.reading import Reading
from pocketllm.text.chat import ChatTemplate
from pocketllm.text.tokenizer import Tokenizer, load_tokenizer
from servers import CHATTY
from tiny_chat import make_chat

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_chat("qwen3", tmp_path_factory.mktemp("model")))


class ScriptedEngine:
    """Gives the tokens of its texts to its requests in turn, `step` tokens an output."""

    def __init__(
        self, tokenizer: Tokenizer, texts: Sequence[str], reason: FinishReason = "stop", error: Exception | None = None,
        step: int = 1,
    ) -> None:  # fmt: skip
        self._tokenizer, self._texts, self._reason, self._error, self._step = (
            tokenizer,
            list(texts),
            reason,
            error,
            step,
        )
        self.abandoned: list[str] = []
        self.given = 0

    async def submit(
        self, prompt_ids: list[int], params: SamplingParams, *, request_id: str, slot: Any, constraint: Any
    ) -> tuple[str, AsyncIterator[RequestOutput]]:
        return request_id, self._outputs(request_id, self._texts.pop(0), len(prompt_ids))

    async def _outputs(self, request_id: str, text: str, prompt: int) -> AsyncIterator[RequestOutput]:
        ids = self._tokenizer.encode(text, add_special=False)
        for at in range(0, len(ids), self._step):
            await asyncio.sleep(0)
            self.given += 1
            new = tuple(ids[at : at + self._step])
            last = at + self._step >= len(ids)
            reason = self._reason if last else None
            error = self._error if last else None
            yield RequestOutput(request_id, 0, new, (), reason, error, prompt, 3, at + len(new))

    def abandon(self, request_id: str) -> None:
        self.abandoned.append(request_id)


class Observed:
    def __init__(self) -> None:
        self.tokens = 0
        self.ends: list[str] = []

    def on_token(self, seconds: float, *, first: bool) -> None:
        assert first == (self.tokens == 0)
        self.tokens += 1

    def on_end(self, reason: str, seconds: float, usage: Usage) -> None:
        self.ends.append(reason)


def read(tokenizer: Tokenizer, text: str, step: int = 1, stop: tuple[str, ...] = (), reason: FinishReason = "stop",
         error: Exception | None = None, **job: Any) -> tuple[Answer, Generation, ScriptedEngine]:  # fmt: skip
    template = ChatTemplate(CHATTY)
    values: dict[str, Any] = {
        "messages": ({"role": "user", "content": "x"},),
        "params": SamplingParams(stop=stop),
        **job,
    }
    chat = ChatJob(**values)
    rendered = template.render(chat.messages, tools=list(chat.visible_tools) or None, **chat.template_variables)
    choice = Reading(tokenizer, template).chat(chat, rendered, [1, 2, 3, 4], chat.params)
    engine, observed = ScriptedEngine(tokenizer, [text], reason, error, step), Observed()
    generation = Generation("id", engine, observed)  # type: ignore[arg-type]

    async def main() -> Answer:
        await generation.start([choice])
        try:
            found = (await collect(generation))[0]
        finally:
            assert len(observed.ends) == 1
        assert observed.ends == [found.finish.reason]
        return found

    return asyncio.run(main()), generation, engine


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_thinking_text_and_calls(tokenizer: Tokenizer, step: int) -> None:
    text = f"<think>\nhm\n</think>\n\nI add.\n{CALL % 1}\n{CALL % 2}"
    answer, generation, _ = read(tokenizer, text, step, tools=(TOOL,))
    assert (answer.reasoning, answer.content) == ("hm", "I add.")
    assert [(call.name, call.arguments) for call in answer.calls] == [("add", '{"a": 1}'), ("add", '{"a": 2}')]
    assert answer.finish.reason == "tool_calls"
    usage = generation.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (4, 3, len(text))
    if step == 1:
        assert usage.reasoning_tokens == len("\nhm\n</think>")


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_one_call_only(tokenizer: Tokenizer, step: int) -> None:
    text = f"{CALL % 1}\n{CALL % 2}{CALL % 3}"
    answer, _, engine = read(tokenizer, text, step, tools=(TOOL,), parallel_calls=False)
    assert [call.arguments for call in answer.calls] == ['{"a": 1}']
    assert answer.finish.reason == "tool_calls"
    assert engine.abandoned == ["id-0"]
    assert engine.given < len(text) or step > 1


def test_calls_of_unknown_tools_and_of_none_are_text(tokenizer: Tokenizer) -> None:
    unknown = (CALL % 1).replace("add", "sub")
    assert read(tokenizer, unknown, tools=(TOOL,))[0].content == unknown
    assert read(tokenizer, CALL % 1)[0].content == CALL % 1
    assert read(tokenizer, CALL % 1)[0].finish.reason == "stop"


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_stop_string_ends_the_work(tokenizer: Tokenizer, step: int) -> None:
    answer, _, engine = read(tokenizer, "One. Two. END three", step, stop=("END", "never"))
    assert answer.content == "One. Two. "
    assert (answer.finish.reason, answer.finish.stop) == ("stop", "END")
    assert engine.abandoned == ["id-0"]


def test_what_was_held_back_comes_at_the_end(tokenizer: Tokenizer) -> None:
    answer, _, _ = read(tokenizer, "é EN", stop=("END",), reason="length")
    assert (answer.content, answer.finish.reason, answer.finish.stop) == ("é EN", "length", None)


def test_failures_are_errors(tokenizer: Tokenizer) -> None:
    with pytest.raises(ApiError, match="not finite") as failed:
        read(tokenizer, "ab", reason="error", error=RequestError("not finite"))
    assert failed.value.status == 500  # the request was accepted: not the client's fault
    with pytest.raises(ApiError, match="shutting down") as ended:
        read(tokenizer, "ab", reason="abort")
    assert ended.value.status == 503


def test_blocks_of_an_answer(tokenizer: Tokenizer) -> None:
    text = f"<think>\nhm\n</think>\n\nI add.\n{CALL % 1}\n{CALL % 2} Done."
    template = ChatTemplate(CHATTY)
    job = ChatJob(({"role": "user", "content": "x"},), SamplingParams(), tools=(TOOL,))
    choice = Reading(tokenizer, template).chat(job, template.render(job.messages, tools=[TOOL]), [1], job.params)
    blocks, events = Blocks(), []
    for c in text:
        events += list(blocks.push(choice.parser.push(c)))
    events += [*blocks.push(choice.parser.finish()), *blocks.finish()]
    assert [(block.kind, block.text) for block in blocks.all] == [
        ("reasoning", "hm"), ("text", "I add."), ("call", '{"a": 1}'), ("call", '{"a": 2}'), ("text", "\n\n Done."),
    ]  # fmt: skip
    order = [(event.kind, event.block.index) for event in events if event.kind != "delta"]
    assert order == [(kind, index) for index in range(5) for kind in ("start", "stop")]
