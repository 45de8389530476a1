"""`pocketllm generate`: the texts `LLM` gives, in every way to ask for them; errors by prompt."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pocketllm.cli.main import app
from pocketllm.llm import LLM
from pocketllm.options import SamplingParams
from tiny_chat import make_chat


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_chat("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, threads=1)


def generate(model, *args, stdin=""):
    return CliRunner().invoke(app, ["generate", "-m", str(model), "--threads", "1", *args], input=stdin)


def test_one_prompt_streams_its_text(model, llm):
    (expected,) = llm.generate("hello", SamplingParams(max_tokens=9))
    for result in (
        generate(model, "hello", "--max-tokens", "9"),
        generate(model, "--max-tokens", "9", stdin="hello\n"),
    ):
        assert result.exit_code == 0
        assert result.stdout == expected.text + "\n"


def test_many_prompts_from_a_file_have_headers(model, llm, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    result = generate(model, "--file", str(tmp_path / "prompts.txt"), "--max-tokens", "4")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("──")] == ["── 0 · one", "── 1 · two"]


def test_json_is_one_line_with_the_same_tokens(model, llm):
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=3, logprobs=2)
    expected = llm.generate(["a", "bc"], params)
    flags = "--max-tokens 5 --temperature 1 --seed 3 --logprobs 2 --json"
    result = generate(model, "a", "bc", *flags.split())
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    values = json.loads(result.stdout)
    assert set(values) == {"model", "seconds", "tokens", "tok_s", "results"}
    assert values["tokens"] == sum(len(e.token_ids) for e in expected)
    for row, want in zip(values["results"], expected, strict=True):
        assert (row["token_ids"], row["text"]) == (want.token_ids, want.text)
        assert (row["finish_reason"], row["error"]) == (want.finish_reason, None)
        assert row["prompt_tokens"] == len(want.prompt_ids)
        assert [step["chosen"] for step in row["logprobs"]] == pytest.approx([s.chosen for s in want.logprobs])


def test_chat_uses_the_template_and_the_system_message(model, llm):
    conversation = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    (expected,) = llm.chat([conversation], SamplingParams(max_tokens=6))
    values = json.loads(generate(model, "hi", "--chat", "--system", "S", "--max-tokens", "6", "--json").stdout)
    assert values["results"][0]["token_ids"] == expected.token_ids
    assert values["results"][0]["prompt_tokens"] == len(expected.prompt_ids)


def test_a_prompt_too_long_fails_alone(model):
    result = generate(model, "x" * 510, "ok", "--context", "512", "--max-tokens", "3", "--json")
    assert result.exit_code == 2
    assert "prompt 0: prompt of 510 + --max-tokens of 3 tokens pass the 512" in " ".join(result.stderr.split())
    bad, good = json.loads(result.stdout)["results"]
    assert bad["error"]
    assert len(good["token_ids"]) == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "stdin is empty"),
        (["hi", "--system", "S"], "add --chat"),
        (["hi", "--logprobs", "1"], "add --json"),
        (["hi", "--file", "x"], "not both"),
        (["--file", "no-such-file"], "no-such-file: can't be read"),
        (["hi", "--temperature", "-1"], "--temperature -1.0: must be at least 0"),
        (["hi", "--kv-cache-dtype", "fp7"], "choose one of auto, "),
    ],
)
def test_errors(model, args, message):
    result = generate(model, *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


def test_a_missing_model_is_an_error():
    result = generate("no-such-folder", "hi")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: no-such-folder: no such file or folder, and not a hub id of the form owner/name\n"


def test_interrupt_ends_quietly(model, monkeypatch):
    def interrupted(*args: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    result = generate(model, "hi")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")
