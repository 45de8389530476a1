"""The scripts in benchmarks/: each runs on a tiny model and prints the keys it documents. Figures are not judged here."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import gguf
import numpy as np
import pytest
import torch

from pocketllm.engine.engine import Engine
from pocketllm.models.registry import read_model
from pocketllm.options import SamplingParams
from pocketllm.weights.dummy import DummySource
from pocketllm.weights.formats import FORMATS
from tiny_models import make, make_gguf

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
MACHINE = {"cpu", "cores", "threads", "load", "date", "python", "versions"}


@pytest.fixture
def script(monkeypatch):
    """script(name): the benchmark as a module, with its own `common`."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look it up
        spec.loader.exec_module(module)
        return module

    monkeypatch.setitem(sys.modules, "common", load("common"))
    return load


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make("qwen3_5", tmp_path_factory.mktemp("model"))[0])


def run(module: ModuleType, model: object, arguments: str) -> None:
    module.main([str(model), *arguments.split()])


REFERENCE = " --kernels reference"  # nothing to compile


def json_line(capsys):
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_tiny_weights_are_mostly_zeros(script, monkeypatch):
    """As the loader they are compared with leaves them in e4m3; afterwards, dummy weights are what they were."""
    monkeypatch.syspath_prepend(FOLDER)
    gpu_step, source = script("gpu_step"), DummySource.__new__(DummySource)
    source._pools, source._seed, source._device = {}, 0, torch.device("cpu")
    shares = []
    for k, weights in ((512, gpu_step.tiny_weights()), (640, nullcontext())):  # pools are kept by width
        with weights:
            codes, scales = source._pool(FORMATS["fp8_block"], k)
        assert (codes.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
        shares.append((codes.float() != 0).float().mean().item())
    assert 0.01 < shares[0] < 0.04
    assert shares[1] > 0.9


def test_decode_has_a_row_for_each_context_kv_type_and_number_of_slots(script, model, capsys):
    arguments = "--slots 1,3 --contexts 20,90 --kv-cache-dtype fp16,fp8 --steps 2 --rounds 2 --json"
    run(script("decode"), model, arguments + REFERENCE)
    report = json_line(capsys)
    assert set(report) == {
        "benchmark", "model", "kernels", "device", "quantization", "steps", "rounds", "machine", "bandwidth", "rows",
    }  # fmt: skip
    assert (report["benchmark"], report["rounds"], set(report["machine"])) == ("decode", 2, MACHINE)
    combinations = [(c, kv, n) for c in (20, 90) for kv in ("fp16", "fp8") for n in (1, 3)]
    assert [(r["context"], r["kv"], r["slots"]) for r in report["rows"]] == combinations
    for row in report["rows"]:
        assert set(row) == {
            "context", "kv", "filled", "slots", "step_ms", "tok_s", "scaling", "x_kv", "bytes_per_step", "gb_s",
            "share_of_bandwidth",
        }  # fmt: skip
        assert row["scaling"] == 1 or row["slots"] == 3
        assert row["x_kv"] == 1 or row["kv"] == "fp8"
    small, large = (next(r for r in report["rows"] if r["context"] == 90 and r["kv"] == kv) for kv in ("fp8", "fp16"))
    assert small["bytes_per_step"] < large["bytes_per_step"]


def test_a_lone_request_on_a_larger_engine(script, model, capsys):
    run(script("decode"), model, "--lone 3 --contexts 20 --steps 2 --rounds 2 --json" + REFERENCE)
    report = json_line(capsys)
    assert report["benchmark"] == "lone"
    assert [row["slots"] for row in report["rows"]] == [1, 3]
    assert set(report["rows"][0]) == {"context", "kv", "filled", "slots", "step_ms", "latency"}
    assert report["rows"][0]["latency"] == 1


def test_tables(script, model, capsys):
    run(script("decode"), model, "--slots 2 --contexts 30 --fill random --steps 2 --rounds 1" + REFERENCE)
    assert "30*" in capsys.readouterr().out
    run(script("prefill"), model, "--lengths 40 --rounds 1" + REFERENCE)
    assert "tok/s" in capsys.readouterr().out


def test_prefill(script, model, capsys):
    run(script("prefill"), model, "--lengths 70,20 --kv-cache-dtype fp16,fp8 --rounds 2 --json" + REFERENCE)
    report = json_line(capsys)
    assert set(report) == {
        "benchmark", "model", "kernels", "device", "quantization", "prefill_chunk", "rounds", "machine", "rows",
    }  # fmt: skip
    assert [(r["kv"], r["length"]) for r in report["rows"]] == [(kv, n) for kv in ("fp16", "fp8") for n in (70, 20)]
    assert set(report["rows"][0]) == {"length", "kv", "ms", "tok_s", "x_kv"}


def test_drafts(script, embedded_model, capsys):
    run(script("speculation"), embedded_model, "--tokens 24 --rounds 1 --slots 1,2 --json")
    line = json_line(capsys)
    assert set(line) == {"benchmark", "model", "drafts", "tokens", "rounds", "machine", "rows"}
    assert line["benchmark"] == "speculation"
    assert set(line["machine"]) == MACHINE
    assert [(row["answer"], row["slots"]) for row in line["rows"]][:2] == [
        ("a function again", 1),
        ("a function again", 2),
    ]
    assert len(line["rows"]) == 6
    assert all(row["same"] and row["ratio"] > 0 and row["accepted"] <= row["drafted"] for row in line["rows"])
    assert line["rows"][0]["accepted"] > 0


def test_turns_go_forwards_and_backwards(script):
    common, order = script("common"), []
    cases = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert common.take_turns(cases, 3) == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert common.ratio([2.0, 9.0, 8.0], [1.0, 1.0, 2.0]) == 4.0


def values(path):
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


def types(path):
    return {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}


def test_requantized_files_hold_the_same_model(script, tmp_path):
    source, _ = make_gguf("qwen2", tmp_path, type="Q8_0")
    script("requantize").main([str(source), str(tmp_path)])
    bf16, q8, q4 = (tmp_path / f"{source.stem}-{name}.gguf" for name in ("bf16", "q8_0", "q4_0"))
    matrices = {name for name, kind in types(source).items() if kind == "Q8_0"}
    assert {types(bf16)[name] for name in matrices} == {"BF16"}
    assert types(q8) == types(source)
    finer = {name for name in matrices if types(q4)[name] == "Q8_0"}
    assert finer == matrices & {"token_embd.weight", "output.weight"}
    assert {types(q4)[name] for name in matrices - finer} == {"Q4_0"}
    for path, bound in ((bf16, 2**-8), (q8, 1e-3), (q4, 0.13)):
        for name, x in values(path).items():
            assert np.abs(x - values(source)[name]).max() <= bound * np.abs(values(source)[name]).max(), name
    fields = {f.name: f.contents() for f in gguf.GGUFReader(source).fields.values() if not f.name.startswith("GGUF.")}
    copied = {f.name: f.contents() for f in gguf.GGUFReader(q4).fields.values() if not f.name.startswith("GGUF.")}
    assert copied == fields | {"general.file_type": gguf.LlamaFileType.MOSTLY_Q4_0}
    engine = Engine(bf16, max_batch_size=1, max_context=64, threads=1, kernels="reference")
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    assert all(output.error is None for _ in range(2) for output in engine.step())


def test_requantize_overwrites_nothing(script, tmp_path, capsys):
    source, _ = make_gguf("qwen2", tmp_path, type="Q8_0")
    (tmp_path / f"{source.stem}-q8_0.gguf").write_bytes(b"mine")
    with pytest.raises(SystemExit):
        script("requantize").main([str(source), str(tmp_path), "--types", "q8_0"])
    assert "exists" in capsys.readouterr().err
    assert (tmp_path / f"{source.stem}-q8_0.gguf").read_bytes() == b"mine"


def test_peers_say_what_is_missing(script, monkeypatch, capsys, tmp_path):
    peers = script("peers")
    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="no peer to compare with"):
        peers.main([str(tmp_path / "model.gguf"), "--transformers"])
    errors = capsys.readouterr().err
    assert "llama.cpp is not installed: pip install" in errors
    assert "transformers is not installed: pip install" in errors


