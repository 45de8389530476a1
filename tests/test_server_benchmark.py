"""benchmarks/server.py runs on a tiny model and prints the keys it documents. Figures are not judged here."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tiny_chat import make_chat

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


def test_it_compares_served_with_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("benchmark_server", FOLDER / "server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules.pop("common", None)  # a name that other scripts may have, too
    arguments = "--streams 1,2 --many 3 --prompt 8 --tokens 6 --rounds 1 --kernels reference"
    module.main([str(make_chat("qwen3", tmp_path)), *arguments.split(), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        "benchmark", "model", "kernels", "quantization", "prompt", "tokens", "rounds", "machine", "rows", "first_token",
        "gaps",
    }  # fmt: skip
    assert [row["streams"] for row in report["rows"]] == [1, 2]
    for row in report["rows"]:
        assert set(row) == {"streams", "server_tok_s", "offline_tok_s", "ratio"}
        assert row["ratio"] == pytest.approx(row["server_tok_s"] / row["offline_tok_s"], rel=0.05)
    assert set(report["first_token"]) == {"server_ms", "offline_ms", "overhead_ms"}
    assert set(report["gaps"]) == {"streams", "server_p50_ms", "server_p99_ms", "offline_p50_ms", "offline_p99_ms"}
