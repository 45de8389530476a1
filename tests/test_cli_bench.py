"""`pocketllm bench`: its rows, and the bytes of a step counted by hand."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from pocketllm.cache.formats import KV_FORMATS
from pocketllm.cli.bench_run import bytes_per_step, fill_randomly
from pocketllm.cli.main import app
from pocketllm.engine.engine import Engine
from pocketllm.engine.slot_engine import SlotRequest
from tiny_models import make

ROW = {
    "slots", "context", "kv", "filled", "step_ms", "tok_s", "prefill_tok_s", "bytes_per_step", "share_of_bandwidth",
    "gb_s", "memory_planned", "memory_used", "families_ms",
}  # fmt: skip
FACTS = {
    "model", "kernels", "device", "threads", "tensor_parallel", "bandwidth", "steps", "prompt", "prefill_chunk", "date",
    "rows",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make("qwen3_5_moe", tmp_path_factory.mktemp("model"))[0]


def bench(*args):
    return CliRunner().invoke(app, ["bench", *map(str, args), "--threads", "1", "--steps", "2", "--prompt", "70"])


def test_one_row_stands_at_the_top_too(model):
    result = bench(model, "--slots", 2, "--context", 100, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    values = json.loads(result.stdout)
    assert set(values) == FACTS | ROW
    (row,) = values["rows"]
    assert set(row) == ROW
    assert all(values[key] == row[key] for key in ROW)
    assert (row["slots"], row["context"], row["kv"], row["filled"]) == (2, 100, "fp32", "prefill")
    assert row["tok_s"] == pytest.approx(2000 / row["step_ms"], rel=0.01)
    share = row["bytes_per_step"] / (row["step_ms"] / 1e3) / values["bandwidth"]
    assert row["share_of_bandwidth"] == pytest.approx(share, abs=1e-4)
    assert row["gb_s"] == pytest.approx(row["bytes_per_step"] / row["step_ms"] / 1e6, abs=0.1)
    assert row["memory_planned"] > 0
    assert row["memory_used"] > row["bytes_per_step"] / 2  # the process holds at least the weights


def test_a_row_for_each_combination(model):
    result = bench(
        model, "--slots", "1,3", "--context", "40,600", "--kv-cache-dtype", "fp8,bf16", "--fill", "random", "--json"
    )
    values = json.loads(result.stdout)
    assert set(values) == FACTS
    combinations = [(s, c, kv) for s in (1, 3) for kv in ("fp8", "bf16") for c in (40, 600)]
    assert [(r["slots"], r["context"], r["kv"]) for r in values["rows"]] == combinations
    assert {row["filled"] for row in values["rows"]} == {"random"}


def test_table_and_dummy_shape(tmp_path):
    folder, _ = make("qwen3", tmp_path)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    small = ("--slots", "1", "--context", "64", "--fill", "random", "--prefill-chunk", "64")
    result = bench(folder, "--load-format", "dummy", *small)
    assert result.exit_code == 0, result.output
    assert "prompt 70 tokens in chunks of 64" in result.stdout
    assert "64*" in result.stdout
    assert "random values in the cache" in result.stdout


def test_bytes_of_a_step(model):
    """Hybrid with experts: 3 of 4 layers have state, 8 experts of which 2 slots x top 2 can be touched."""
    engine = Engine(model, max_batch_size=2, max_context=512, threads=1, kernels="reference")  # packs nothing
    tensors = {name: tensor for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}
    weights = sum(tensor.numel() * 4 for tensor in tensors.values())
    weights -= 512 * 64 * 4  # the embedding table
    weights += 2 * 64 * 4  # but its rows of two tokens
    weights -= 4 * 4 * 3 * 64 * 32 * 4  # layers, idle experts, matrices
    kv = 2 * 100 * 1 * 2 * 64 * 2 * 4  # slots, tokens, layers, heads, head_dim, K and V
    conv = 3 * (2 * 2 * 16 + 6 * 16) * 3 * 4  # layers, channels, taps
    recurrent = 3 * 6 * 16 * 16 * 4
    assert bytes_per_step(engine, 100) == weights + kv + 2 * 2 * (conv + recurrent)


def test_a_window_limits_the_kv_read(model):
    whole = Engine(model, max_batch_size=1, max_context=512, threads=1)
    window = Engine(model, max_batch_size=1, max_context=512, attention_window=60, attention_sinks=4, threads=1)
    assert bytes_per_step(window, 400) == bytes_per_step(whole, 64)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_random_contexts_can_be_decoded(model, name):
    engine = Engine(model, max_batch_size=2, max_context=640, kv_cache_dtype=name, threads=1)
    slots = [engine.acquire_slot(600) for _ in range(2)]
    fill_randomly(engine, {slot: [1] * 500 for slot in slots})
    assert [engine.slot_length(slot) for slot in slots] == [500, 500]
    for result in engine.batch_decode([SlotRequest(slot, [2]) for slot in slots]):
        assert result.logits is not None
        assert torch.isfinite(result.logits).all()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--slots", "0"], "--slots '0': must be whole numbers from 1"),
        (["--context", "9999"], "--context 9999: with 8 to generate that passes this model's limit of 4096 tokens"),
        (["--fill", "zeros"], "choose one of auto, prefill, random"),
        (["--kv-cache-dtype", "fp7"], "choose one of auto, "),
    ],
)
def test_errors(model, args, message):
    result = bench(model, *args, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_prompt_beyond_the_model_is_refused(model):
    result = CliRunner().invoke(app, ["bench", str(model), "--prompt", "4096"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--prompt 4096: with 1 to generate" in result.stderr
    assert "use --prompt <= 4095" in result.stderr