def test_tokens_count_as_the_same_up_to_the_first_that_differs(script):
    same_tokens = script("peers").same_tokens
    assert same_tokens([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == 0.75
    assert same_tokens([[1, 2]], [[3, 2]]) == 0


@pytest.mark.real_model
def test_peers_take_turns_on_one_file(script, embedded_model, capfd):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    arguments = "--slots 1 --prompt 32 --new 1 --prefill 16 --rounds 1 --threads 1 --json"
    run(script("peers"), embedded_model, arguments)
    report = json_line(capfd)
    assert set(report) == {"benchmark", "machine", "prompt", "new", "prefill", "rounds", "missing", "files"}
    assert (set(report["machine"]), report["missing"]) == (MACHINE, {})
    (entry,) = report["files"]
    assert (entry["file"], entry["weights"], set(entry["engines"])) == (
        embedded_model.name, "Q4_1", {"pocketllm", "llama.cpp"},
    )  # fmt: skip
    assert [(row["measure"], row["slots"]) for row in entry["rows"]] == [("prefill", 1), ("decode", 1)]
    for row in entry["rows"]:
        times = row["seconds"]
        assert row["ratio"]["llama.cpp"] == pytest.approx(times["llama.cpp"][0] / times["pocketllm"][0], rel=0.01)
    assert entry["rows"][1]["same_tokens"]["llama.cpp"] >= 0.6  # of 5; a near tie may part the last ones


PEERS = {
    "benchmark": "peers",
    "files": [
        {"weights": kind, "rows": [
            {"measure": "decode", "slots": n, "tok_s": {"pocketllm": 40 * n, "llama.cpp": 30 * n}} for n in (1, 2, 8)
        ]}
        for kind in ("BF16", "Q8_0")
    ],
}  # fmt: skip
DECODE = {"benchmark": "decode", "rows": [{"context": 256, "kv": "a<b", "slots": n, "tok_s": 9.5 * n} for n in (1, 4)]}


@pytest.mark.parametrize(("report", "panels", "lines"), [(PEERS, 2, 4), (DECODE, 1, 1)])
def test_plot(script, tmp_path, report, panels, lines):
    (tmp_path / "report.json").write_text(json.dumps(report))
    script("plot").main([str(tmp_path / "report.json"), str(tmp_path / "images" / "plot.svg"), "--title", "a & b"])
    root = ElementTree.parse(tmp_path / "images" / "plot.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    words = [element.text for element in root.iter(f"{space}text")]
    assert words[0] == "a & b"
    assert words.count("slots") == panels
    assert sum(path.get("fill") == "none" for path in root.iter(f"{space}path")) == lines
    width, height = float(root.get("width")), float(root.get("height"))
    for circle in root.iter(f"{space}circle"):
        assert 0 < float(circle.get("cx")) < width
        assert 0 < float(circle.get("cy")) < height


def test_roofline(script, tmp_path, monkeypatch):
    """Every row and prefill of the kept report has its point, under the roof."""
    report = json.loads((FOLDER / "results" / "h200-27b-fp8.json").read_text())
    monkeypatch.setitem(sys.modules, "plot", script("plot"))
    module = script("roofline")
    module.main([str(FOLDER / "results" / "h200-27b-fp8.json"), str(tmp_path / "images" / "roof.svg")])
    points = sum(not row.get("before") for row in report["rows"]) + sum(
        name.startswith("prefill ") and isinstance(x, dict) and "tok_s" in x for name, x in report.items()
    )
    svg = (tmp_path / "images" / "roof.svg").read_text()
    assert len(ElementTree.fromstring(svg).findall("{http://www.w3.org/2000/svg}circle")) == points
    shares = [int(share) for share in re.findall(r": (\d+)%", svg)]
    assert len(shares) == points
    assert all(20 < share < 100 for share in shares)
    assert 24e9 < module.multiplied(read_model("qwen3.8-27b-fp8", "dummy").config) < 27e9


def test_plot_of_another_report(script, tmp_path):
    (tmp_path / "report.json").write_text('{"benchmark": "linear"}')
    with pytest.raises(SystemExit, match="give one of peers"):
        script("plot").main([str(tmp_path / "report.json"), str(tmp_path / "plot.svg")])
