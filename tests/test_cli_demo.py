"""`pocketllm demo`: real figures, honest verdict, quiet where it should be."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pocketllm.cli import demo as demo_module
from pocketllm.cli import demo_view
from pocketllm.cli.demo import PROMPTS, demo_options, new_lanes, run_prompts
from pocketllm.cli.main import app
from pocketllm.llm import LLM
from pocketllm.options import SamplingParams
from tiny_chat import make_chat


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_chat("qwen3", tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


def demo(*args):
    return CliRunner().invoke(app, ["demo", *map(str, args)], env={"COLUMNS": "100"})


@pytest.mark.real_model
def test_the_embedded_model(embedded_model):
    result = demo("--max-tokens", 6, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    values = json.loads(result.stdout)
    assert values["identical"] is True
    assert values["slots"] == 4
    assert values["tokens"] == 24
    assert values["model"] == "SmolLM2-135M-Instruct"
    assert values["speedup"] == pytest.approx(values["together_tok_s"] / values["serial_tok_s"], rel=0.01)
    assert values["together_tok_s"] == pytest.approx(24 / values["together_s"], rel=0.01)
    assert values["memory_per_slot"] == 1024 * 30 * 3 * 2 * 64 * 4  # tokens, layers, KV heads, K and V, head_dim, fp32
    assert [row["prompt"] for row in values["results"]] == list(PROMPTS)
    assert sorted(row["slot"] for row in values["results"]) == [0, 1, 2, 3]


def test_plain_lines_without_a_terminal(model):
    result = demo(model, "--max-tokens", 5)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert result.stdout.count("| done | ") == 8
    for text in ("identical tokens: yes", "speed-up: ", "memory per slot: ", "4 slots of 1024 tokens"):
        assert text in result.stdout
    assert result.stderr == ""


def test_differing_tokens_are_status_1(model, monkeypatch):
    def forging(llm, prompts, params, lanes, update):
        seconds = run_prompts(llm, prompts, params, lanes, update)
        if len(lanes) == 1:
            lanes[0].tokens[-1] ^= 1
        return seconds

    monkeypatch.setattr(demo_module, "run_prompts", forging)
    result = demo(model, "--max-tokens", 5, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["identical"] is False
    result = demo(model, "--max-tokens", 5)
    assert result.exit_code == 1
    assert "identical tokens: NO" in result.stdout


def test_the_live_table(model, monkeypatch):
    """On a terminal: the table while it runs, with the state of each slot, and the summary at the end."""
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100, height=40, color_system=None)
    monkeypatch.setattr(demo_view.console, "stdout", lambda: terminal)
    monkeypatch.setattr(demo_view, "_REDRAW", 0.0)
    llm = LLM(model, demo_options({"max_context": 512}))
    prompts = [llm.chat_prompt([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    view, lanes, serial = demo_view.LiveView(), new_lanes(), new_lanes()
    view.start(llm)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with view.together(lanes) as update:
        seconds = run_prompts(llm, prompts, params, lanes, update)
    with view.one_by_one(serial, 24) as update:
        for lane, prompt in zip(serial, prompts, strict=True):
            run_prompts(llm, [prompt], params, [lane], update)
    view.summary(llm, demo_module.Outcome(lanes, seconds, serial, 4 * seconds))
    text = screen.getvalue()
    for part in ("waiting", "prefill", "decode", "done", *PROMPTS, "12 of 24 tokens", "4.00x", "yes"):
        assert part in text, part


def test_reference_kernels_get_decoded_weights_and_one_thread_unless_told_otherwise():
    options = demo_options({"kernels": "reference", "device": "cpu"})
    assert (options.max_batch_size, options.quantization, options.threads) == (4, "none", 1)
    told = demo_options({"kernels": "reference", "device": "cpu", "quantization": "auto", "threads": 3})
    assert (told.quantization, told.threads) == ("auto", 3)


@pytest.mark.parametrize(
    ("args", "message"),
    [(["--max-tokens", "0"], "--max-tokens 0: "), (["no-such-model"], "no-such-model"), (["--context", "40"], "40")],
)
def test_errors(args, message, model):
    result = demo(*([] if "no-such-model" in args else [model]), *args, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
