"""`pocketllm kv-eval`: its numbers against torch's own, what must lose nothing loses nothing, and the command."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

from pocketllm import EngineOptions
from pocketllm.cache.formats import KV_FORMATS
from pocketllm.cli.kv_eval_plot import draw
from pocketllm.cli.main import app
from pocketllm.errors import OptionError
from pocketllm.kernels.types import LinearWeight
from pocketllm.kv_eval import KVEval, Text, compare
from pocketllm.kv_public import PublicK8V4
from pocketllm.models.registry import read_model
from pocketllm.weights.base import Policy
from pocketllm.weights.shared import SharedSource
from tiny_chat import make_chat
from tiny_models import load_oracle
from toy_formats import Fp32WithoutKeyBias, Int16Fixed

OPTIONS = EngineOptions(quantization="none", kernels="reference", threads=1, page_size=16, prefill_chunk=64)
ROW = {
    "kv", "window", "tokens", "bytes_per_token", "perplexity", "change", "change_error", "kl_mean", "kl_p999", "top1",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random, with biases on q, k and v, and a byte tokenizer."""
    return make_chat("qwen2", tmp_path_factory.mktemp("model"))


def text(length: int = 700, seed: int = 0) -> Text:
    return Text("random", torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def test_comparison_agrees_with_torch() -> None:
    torch.manual_seed(0)
    base, targets = torch.randn(300, 900) * 4, torch.randint(0, 900, (300,))
    other = base + torch.randn(300, 900)
    got = compare(base, other, targets)
    want = F.kl_div(other.double().log_softmax(-1), base.double().log_softmax(-1), reduction="none", log_target=True)
    torch.testing.assert_close(got.kl, want.sum(-1))
    torch.testing.assert_close(got.nll, F.cross_entropy(other.double(), targets, reduction="none"))
    assert got.same_top.tolist() == (base.argmax(-1) == other.argmax(-1)).tolist()
    assert 0 < got.same_top.double().mean() < 1


def test_comparison_sees_differences_below_float32() -> None:
    """Shifted logits are the same distribution; a change of 1e-4 in one logit is a divergence of p (1 - p) 1e-8 / 2."""
    base = torch.randn(4, 5000)
    targets = torch.zeros(4, dtype=torch.int64)
    assert compare(base, base + 0.5, targets).kl.max() < 1e-9  # rounding of the sum in float32
    other = base.clone()
    other[:, 7] += 2.0**-13
    p, step = base.double().softmax(-1)[:, 7], (other - base)[:, 7].double()
    torch.testing.assert_close(compare(base, other, targets).kl, p * (1 - p) * step**2 / 2, rtol=1e-3, atol=1e-15)


def test_losses_of_the_baseline_and_of_storage_that_loses_nothing(model: Path) -> None:
    """Perplexity is the model's own, by transformers; K without its bias is the same K."""
    run = KVEval(model, OPTIONS, [Fp32WithoutKeyBias(), Int16Fixed()], window=200)
    source = text()
    base, same, near = run.losses([source], 200, 600)
    assert (base.kv, base.tokens, base.kl_mean, base.top1) == ("fp32", 3 * 199, 0.0, 1.0)
    windows = torch.tensor(source.ids[:600]).view(3, 200)  # 3 of 3: spread evenly is one after the other
    with torch.inference_mode():
        logits: Tensor = load_oracle(model)(windows).logits[:, :-1, : run.vocab_size]
    loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert base.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert same.kl_mean < 1e-9
    assert same.perplexity == pytest.approx(base.perplexity, rel=1e-6)
    assert 1e-9 < near.kl_mean < 1e-4
    assert near.kl_mean <= near.kl_p999


def test_fewer_bits_lose_more(model: Path) -> None:
    formats = [fmt for fmt in KV_FORMATS.values() if fmt.drops_key_bias]
    run = KVEval(model, OPTIONS, [*formats, PublicK8V4()], window=128)
    losses = {loss.kv: loss for loss in run.losses([text()], 128, 512)[1:]}
    by_bytes = sorted(formats, key=lambda fmt: -fmt.bytes_per_token(1024))
    most = losses[by_bytes[-1].name]
    assert all(losses[fmt.name].kl_mean < most.kl_mean for fmt in by_bytes[:-1])
    assert all(0 < loss.kl_mean < 1 for loss in losses.values())
    layers, heads = 4, 2
    for fmt in formats:
        head_dim = run.checkpoint.config.head_dim
        assert losses[fmt.name].bytes_per_token == layers * heads * fmt.bytes_per_token(head_dim)


def test_chunks_and_windows_are_what_is_asked_for(model: Path) -> None:
    """Chunks that do not divide the window (the last one has one token), two texts: the same numbers as with one chunk."""
    texts = [text(300, 1), text(300, 2)]
    rows = []
    for chunk in (64, 192):
        options = EngineOptions(**{**vars(OPTIONS), "prefill_chunk": chunk})
        rows.append(KVEval(model, options, [KV_FORMATS["fp8"]], window=130).losses(texts, 130, 260)[1])
    assert rows[0].tokens == 2 * 129
    assert rows[0].kl_mean == pytest.approx(rows[1].kl_mean, rel=1e-3)
    assert rows[0].perplexity == pytest.approx(rows[1].perplexity, rel=1e-5)


def test_windows_are_spread_over_a_text() -> None:
    assert Text("", range(1000)).windows(3, 100) == [[*range(s, s + 100)] for s in (0, 300, 600)]
    assert Text("", range(1000)).windows(0, 100) == []


def test_greedy_divergence(model: Path) -> None:
    """Against generation by each engine itself, token by token."""
    formats = [KV_FORMATS["turboquant_k8v4"], PublicK8V4(), Fp32WithoutKeyBias()]
    run = KVEval(model, OPTIONS, formats, window=64, prompts=3, prompt_tokens=40, generated=30)
    found = {row.kv: row for row in run.divergences([text()])}
    prompts = text().windows(3, 40)
    answers = run.generate(run.baseline, prompts)
    assert all(len(answer) == 30 for answer in answers)
    for name, engine in run.engines.items():
        lengths = []
        for want, got in zip(answers, run.generate(engine, prompts), strict=True):
            equal = [a == b for a, b in zip(want, got, strict=True)]
            lengths.append(equal.index(False) if False in equal else 30)
        assert found[name].mean == pytest.approx(sum(lengths) / 3)
        assert found[name].same == lengths.count(30)
    assert (found["fp32"].mean, found["fp32"].same, found["fp32"].prompts) == (30, 3, 3)
    assert found[Fp32WithoutKeyBias().name].mean == 30
    assert min(row.mean for row in found.values()) < 30


def test_formats_of_the_caller_leave_no_trace(model: Path) -> None:
    before = dict(KV_FORMATS)
    run = KVEval(model, OPTIONS, [PublicK8V4()], window=64)
    assert before == KV_FORMATS
    assert run.engines[PublicK8V4.name].plan.kv.kv_format.name == PublicK8V4.name
    impostor = PublicK8V4()
    impostor.name = "fp8"
    with pytest.raises(OptionError, match="taken by another KV format"):
        KVEval(model, OPTIONS, [impostor], window=64)
    assert before == KV_FORMATS


def test_engines_share_their_matrices_but_not_their_biases(model: Path) -> None:
    run = KVEval(model, OPTIONS, [KV_FORMATS["fp8"]], window=64)
    mine, other = (e.runner.model.blocks[1].mixer for e in (run.baseline, run.engines["fp8"]))
    assert mine is not None
    assert other is not None
    (a,), (b,) = mine.projection.parts, other.projection.parts
    assert a.tensors[0].data_ptr() == b.tensors[0].data_ptr()
    assert a.bias is not None
    assert b.bias is not None
    assert not torch.equal(a.bias, b.bias)  # K's part is cut out of one of them


def test_a_shared_source_asks_once() -> None:
    source = read_model("qwen2.5-0.5b", "dummy").open_source(Policy("none", torch.float32), torch.device("meta"))
    shared = SharedSource(source)
    first, again = (shared.scope("model").scope("layers.0").linear(["mlp.up_proj"], [8], 4) for _ in range(2))
    assert first[0].tensors[0] is again[0].tensors[0]
    other = shared.scope("model").scope("layers.1").linear(["mlp.up_proj"], [8], 4)
    assert other[0].tensors[0] is not first[0].tensors[0]


def test_a_shared_source_hands_on_what_a_backend_has_added() -> None:
    def packed(weight: LinearWeight) -> LinearWeight:
        return replace(weight, pairs=weight.tensors)

    policy = Policy("none", torch.float32, packed)
    shared = SharedSource(read_model("qwen2.5-0.5b", "dummy").open_source(policy, torch.device("meta")))
    weights = [w for _ in range(2) for w in shared.linear(["model.layers.0.self_attn.q_proj"], [896], 896, bias=True)]
    assert all(w.pairs is w.tensors for w in weights)
    assert weights[0].bias is not weights[1].bias


def test_the_public_scheme_by_hand() -> None:
    """Levels from -1 to 2 are 0.2 apart; K underflows, saturates and keeps 3 bits of mantissa."""
    k, v = torch.zeros(1, 16), torch.linspace(-1, 2, 16).view(1, 16).flip(-1)
    k[0, :4] = torch.tensor([1e-4, 1000.0, 1.07, -3.0])
    v[0, 3] += 0.09
    fmt = PublicK8V4()
    got_k, got_v = fmt.decode(fmt.encode(k, v), 16)
    assert got_k[0, :4].tolist() == [0.0, 448.0, 1.125, -3.0]
    assert (got_v - torch.linspace(2, -1, 16)).abs().max() < 2e-3  # step and minimum are fp16
    assert fmt.bytes_per_token(256) == 388


@pytest.fixture(scope="module")
def variants() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "kv_variants.py"
    spec = importlib.util.spec_from_file_location("benchmark_kv_variants", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_every_variant_of_v_stores_what_it_says(variants: ModuleType) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 50, 2, 64)
    v[0] = 0
    for fmt in variants.variants().values():
        planes = fmt.encode(k, v)
        assert [(p.shape[-1], p.dtype) for p in planes] == [(s.width, s.dtype) for s in fmt.planes(64)], fmt.name
        _, got = fmt.decode(planes, 64)
        assert float((got - v).norm() / v.norm()) < 0.15, fmt.name
        assert got[0].abs().max() < 1e-5, fmt.name


def test_more_starts_and_smaller_groups_lose_less(variants: ModuleType) -> None:
    known, names = variants.variants(), ("cubic .0075", "cubic .0075, 2 starts, 1 fit", "cubic .0075, search")
    one, two, many = (variants.error_and_time(known[name], 64)["sqnr_db"] for name in names)
    assert one + 0.5 < two < many
    names = ("min-max fp16", "g32 min-max fp16", "g16 min-max fp16", "v16")
    errors = [variants.error_and_time(known[name], 64)["sqnr_db"] for name in names]
    assert errors == sorted(errors)


def test_levels_of_lloyd_and_max(variants: ModuleType) -> None:
    """The table of J. Max, Quantizing for Minimum Distortion, 1960."""
    want = torch.tensor([0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326])
    torch.testing.assert_close(variants.lloyd_max()[8:], want, atol=2e-4, rtol=0)


def test_study_of_variants(
    variants: ModuleType,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = tmp_path / "some.txt"
    source.write_text("Quantise first, then attend to what was stored. " * 20)
    args = "--variants min-max@fp16;v16 --window 64 --tokens 128 --kernels reference --threads 1 --json"
    arguments = [part.replace("@", " ") for part in args.split()]
    monkeypatch.setattr(sys, "argv", ["kv_variants.py", str(model), "--text", str(source), *arguments])
    variants.main()
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["variant"] for row in values["variants"]] == ["min-max fp16", "v16"]
    four, sixteen = values["variants"]
    assert four["bytes_64"] == 64 + 32 + 4 + 4
    assert sixteen["kl_mean"] < four["kl_mean"]
    assert values["baseline"] == "fp32"


def kv_eval(*args: object) -> tuple[int, str, str]:
    flags = ("--kernels", "reference", "--threads", "1", "--prompts", "2", "--prompt", "16", "--generate", "8")
    result = CliRunner().invoke(app, ["kv-eval", *map(str, args), *flags], env={"COLUMNS": "160"})
    return result.exit_code, result.stdout, result.stderr


def test_command_as_json_and_plot(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "some.txt"
    source.write_text("Slots do not disturb each other. " * 30)
    plot = tmp_path / "plot.svg"
    code, out, err = kv_eval(
        model, "--text", source, "--window", "64,128", "--tokens", 256, "--plot", plot, "--json"
    )  # fmt: skip
    assert code == 0, err
    assert out.count("\n") == 1
    values = json.loads(out)
    names = [*(name for name in KV_FORMATS if name != "fp32"), "public_k8v4"]
    assert [(row["kv"], row["window"]) for row in values["rows"]] == [
        (name, size) for size in (64, 128) for name in ("fp32", *names)
    ]
    assert all(set(row) == ROW for row in values["rows"])
    assert [row["kv"] for row in values["greedy"]] == ["fp32", *names]
    assert values["baseline"] == "fp32"
    assert values["quantization"] == "none"
    (described,) = values["texts"]
    assert (described["name"], described["tokens"]) == ("some.txt", len(source.read_text()))
    assert str(tmp_path) not in out
    svg = ET.fromstring(plot.read_text())
    labels = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert all(labels.count(name) == 1 for name in names)
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}circle"))) == 2 + 2 * len(names)


def test_command_as_table(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "some.txt"
    source.write_text("Tokens depend on the prompt. " * 30)
    code, out, err = kv_eval(model, "--text", source, "--window", 64, "--tokens", 128, "--formats", "fp16, public_k8v4")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines() if line.startswith(("fp32", "fp16", "public"))]
    assert [row[0] for row in rows] == ["fp32", "fp16", "public_k8v4"]
    assert rows[0][3] == "+0.000%"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give at least one --text FILE"),
        (["--text", "missing.txt"], "--text missing.txt: No such file"),
        (["--text", "{}", "--formats", "fp7"], "choose from all, fp32"),
        (["--text", "{}", "--window", "1"], "use 2 or more"),
        (["--text", "{}", "--window", "4096"], "--tokens 1024: less than one window of 4096"),
        (["--text", "{}", "--window", "512"], "its share is 2 windows of 512: give a longer text"),
    ],
)
def test_errors(model: Path, tmp_path: Path, args: list[str], message: str) -> None:
    source = tmp_path / "short.txt"
    source.write_text("short")
    code, out, err = kv_eval(model, "--tokens", 1024, *(arg.format(source) for arg in args), "--json")
    assert (code, out) == (2, "")
    assert message in err


def test_random_weights_predict_nothing(tmp_path: Path) -> None:
    source = tmp_path / "some.txt"
    source.write_text("some text " * 100)
    code, _, err = kv_eval(
        "qwen2.5-0.5b", "--load-format", "dummy", "--text", source, "--window", 16, "--tokens", 16, "--formats", "fp16"
    )
    assert code == 2
    assert "give a trained model" in err


def test_labels_of_the_plot_stay_apart() -> None:
    rows = [
        {"kv": f"name_{i}", "window": 64, "bytes_per_token": 1000 + i, "kl_mean": 1e-3 * (1 + i / 100)}
        for i in range(5)
    ]
    svg = ET.fromstring(draw({"model": "m", "baseline": "fp32", "rows": rows}))
    places = [
        float(element.attrib["y"])
        for element in svg.iter("{http://www.w3.org/2000/svg}text")
        if (element.text or "").startswith("name_")
    ]
    assert min(b - a for a, b in zip(sorted(places), sorted(places)[1:], strict=False)) >= 14
