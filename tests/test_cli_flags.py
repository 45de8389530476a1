"""The command line's flags: each option has one, values arrive, errors speak of flags, start-up is light."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from importlib.metadata import version

import pytest
import typer
from typer.testing import CliRunner

from pocketllm.cache.formats import KV_FORMATS
from pocketllm.cli.console import command
from pocketllm.cli.flags import ENGINE_FLAGS, SAMPLING_FLAGS, in_flags, integers, with_flags
from pocketllm.cli.main import app
from pocketllm.errors import OptionError
from pocketllm.options import EngineOptions, SamplingParams

ENGINE_ARGS = {
    "--slots": "3", "--context": "640", "--kv-tokens": "2048", "--kv-cache-dtype": "fp8", "--kv-layout": "paged",
    "--page-size": "64", "--dtype": "bfloat16", "--quantization": "w8",
    "--quantize-embeddings": "fp8", "--kernels": "reference", "--device": "cpu",
    "--tensor-parallel": "2", "--prefill-chunk": "128", "--drafter": "ngram", "--max-draft-tokens": "3", "--snapshots": "5",
    "--attention-window": "100", "--attention-sinks": "4", "--memory": "6GiB", "--load-format": "dummy",
    "--threads": "7",
}  # fmt: skip
ENGINE_VALUES = EngineOptions(
    max_batch_size=3, max_context=640, kv_tokens=2048, kv_cache_dtype="fp8", kv_layout="paged", page_size=64,
    dtype="bfloat16", quantization="w8", quantize_embeddings="fp8", kernels="reference", device="cpu", tensor_parallel=2,
    prefill_chunk=128, drafter="ngram",
    max_draft_tokens=3, num_snapshots=5, attention_window=100, attention_sinks=4, memory_limit=6 * 2**30,
    load_format="dummy", threads=7,
)  # fmt: skip


def _run(flags, build, *args, **defaults):
    """What a command with these flags gets for these arguments; or its result if that is an error."""
    got = []
    toy = typer.Typer()

    @toy.command()
    @command
    @with_flags("options", flags, build, **defaults)
    def show(*, options: object) -> None:
        got.append(options)

    result = CliRunner().invoke(toy, list(args))
    return got[0] if got else result


def test_every_option_has_a_flag():
    def names(cls):
        return {f.name for f in dataclasses.fields(cls)}

    # The commands have no queue to fill; dummy weights and unseeded requests are the same at every run.
    assert {flag.option for flag in ENGINE_FLAGS} == names(EngineOptions) - {"max_queue", "seed"}
    assert {flag.option for flag in SAMPLING_FLAGS} == names(SamplingParams)


def test_engine_flags_arrive():
    assert {flag.name for flag in ENGINE_FLAGS} == set(ENGINE_ARGS)
    args = [part for pair in ENGINE_ARGS.items() for part in pair]
    assert _run(ENGINE_FLAGS, EngineOptions.of, *args) == ENGINE_VALUES
    assert _run(ENGINE_FLAGS, EngineOptions.of) == EngineOptions()
    assert _run(ENGINE_FLAGS, EngineOptions.of, max_context=99).max_context == 99
    assert _run(ENGINE_FLAGS, EngineOptions.of, "--context", "7", max_context=99).max_context == 7


def test_sampling_flags_arrive():
    line = (
        "--max-tokens none --min-tokens 2 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 "
        "--presence-penalty -1 --frequency-penalty 0.25 --logit-bias 4:-1.5 --logit-bias 5:-inf --seed 6 --stop a "
        "--stop b --stop-token-id 7 --ignore-eos --logprobs 0"
    )
    assert _run(SAMPLING_FLAGS, SamplingParams.of, *line.split()) == SamplingParams(
        max_tokens=None, min_tokens=2, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=-1.0, frequency_penalty=0.25, logit_bias={4: -1.5, 5: float("-inf")}, seed=6,
        stop=("a", "b"), stop_token_ids=(7,), ignore_eos=True, logprobs=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--page-size", "17"], "error: --page-size 17: must be a power of two, at least 16\n"),
        (["--kv-layout", "x"], "error: --kv-layout 'x': choose one of paged, slots\n"),
        (["--memory", "lots"], "error: memory size 'lots': write it as 22GiB, 22GB, 512MiB or a number of bytes\n"),
    ],
)
def test_a_bad_value_is_one_line_and_status_2(args, message):
    result = _run(ENGINE_FLAGS, EngineOptions.of, *args)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", message)


@pytest.mark.parametrize("args", [["--max-tokens", "many"], ["--logit-bias", "4"], ["--logit-bias", "x:1"]])
def test_bad_sampling_values_are_errors(args):
    result = _run(SAMPLING_FLAGS, SamplingParams.of, *args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {args[0]} {args[1]!r}: ")


def test_errors_speak_of_flags_but_leave_plain_words():
    text = "max_context=512 with the same slots; release one, or build with more max_batch_size; the device had less"
    assert (
        in_flags(text)
        == "--context 512 with the same slots; release one, or build with more --slots; the device had less"
    )


def test_lists_of_integers():
    assert integers("--slots", "1, 4,1") == (1, 4)
    for bad in ("", "1,,2", "0", "-1", "a"):
        with pytest.raises(OptionError, match=r"^--slots '"):
            integers("--slots", bad)


@pytest.mark.parametrize("name", ["demo", "generate", "chat", "plan", "bench"])
def test_help_lists_the_kv_formats(name):
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert all(kv_format in result.stdout for kv_format in KV_FORMATS)


def test_python_m_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "pocketllm", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, version("pocketllm")), done.stderr


def test_start_up_loads_no_heavy_module():
    code = (
        "import sys; sys.argv = ['pocketllm', '--help']; from pocketllm.cli.main import main\n"
        "try: main()\nexcept SystemExit as e: assert not e.code\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'jinja2', 'gguf', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
