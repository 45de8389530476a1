"""The scripts in benchmarks/ about several ranks and about what fits: they run and print what they say they do."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from engines import prompt
from pocketllm import EngineOptions
from pocketllm.models.registry import read_model
from pocketllm.parallel import Part


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A benchmark as a module."""
    folder = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(folder)  # for what benchmarks share
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_the_gpu_benchmark_runs_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figures are not judged here, but its slots are filled to the last token."""
    model = tiny_models.make("qwen3_5", tmp_path)[0]
    arguments = "--device cpu --kernels reference --limit 1GiB --fits 2x300xturboquant_k8v4,1x300xfp16 --steps 3"
    arguments += (
        f" --formats fp16 --cases 1x20,2x50 --model {model} --small {model} --parts same,fit,most,steps,shard,death"
    )
    arguments += " --slots 1"
    script("gpu_tp", monkeypatch).main(arguments.split())
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert not [line for line in lines if "failed" in line or "refused" in line]
    assert [line["tokens_equal"] for line in lines if "tokens_equal" in line] == [True]
    assert [line["held"] for line in lines if "held" in line] == [[292, 292], [292], [4088]]
    assert [list(line["step_ms"]) for line in lines if line["part"] == "shard" and "kv" in line] == [["1x20", "2x50"]]
    assert [list(line["speedup"]) for line in lines if "speedup" in line] == [["1x20", "2x50"]]
    (death,) = (line for line in lines if "after_seconds" in line)
    assert "killed by SIGKILL" in death["said"]
    assert death["after_seconds"] < 10


def test_a_rank_without_the_others_has_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    lone = script("gpu_tp", monkeypatch).LoneShard(ranks=2)
    assert (lone.size, lone.shard(10, "heads"), lone.replicate_or_shard(1, "KV heads").size) == (
        1,
        Part(10, ((0, 5),)),
        1,
    )
    logits = torch.arange(6.0).view(2, 3)
    assert torch.equal(lone.gather(logits), torch.cat([logits, logits], 1))


def test_the_plan_table_names_what_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = "--cards 2x8,1x2 --models qwen3-4b,qwen2.5-0.5b"
    script("plan_table", monkeypatch).main(arguments.split())
    text = capsys.readouterr().out
    two, one = text.split("## 1 x 2 GB")
    assert "--tensor-parallel 2" in two
    assert "| qwen3-4b | as stored | `bf16` |" in two
    assert "Too large: qwen3-4b" in one


def test_what_quantised_embeddings_cost_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_models.make("qwen3", tmp_path, hidden_size=128, dtype=torch.bfloat16)[0]
    options = EngineOptions(max_batch_size=1, max_context=64, kernels="reference", threads=1)
    values = script("embeddings", monkeypatch).measure(read_model(folder), prompt(200), 192, options)
    plain, w8, fp8 = values["rows"]
    assert values["tokens"] == 3 * 63
    assert plain["kl_mean"] == 0
    assert 0 < w8["kl_mean"] < fp8["kl_mean"] < 0.1
    assert w8["weights"] < plain["weights"]
