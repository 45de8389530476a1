"""`pocketllm tune`, with times made up: what is measured needs a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton

pytest.importorskip("triton")
from pocketllm.cache.formats import kv_format
from pocketllm.cli.main import app
from pocketllm.kernels.triton import linear_tuning, tune, tuning
from pocketllm.kernels.triton.tuning import AttendConfig, PrefillConfig

CPU = torch.device("cpu")
BEST = AttendConfig(1024, 64, 2, 4, 3, halves=True)
BEST_PREFILL = PrefillConfig(64, 32, 4, 3)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tuning, "user_folder", lambda: tmp_path / "tuned")
    tuning.attention_config.cache_clear()
    yield tmp_path / "tuned"
    tuning.attention_config.cache_clear()


def made_up_time(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """The best sizes take 1, others longer. Calls are partials of attend_with(AttentionConfig, ..) and prefill_with."""
    config: Any = calls[0].args[0]  # type: ignore[attr-defined]
    if isinstance(config, PrefillConfig):
        return 1.0 if config == BEST_PREFILL else 2.0
    return 1.0 if config.attend == BEST else 1.5 + config.attend.programs


def test_the_quickest_sizes_are_written_and_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "CASES", tuple(tune.Case(slots, 512) for slots in (2, 1, 3)))
    monkeypatch.setattr(tune, "VERIFY", tune.Case(2, 512, 4))
    monkeypatch.setattr(tune, "COLD", 1)
    monkeypatch.setattr(tune, "time_graph", made_up_time)
    before = tuning.attention_config(CPU, 64, 136)
    found = tune.tune_format(kv_format("fp8"), 64, 4, 1, CPU, lambda sizes, times: None)
    assert (found.attend, found.prefill, found.token_bytes) == (BEST, BEST_PREFILL, 136)
    path = tune.write_table(home, "default", tuning.device_table("default")["attention"], [found])
    tuning.attention_config.cache_clear()
    assert tuning.attention_config(CPU, 64, 136) == found != before
    # What else the package says stays its own, and a second run replaces the first one's entry.
    again = tune.write_table(home, "default", tuning.device_table("default")["attention"], [found])
    table = json.loads(again.read_text())
    assert again == path
    assert set(table) == {"device", "attention"}
    assert linear_tuning.parse(tuning.device_table("default")["linear"]).defaults
    assert sum(entry["head_dim"] == 64 for entry in table["attention"]) == 1


def test_where_nothing_but_the_split_matters_splits_are_compared(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's kernel for quantised formats takes no other size: the rest stays what the table said."""
    monkeypatch.setattr(tune, "CASES", (tune.Case(1, 512), tune.Case(2, 512)))
    monkeypatch.setattr(tune, "VERIFY", tune.Case(1, 512, 4))
    monkeypatch.setattr(tune, "COLD", 1)
    monkeypatch.setattr(tune, "time_graph", lambda *_: 1.0)
    monkeypatch.setattr(tune.attend_hopper, "fits", lambda *_: True)
    heard: list[Any] = []
    tune.tune_format(kv_format("fp8"), 64, 4, 1, CPU, lambda sizes, times: heard.append(sizes))
    now = tuning.attention_config(CPU, 64, 136).attend
    assert [s for s in heard if isinstance(s, AttendConfig)] == [replace(now, split=s) for s in tune.SPLITS]


def test_other_devices_keep_their_tables(home: Path) -> None:
    tune.write_table(home, "Some GPU 2", [], [])
    assert (home / "some-gpu-2.json").exists()
    assert tuning.device_table("Some GPU 2")["attention"] == []
    assert tuning.device_table("Another")["attention"]


def test_every_format_has_candidates_for_any_device() -> None:
    for packed in (True, False):
        candidates = list(tune.attend_candidates(packed))
        assert len(set(candidates)) == len(candidates)
        assert any(c.halves for c in candidates) == packed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 2
    assert "on a GPU, and there is none here" in result.output


def test_an_unknown_format_is_refused_with_the_right_ones() -> None:
    result = CliRunner().invoke(app, ["tune", "--kv-cache-dtype", "int3"])
    assert result.exit_code == 2
    assert "turboquant_k8v4" in result.output
