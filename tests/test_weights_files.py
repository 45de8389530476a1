"""Readers against transformers models: every tensor of the oracle is found, under its name, with its values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pocketllm.errors import ModelError
from pocketllm.models.config_hf import config_from_folder
from pocketllm.models.registry import read_model
from pocketllm.weights.formats import W4, W8, Dense, Fp8Block, W4Shifted
from pocketllm.weights.gguf_file import GgufFile
from pocketllm.weights.gguf_reader import GgufReader
from pocketllm.weights.reader import Reader
from pocketllm.weights.safetensors_reader import SafetensorsReader
from tiny_models import KINDS, make, make_fp8, make_gguf, split_experts


def _values(reader: Reader, name: str) -> torch.Tensor:
    if len(reader.shape(name)) != 2:
        return reader.tensor(name).float()
    weight = reader.matrix(name)
    assert weight.shape == reader.shape(name)
    assert weight.format == reader.format_of(name)
    return weight.format.decode(weight.tensors).float()


def _expected(oracle: Any) -> dict[str, torch.Tensor]:
    return split_experts({k: v for k, v in oracle.state_dict().items() if "inv_freq" not in k})


@pytest.mark.parametrize("kind", KINDS)
def test_folder_holds_what_transformers_holds(kind: str, tmp_path: Path) -> None:
    folder, oracle = make(kind, tmp_path)
    reader, expected = SafetensorsReader(folder), _expected(oracle)
    assert set(reader.names()) == set(expected)
    for name, values in expected.items():
        assert torch.equal(_values(reader, name), values), name


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5_moe"])
def test_fp8_folder(kind: str, scale: torch.dtype, tmp_path: Path) -> None:
    folder, oracle = make_fp8(kind, tmp_path, scale_dtype=scale)
    reader, expected = SafetensorsReader(folder), _expected(oracle)
    assert set(reader.names()) == set(expected)
    for name, values in expected.items():
        assert torch.equal(_values(reader, name), values), name
    quantised = [n for n in reader.names() if reader.format_of(n) == Fp8Block()]
    assert any(reader.shape(n)[0] % 128 for n in quantised)  # ragged blocks are among them
    config = config_from_folder(folder)
    assert config.quantization == "fp8_block"
    assert "lm_head" in config.unquantized


def _rewrite(folder: Path, change: Any) -> Path:
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file({k: v.contiguous() for k, v in tensors.items()}, file)
    return folder


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_name_prefixes_and_skipped_parts(prefix: str, tmp_path: Path) -> None:
    def wrap(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        renamed = {(prefix + k.removeprefix("model.") if k.startswith("model.") else k): v for k, v in tensors.items()}
        extra = {n: torch.ones(2) for n in ("model.visual.pos_embed.weight", "visual.x", "model.mtp.fc.weight")}
        return renamed | extra

    folder, oracle = make("qwen3_5", tmp_path)
    assert set(SafetensorsReader(_rewrite(folder, wrap)).names()) == {*_expected(oracle), "mtp.fc.weight"}


def _fuse(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result = {k: v for k, v in tensors.items() if ".experts." not in k}
    for layer in range(4):
        base = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors[f"{base}{e}.{p}_proj.weight"] for e in range(8)]) for p in ("gate", "up", "down")
        )
        result[base + "gate_up_proj"], result[base + "down_proj"] = torch.cat([gate, up], 1), down
    return result


def test_fused_experts_are_views_of_one_tensor(tmp_path: Path) -> None:
    folder, oracle = make("qwen3_moe", tmp_path)
    reader = SafetensorsReader(_rewrite(folder, _fuse))
    for name, values in _expected(oracle).items():
        assert torch.equal(_values(reader, name), values), name
    gate, up = (reader.matrix(f"model.layers.0.mlp.experts.3.{p}_proj.weight").tensors[0] for p in ("gate", "up"))
    assert up.data_ptr() - gate.data_ptr() == gate.nbytes


def test_sharded_folder_is_read_by_its_index(tmp_path: Path) -> None:
    folder, oracle = make("qwen2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[:20], "b.safetensors": names[20:]}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    (folder / "model.safetensors").unlink()
    save_file({"model.norm.weight": torch.zeros(1)}, folder / "stray.safetensors")  # not in the index: not read
    weight_map = {n: file for file, part in shards.items() for n in part} | {"mtp.fc.weight": "mtp.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    reader = SafetensorsReader(folder)
    assert set(reader.names()) == set(_expected(oracle))
    assert reader.shape("model.norm.weight") == (64,)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"missing: b\.safetensors"):
        SafetensorsReader(folder)


def test_damaged_folders(tmp_path: Path) -> None:
    folder, _ = make("qwen3", tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged, cut short"):
        SafetensorsReader(folder)
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged"):
        SafetensorsReader(folder)
    file.unlink()
    with pytest.raises(ModelError, match="no weights"):
        SafetensorsReader(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"lm_head.weight": t["lm_head.weight"].to(torch.int8)}, "lm_head.weight is stored as I8"),
        (lambda t: t | {"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}, "float8 without block scales"),
        (
            lambda t: (
                t
                | {
                    "lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn),
                    "lm_head.weight_scale_inv": torch.ones(1),
                }
            ),
            r"its scale is F32 \[1\]: must be \[4, 1\]",
        ),
    ],
)
def test_wrong_storage_names_file_and_tensor(change: Any, message: str, tmp_path: Path) -> None:
    folder, _ = make("qwen3", tmp_path)
    with pytest.raises(ModelError, match=message) as info:
        SafetensorsReader(_rewrite(folder, change)).matrix("lm_head.weight")
    assert "model.safetensors: lm_head.weight" in str(info.value)


def test_other_block_sizes_are_refused(tmp_path: Path) -> None:
    folder, _ = make_fp8("qwen3", tmp_path)
    text = (folder / "config.json").read_text().replace("[128, 128]", "[64, 64]")
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"\[64, 64\]: only \[128, 128\]"):
        SafetensorsReader(folder)
    with pytest.raises(ModelError, match="not supported"):
        config_from_folder(folder)


# -- GGUF --------------------------------------------------------------------------------------------------------------

_STORED_AS = {"F32": Dense(torch.float32), "F16": Dense(torch.float16), "Q8_0": W8(), "Q4_0": W4Shifted(), "Q4_1": W4()}


@pytest.mark.parametrize("type_name", ["F32", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("kind", ["llama", "qwen2_moe", "qwen3_moe", "qwen3_5"])
def test_gguf_holds_what_the_oracle_holds(kind: str, type_name: str, tmp_path: Path) -> None:
    path, oracle = make_gguf(kind, tmp_path, type=type_name)
    reader, expected = GgufReader(GgufFile(path)), _expected(oracle)
    assert set(reader.names()) == set(expected)
    assert reader.format_of("model.layers.3.self_attn.q_proj.weight") == _STORED_AS[type_name]
    for name, values in expected.items():
        got = _values(reader, name)
        if kind == "qwen3_5" and name.endswith("norm.weight") and "linear_attn" not in name:
            got = got - 1  # the file stores 1 + w, and the config says norm_offset 0
        if name.endswith(("A_log", "norm.weight")):
            assert torch.allclose(got, values, atol=2e-7, rtol=1e-6), name  # through exp and log, or 1 + w
        else:
            assert torch.equal(got, values), name


def test_gguf_qwen3_next_is_offered_as_qwen3_5(tmp_path: Path) -> None:
    """in_proj_qkvz, grouped by key head, comes out as q | k | v and z, in_proj_ba as b and a."""
    path, oracle = make_gguf("qwen3_next", tmp_path, type="Q8_0")
    reader, expected = GgufReader(GgufFile(path)), _expected(oracle)
    base = "model.layers.0.linear_attn."
    qkvz = expected[base + "in_proj_qkvz.weight"].view(2, -1, 64)  # 2 key heads x (32 q, 32 k, 3 x 32 v, 3 x 32 z)
    parts = [p.reshape(-1, 64) for p in qkvz.split([32, 32, 96, 96], dim=1)]
    assert torch.equal(_values(reader, base + "in_proj_qkv.weight"), torch.cat(parts[:3]))
    assert torch.equal(_values(reader, base + "in_proj_z.weight"), parts[3])
    ba = expected[base + "in_proj_ba.weight"].view(2, 2, 3, 64)
    assert torch.equal(_values(reader, base + "in_proj_b.weight"), ba[:, 0].reshape(6, 64))
    assert torch.equal(_values(reader, base + "in_proj_a.weight"), ba[:, 1].reshape(6, 64))


def test_gguf_config_equals_that_of_the_folder(tmp_path: Path) -> None:
    for kind in ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"):
        path, _ = make_gguf(kind, tmp_path, type="F32")
        hybrid = {"linear_key_head_dim": 32, "linear_value_head_dim": 32} if "3_5" in kind else {}
        folder, _ = make(kind, tmp_path, **hybrid)
        got, wanted = vars(read_model(path).config), vars(read_model(folder).config)
        differ = {k for k in wanted if got[k] != wanted[k]}
        assert differ == ({"norm_offset"} if "3_5" in kind else set()), kind


def test_damaged_gguf_files(tmp_path: Path) -> None:
    path, _ = make_gguf("qwen3", tmp_path, type="Q8_0")
    whole = path.read_bytes()
    for content, message in [
        (whole[:-1000], r"inside tensor \S+ .*cut short"),
        (whole[:300], "header is damaged or cut short near byte"),
        (b"GGML" + whole[4:], "not a GGUF file"),
        (whole[:4] + b"\x09" + whole[5:], "GGUF version 9"),
        (b"", "can't be read"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            GgufFile(path)


@pytest.mark.parametrize("step", range(8))
def test_flipped_header_bytes_never_escape_as_other_errors(step: int, tmp_path: Path) -> None:
    path, _ = make_gguf("qwen3", tmp_path, type="Q8_0")
    whole, random = bytearray(path.read_bytes()), np.random.default_rng(step)
    for _ in range(20):
        damaged = bytearray(whole)
        for at in random.integers(4, 3000, size=4):
            damaged[at] = random.integers(256)
        path.write_bytes(damaged)
        try:
            read_model(path)
        except ModelError as error:
            assert str(path) in str(error)  # noqa: PT017 - a damaged name or number may also go unnoticed


def test_unsupported_architecture_lists_the_known(tmp_path: Path) -> None:
    path, _ = make_gguf("qwen3", tmp_path, type="F32")
    path.write_bytes(path.read_bytes().replace(b"qwen3", b"gemma", 1))
    with pytest.raises(ModelError, match="'gemma' is not supported: known are llama, qwen2"):
        read_model(path)
