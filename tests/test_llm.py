"""`LLM` on the embedded model: texts in, texts out, errors per prompt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pocketllm import LLM, EngineOptions, SamplingParams
from pocketllm.errors import OptionError, RequestError

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def llm(embedded_model: Path) -> LLM:
    return LLM(embedded_model, max_batch_size=4, max_context=512)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_model_answers(llm: LLM) -> None:
    (answer,) = llm.chat(ask("What is the capital of France? Answer in one short sentence."))
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
    assert answer.error is None
    assert "<|im_end|>" not in answer.text


def test_a_batch_keeps_its_order_and_its_errors_apart(llm: LLM) -> None:
    prompts: list[Any] = ["The sea is", [1, 2, 99999], "x " * 600, "One, two, three,", "", None, 7]
    answers = llm.generate(prompts, SamplingParams(max_tokens=8))
    assert [a.index for a in answers] == [0, 1, 2, 3, 4, 5, 6]
    assert [a.error is None for a in answers] == [True, False, False, True, False, False, False]
    assert "99999" in str(answers[1].error)
    assert "a slot holds 512" in str(answers[2].error)
    assert "None: token ids are a sequence of whole numbers" in str(answers[5].error)
    assert len(answers[0].token_ids) == len(answers[3].token_ids) == 8
    again = llm.generate("One, two, three,", SamplingParams(max_tokens=8), progress=True)
    assert again[0].text == answers[3].text
    assert " four" in answers[3].text


def test_a_conversation_that_the_template_refuses_is_its_own_error(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n) for n in (5, 6, 7, 8)]
    conversations = [ask("Hello"), [{"role": "user"}], None, ask("Name a colour.")]
    answers = llm.chat(conversations, params)  # type: ignore[arg-type]
    assert [a.index for a in answers] == [0, 1, 2, 3]
    assert [a.error is None for a in answers] == [True, False, False, True]
    assert "messages[0] (role 'user') needs 'content'" in str(answers[1].error)
    assert "a conversation is a list of messages" in str(answers[2].error)
    assert answers[1].finish_reason == "error"
    assert [len(a.token_ids) for a in answers] == [5, 0, 0, 8]
    assert answers[3].token_ids == llm.chat(ask("Name a colour."), params[3])[0].token_ids
    assert "needs 'content'" in str(llm.chat([{"role": "user"}])[0].error)


def test_streamed_pieces_make_the_text(llm: LLM) -> None:
    pieces: dict[int, str] = {0: "", 1: ""}
    last = {}
    for delta in llm.stream(["Once upon a time", "Colours: red, green,"], SamplingParams(max_tokens=12)):
        pieces[delta.generation.index] += delta.text
        last[delta.generation.index] = delta.generation
    assert {i: g.text for i, g in last.items()} == pieces
    assert llm.tokenizer is not None
    assert all(llm.tokenizer.decode(g.token_ids) == g.text for g in last.values())


def test_stop_strings_end_the_engine_s_work_too(llm: LLM) -> None:
    whole = llm.generate("Count: 1, 2, 3, 4,", SamplingParams(max_tokens=40))[0]
    assert " 7" in whole.text
    stopped = llm.generate("Count: 1, 2, 3, 4,", SamplingParams(max_tokens=40, stop=(" 7",)))[0]
    assert stopped.text == whole.text[: whole.text.index(" 7")]
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) < len(whole.token_ids)
    assert llm.engine.slots.num_free == 4


def test_leaving_a_stream_early_frees_its_slots(llm: LLM) -> None:
    for _ in llm.stream(["a", "b", "c"], SamplingParams(max_tokens=100)):
        break
    assert llm.engine.slots.num_free == 4
    assert not llm.engine.has_work


def test_sampling_with_a_seed_repeats_and_logprobs_come_along(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=7, logprobs=3)
    first, second = llm.generate(["Write a poem:", "Write a poem:"], params)
    assert first.token_ids == second.token_ids
    other = llm.generate("Write a poem:", SamplingParams(max_tokens=10, temperature=1.0, seed=8))[0]
    assert other.token_ids != first.token_ids
    assert len(first.logprobs) == 10
    assert all(len(step.top) == 3 and step.chosen <= step.top[0][1] + 1e-6 for step in first.logprobs)


def test_slots_held_by_others_are_said_to_be(llm: LLM) -> None:
    held = [llm.engine.acquire_slot(16) for _ in range(4)]
    with pytest.raises(RequestError, match="all slots are held by their callers"):
        llm.generate("hello")
    for slot in held:
        llm.engine.release_slot(slot)
    assert llm.generate("hello", SamplingParams(max_tokens=2))[0].error is None


def test_wrong_calls_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts but 1"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(RequestError, match=r"is no SamplingParams: write SamplingParams\(max_tokens="):
        llm.generate("a", {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="NoneType: a prompt is a text or a list of token ids"):
        llm.generate(None)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="not both"):
        LLM(None, EngineOptions(), max_batch_size=2)


def test_building_an_engine_leaves_torchs_compiler_alone(embedded_model: Path) -> None:
    """Importing it takes over a second, and an accident is enough: joining meta tensors, a dispatch mode's wrapper."""
    code = (
        "import sys; from pocketllm import LLM, SamplingParams; llm = LLM(sys.argv[1], max_batch_size=1, max_context=256);"
        "llm.generate('Hello', SamplingParams(max_tokens=2)); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(embedded_model)], check=True)
