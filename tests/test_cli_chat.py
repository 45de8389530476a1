"""`pocketllm chat`: conversations in slots (`ChatRoom`), and the terminal around them."""

from __future__ import annotations

import os
import signal

import pytest
from typer.testing import CliRunner

from pocketllm.cli.chat import stop_on_interrupt
from pocketllm.cli.chat_room import ChatRoom
from pocketllm.cli.main import app
from pocketllm.engine.engine import Engine
from pocketllm.errors import NoFreeSlot, OptionError, OutOfPages, RequestError, SlotError
from pocketllm.llm import LLM
from pocketllm.options import SamplingParams
from tiny_chat import make_chat

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_chat("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture
def room(model):
    return ChatRoom(LLM(model, max_batch_size=3, max_context=512, page_size=64, threads=1), PARAMS)


def say(room, text):
    return "".join(room.ask(text))


def test_a_turn_answers_as_the_model_does_and_reuses_the_slot(room):
    first = say(room, "hello there")
    assert room.answer.reused_tokens == 0
    assert room.answer.text == first
    assert (room.answer.num_tokens, room.answer.finish_reason) == (8, "length")
    asked = room.answer.prompt_tokens
    second = say(room, "and now?")
    assert asked <= room.answer.reused_tokens < room.answer.prompt_tokens
    roles = [message["role"] for message in room.current.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    (alone,) = room.llm.chat([room.current.messages[:3]], PARAMS)
    assert second == alone.text


def test_conversations_do_not_mix(room):
    say(room, "one")
    room.new("other")
    answer = say(room, "two")
    (alone,) = room.llm.chat([[{"role": "user", "content": "two"}]], PARAMS)
    assert answer == alone.text
    assert room.switch("1").name == "chat-1"
    assert [(line.number, line.name, line.turns, line.current) for line in room.lines()] == [
        (1, "chat-1", 1, True),
        (2, "other", 1, False),
    ]
    assert all(line.tokens > 0 for line in room.lines())


def test_a_fork_goes_on_from_what_was_said_without_computing_it(room):
    say(room, "once upon a time " * 6)
    parent, child = room.current, room.fork("branch")
    assert child.slot != parent.slot
    in_child = say(room, "left")
    assert room.answer.reused_tokens > 64
    room.switch("chat-1")
    assert parent.turns == 1
    assert say(room, "left") == in_child


def test_busy_slots_and_full_pools_name_the_way_out(room, model):
    room.new()
    room.new()
    for refused in (room.new, room.fork):
        with pytest.raises(NoFreeSlot, match=r"all 3 slots are busy: /close frees one, or start with more --slots"):
            refused()
    assert len(room.conversations) == 3
    closed = room.current.slot
    assert room.close().name == "chat-2"
    assert room.new("again").slot == closed

    llm = LLM(model, max_batch_size=2, max_context=512, kv_tokens=512, page_size=64, threads=1)
    small = ChatRoom(llm, SamplingParams(max_tokens=400))
    small.new()
    with pytest.raises(OutOfPages, match="/close"):
        say(small, "hi")
    assert small.current.messages == []
    small.close()
    assert small.answer.finish_reason == "abort"
    say(small, "hi")
    assert small.answer.finish_reason in ("stop", "length")


def test_closing_the_last_conversation_begins_a_fresh_one(room):
    say(room, "hi")
    assert room.close().turns == 0
    assert [line.tokens for line in room.lines()] == [0]


def test_names_are_unique_and_no_numbers(room):
    room.new("a")
    for bad in ("a", "7"):
        with pytest.raises(RequestError, match="choose another"):
            room.new(bad)
    with pytest.raises(RequestError, match="there are 1 chat-1, 2 a"):
        room.switch("b")
    assert len(room.conversations) == 2


def test_stopping_early_keeps_the_part_and_frees_the_engine(room):
    pieces = room.ask("talk")
    part = next(pieces) + next(pieces) + next(pieces)
    pieces.close()
    assert room.current.messages[-1] == {"role": "assistant", "content": part}
    assert room.answer.finish_reason == "abort"
    assert not room.llm.engine.has_work
    say(room, "go on")
    assert room.answer.reused_tokens > 0


def test_retry_replaces_the_last_answer(room):
    with pytest.raises(RequestError, match="nothing was asked yet"):
        room.retry()
    first = say(room, "hi")
    assert "".join(room.retry()) == first
    assert len(room.current.messages) == 2
    room.set_param("temperature", "2")
    room.set_param("seed", "1")
    assert "".join(room.retry()) != first


def test_a_failed_turn_is_taken_back(room, monkeypatch):
    say(room, "hi")
    before = list(room.current.messages)
    with pytest.raises(SlotError, match="/new begins another"):
        say(room, "x" * 600)
    assert room.current.messages == before
    monkeypatch.setattr(room.llm.engine.runner, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(RequestError, match="division by zero"):
        "".join(room.retry())
    monkeypatch.undo()
    assert room.current.messages == before
    say(room, "still there?")


def test_max_tokens_is_cut_to_the_room_left(room):
    room.set_param("max_tokens", "5000")
    say(room, "x" * 400)
    assert room.answer.num_tokens + room.answer.prompt_tokens == 512
    assert room.answer.finish_reason == "length"


def test_system_message(room):
    room.set_system("be brief")
    assert room.new().messages == [{"role": "system", "content": "be brief"}]
    room.set_system("")
    assert room.current.messages == []


def test_parameters(room):
    assert room.set_param("top_p", "0.5").top_p == 0.5
    assert room.set_param("ignore_eos", "off").ignore_eos is False
    assert room.set_param("max_tokens", "none").max_tokens is None
    assert room.set_param("stop", "END").stop == ("END",)
    assert room.set_param("stop", "none").stop == ()
    for name, value in (
        ("temprature", "1"),
        ("temperature", "hot"),
        ("temperature", "-1"),
        ("logit_bias", "1"),
        ("top_k", "none"),
        ("ignore_eos", "none"),
    ):
        with pytest.raises(OptionError):
            room.set_param(name, value)
    assert room.params.temperature == 0


# -- the terminal ------------------------------------------------------------------------------------------------------


def chat(model, *lines, flags=()):
    args = [
        "chat",
        str(model),
        "--threads",
        "1",
        "--slots",
        "2",
        "--context",
        "512",
        "--max-tokens",
        "6",
        "--ignore-eos",
    ]
    return CliRunner().invoke(
        app, [*args, *flags], input="".join(f"{line}\n" for line in lines), env={"COLUMNS": "120"}
    )


def test_a_session(model):
    result = chat(
        model, "hello", "/fork b", "/list", "/new", "/switch 1", "/set temperature 0.5", "/set", "/system S", "/close",
        "/nope", "/help", "", "/quit", "never reached",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for text in (
        "2 slots of 512 tokens",
        "6 tokens",
        "0 of 24 prompt tokens reused, cut at the token limit",
        "fork b (slot 1)",
        "*2  b ",
        "all 2 slots are busy: /close frees one",
        "switched to chat-1 (slot 0)",
        "temperature = 0.5",
        "write /set NAME VALUE",
        "system message set",
        "closed; now in b (slot 1)",
        "unknown command /nope: /help lists them",
        "/retry",
    ):
        assert text in result.stdout, text
    assert "never" not in result.stdout
    assert result.stdout.count("prompt tokens reused") == 1


def test_end_of_input_ends_it(model):
    assert chat(model).exit_code == 0


def test_bad_flags_are_errors_before_anything_loads(model):
    result = chat(model, flags=["--top-p", "3"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: --top-p 3.0: must be in (0, 1]\n"


def test_ctrl_c_stops_the_answer_not_the_program(model, monkeypatch):
    step, count = Engine.step, 0

    def pressing(engine):
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", pressing)
    result = chat(model, "hello", "again")
    assert result.exit_code == 0, result.output
    assert "3 tokens" in result.stdout
    assert "reused, stopped" in result.stdout
    assert "6 tokens" in result.stdout


def test_the_interrupt_handler_is_put_back():
    with stop_on_interrupt() as stopped:
        assert not stopped()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
