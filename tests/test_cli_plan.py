"""`pocketllm plan`: what it prints adds up, its advice is right, and nothing but a config is needed."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from pocketllm.cache.formats import KV_FORMATS
from pocketllm.cli.main import app
from tiny_models import make

PARTS = ("weights", "kv", "state", "tables", "sampler", "drafts", "logits", "graphs", "workspace", "runtime")


def plan(*args):
    return CliRunner().invoke(app, ["plan", *map(str, args)], env={"COLUMNS": "120"})


def test_the_27b_on_two_gpus():
    args = "qwen3.8-27b-fp8 --slots 8 --context 32768 --kv-cache-dtype turboquant_k8v4 --tensor-parallel 2"
    result = plan(*args.split(), "--gpu-memory", "22GiB", "--json")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    values = json.loads(result.stdout)
    assert values["fits"] is True
    assert values["advice"] is None
    assert values["total"] == sum(values[part] for part in PARTS)
    assert values["budget"] == 22 * 2**30 == values["total"] + values["left"]
    assert (values["slots"], values["max_context"], values["tensor_parallel"]) == (8, 32768, 2)
    # 16 attention layers, 2 of 4 KV heads a rank, 256 + 128 bytes and two float32 scales a token and head
    rows = values["kv_tokens"] + 256
    assert values["kv"] == 16 * rows * 2 * (256 + 128 + 8) + 9 * 128 * 4
    assert set(values["context_table"]) == set(KV_FORMATS)
    assert set(values["context_table"]["fp8"]) == {"1", "2", "4", "8", "16", "32"}


def test_drafts_of_the_models_own_layer_are_in_it():
    args = ["qwen3.8-27b-fp8", "--slots", "2", "--context", "4096", "--gpu-memory", "60GiB"]
    drafting = [*args, "--drafter", "mtp", "--max-draft-tokens", "3"]
    plain, with_layer = (json.loads(plan(*each, "--json").stdout) for each in (args, drafting))
    assert (plain["drafts"], with_layer["drafts"]) == (0, 3 * (4 * 5120 * 2 + 8))
    assert with_layer["kv"] > plain["kv"]
    assert with_layer["weights"] > plain["weights"] + 300 * 2**20
    assert re.search(r"drafts +\d.* own drafts", plan(*drafting).stdout)
    refused = plan("qwen3-8b", "--drafter", "mtp", "--max-draft-tokens", "3", "--gpu-memory", "60GiB")
    assert refused.exit_code != 0


def test_text_has_bytes_and_contexts():
    result = plan("qwen3-0.6b", "--gpu-memory", "8GiB", "--context", "4096")
    assert result.exit_code == 0
    assert re.search(r"weights +1\.\d\d GiB", result.stdout)
    assert re.search(r"left +\d", result.stdout)
    for name in KV_FORMATS:
        assert re.search(rf"^{name} +(\d+ *){{6}}$", result.stdout, re.MULTILINE)


def test_what_does_not_fit_is_status_1_and_its_advice_fits():
    args = ["qwen3-0.6b", "--gpu-memory", "3500MiB", "--kv-cache-dtype", "bf16"]
    result = plan(*args, "--slots", 4, "--context", 32768)
    assert result.exit_code == 1
    assert "does not fit" in result.stdout
    context = re.search(r"--context (\d+) with the same slots", " ".join(result.stderr.split()))
    assert context
    assert plan(*args, "--slots", 4, "--context", context[1]).exit_code == 0
    as_json = plan(*args, "--slots", 4, "--context", 32768, "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["fits"] is False
    assert "--context" in json.loads(as_json.stdout)["advice"]


def test_a_folder_and_the_cpu(tmp_path):
    folder, _ = make("qwen3_5", tmp_path)
    values = json.loads(plan(folder, "--memory", "1GiB", "--json").stdout)
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert (values["device"], values["runtime"], values["budget"]) == ("cpu", 0, 2**30)
    assert values["weights"] == pytest.approx(stored, rel=0.05)
    assert values["state"] > 0
    unlimited = json.loads(plan(folder, "--json").stdout)
    assert unlimited["budget"] > 0


def test_without_a_model_it_plans_the_embedded_one():
    values = json.loads(plan("--context", 512, "--json").stdout)
    assert values["model"] == "SmolLM2-135M-Instruct"


def test_lists_shapes():
    names = plan("--list").stdout.split()
    assert "qwen3.8-27b-fp8" in names
    assert json.loads(plan("--list", "--json").stdout) == {"shapes": names}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["no-such-model"], "Shapes: qwen2.5-0.5b"),
        (["qwen3-0.6b", "--gpu-memory", "2GiB", "--memory", "2GiB"], "give one of them"),
        (["qwen3-0.6b", "--context", "999999"], "--context 999999: this model's limit is"),
        (["qwen3-0.6b", "--kv-cache-dtype", "fp7"], "choose one of auto, "),
        (["qwen3-0.6b", "--tensor-parallel", "3"], "--tensor-parallel 3: "),
        (["no/such/file.gguf"], "no/such/file.gguf"),
    ],
)
def test_errors(args, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", _no_network)
    result = plan(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert result.stdout == ""


def test_a_hub_id_needs_its_config_only(tmp_path, monkeypatch):
    folder, _ = make("qwen3", tmp_path)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    asked = []

    def download(repo: str, allow_patterns: list[str]) -> str:
        asked.append((repo, *allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    values = json.loads(plan("owner/name", "--memory", "1GiB", "--json").stdout)
    assert asked == [("owner/name", "config.json")]
    assert (values["model"], values["fits"]) == ("owner/name", True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", _no_network)
    result = plan("owner/name")
    assert result.exit_code == 2
    for text in ("owner/name/config.json: can't be downloaded", "(no network)", "give the folder", "plan --list"):
        assert text in result.stderr


def _no_network(*args: object, **values: object) -> str:
    raise OSError("no network")
