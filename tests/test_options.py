"""Options say what is wrong with a value, and what would be right."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from engines import engine, prompt
from pocketllm import EngineOptions, SamplingParams
from pocketllm.errors import OptionError
from pocketllm.options import parse_bytes


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_token": 3}, "unknown SamplingParams option 'max_token': did you mean 'max_tokens'"),
        ({"beams": 2}, "unknown SamplingParams option 'beams': known: max_tokens, min_tokens"),
        ({"max_tokens": 0}, "max_tokens = 0: must be at least 1, or None"),
        ({"max_tokens": 2.5}, "max_tokens = 2.5"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens = 5 is more than max_tokens = 4"),
        ({"min_tokens": -1}, "at least 0"),
        ({"temperature": math.nan}, "temperature = nan: must be a finite number"),
        ({"temperature": "hot"}, "temperature = 'hot': must be a finite number"),
        ({"temperature": -0.1}, "at least 0"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_k": True}, "top_k = True"),
        ({"top_p": 0.0}, r"top_p = 0.0: must be in \(0, 1\]"),
        ({"min_p": 1.5}, r"min_p = 1.5: must be in \[0, 1\]"),
        ({"repetition_penalty": 0.0}, "must be above 0"),
        ({"presence_penalty": 2.5}, r"must be in \[-2, 2\]"),
        ({"frequency_penalty": -3}, r"must be in \[-2, 2\]"),
        ({"logit_bias": [3]}, r"logit_bias = \[3\]: must be a dict"),
        ({"logit_bias": None}, "logit_bias = None: must be a dict"),
        ({"logit_bias": {-1: 1.0}}, "-1 is no token id"),
        ({"logit_bias": {3: math.inf}}, r"logit_bias\[3\] = inf: must be a number"),
        ({"logit_bias": {3: math.nan}}, r"logit_bias\[3\] = nan: must be a number"),
        ({"logit_bias": {3: 1e300}}, r"up to 1e38"),
        ({"logit_bias": {3: "x"}}, r"logit_bias\[3\] = 'x': must be a number"),
        ({"seed": -1}, r"seed = -1: must be a whole number in \[0, 2\*\*63\)"),
        ({"seed": 2**63}, "seed = "),
        ({"stop": None}, "stop = None: must be a tuple, empty for none"),
        ({"stop": 5}, "stop = 5: must be a tuple"),
        ({"stop": ("a", "")}, "must be non-empty strings"),
        ({"stop_token_ids": None}, "stop_token_ids = None: must be a tuple"),
        ({"stop_token_ids": (-1,)}, "must be token ids"),
        ({"ignore_eos": None}, "ignore_eos = None: must be True or False"),
        ({"logprobs": 65}, r"logprobs = 65: must be in \[0, 64\], or None"),
    ],
)
def test_wrong_sampling_parameters_are_refused_in_words(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SamplingParams.of(**values)


def test_one_stop_string_is_a_stop_string_and_lists_are_kept_as_tuples() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 4])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("end",), (3, 4))


@pytest.mark.parametrize(
    ("text", "size"),
    [("22GiB", 22 << 30), ("22 GB", 22 * 10**9), ("1.5kib", 1536), ("512MiB", 512 << 20), ("77", 77), ("8b", 8)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 XiB", "1..5GB", "1GiB more"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(OptionError, match="write it as 22GiB"):
        parse_bytes(text)


def test_threads_come_from_the_option_the_environment_or_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCKETLLM_THREADS", "3")
    assert EngineOptions().num_threads() == 3
    assert EngineOptions(threads=2).num_threads() == 2
    monkeypatch.setenv("POCKETLLM_THREADS", "many")
    with pytest.raises(OptionError, match="POCKETLLM_THREADS = 'many': must be a whole number >= 1"):
        EngineOptions().num_threads()
    monkeypatch.delenv("POCKETLLM_THREADS")
    assert EngineOptions().num_threads() >= 1


def test_chunks_of_a_prompt_are_the_users_or_the_devices() -> None:
    assert [EngineOptions().chunk_tokens(device) for device in ("cpu", "cuda")] == [512, 2048]
    assert EngineOptions(prefill_chunk=64).chunk_tokens("cuda") == 64


@pytest.mark.parametrize(("chunk", "steps"), [(128, 2), (None, 1)])
def test_a_prompt_takes_a_step_for_each_chunk(chunk: int | None, steps: int, tmp_path: Path) -> None:
    running = engine("qwen3", tmp_path, prefill_chunk=chunk)
    running.add_request(prompt(200), SamplingParams(max_tokens=1))
    taken = 1
    while not running.step():
        taken += 1
    assert taken == steps
