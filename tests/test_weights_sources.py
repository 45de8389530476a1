"""Sources: the quantization policy, stacking, faults found together, and plans that equal what is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pocketllm.errors import ModelError
from pocketllm.kernels import reference
from pocketllm.models.config import ModelConfig
from pocketllm.models.qwen import QwenModel
from pocketllm.models.registry import Checkpoint, ConfigStorage, config_from_shape, read_model
from pocketllm.options import Quantization
from pocketllm.parallel import TensorParallel
from pocketllm.weights.base import BaseSource, Policy
from pocketllm.weights.dummy import DummySource, PlannedSource
from pocketllm.weights.formats import Dense, Fp8Block
from tiny_models import make, make_fp8, make_gguf

CPU = torch.device("cpu")


def _build(config: ModelConfig, source: BaseSource) -> int:
    """Builds the network from the source; the bytes it took."""
    QwenModel(config, TensorParallel(), reference, source, max_context=64, dtype=torch.float32, device=CPU)
    return source.nbytes


def _planned(checkpoint: Checkpoint, quantization: Quantization, dtype: torch.dtype = torch.float32) -> int:
    tied = checkpoint.config.tie_word_embeddings
    return _build(checkpoint.config, PlannedSource(checkpoint.storage, Policy(quantization, dtype), tied_head=tied))


@pytest.mark.parametrize("quantization", ["auto", "none", "bf16", "w8", "w4"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_next", "fp8", "Q4_1", "Q5_0"])
def test_plan_equals_loading_equals_dummy(kind: str, quantization: Quantization, tmp_path: Path) -> None:
    if kind == "fp8":
        path, _ = make_fp8("qwen3_5", tmp_path)
    elif kind.startswith("Q"):
        path, _ = make_gguf("llama", tmp_path, type=kind)
    else:
        path, _ = make(kind, tmp_path, dtype=torch.bfloat16, tie_word_embeddings=kind == "qwen2")
    checkpoint, dummy = read_model(path), read_model(path, "dummy")
    loaded = _build(checkpoint.config, checkpoint.open_source(Policy(quantization, torch.float32), CPU))
    assert loaded == _planned(checkpoint, quantization)
    assert loaded == _planned(dummy, quantization)
    assert loaded == _build(dummy.config, dummy.open_source(Policy(quantization, torch.float32), CPU))


def test_policy_by_role(tmp_path: Path) -> None:
    folder, _ = make("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    checkpoint = read_model(folder)

    def names(quantization: Quantization) -> list[str]:
        source = checkpoint.open_source(Policy(quantization, torch.float32), CPU)
        layer = source.scope("model.layers.0")
        asked = [
            layer.linear(["self_attn.o_proj"], [64], 128),
            source.linear(["model.embed_tokens"], [512], 64, role="embedding"),
            source.linear(["lm_head"], [512], 64, role="head"),
            layer.scope("mlp").linear(["gate"], [8], 64, role="small"),
        ]
        return [weights[0].format.name for weights in asked]

    assert names("auto") == ["bf16"] * 4
    assert names("none") == ["fp32"] * 4
    assert names("bf16") == ["bf16"] * 4
    assert names("w8") == ["w8", "w8", "w8", "bf16"]
    assert names("w4") == ["w4", "w8", "w8", "bf16"]


def test_stack_rows_bias_and_mixed_formats(tmp_path: Path) -> None:
    folder, oracle = make("qwen2", tmp_path)
    attention = oracle.model.layers[1].self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    whole = torch.cat([p.weight for p in parts]).detach()
    names, sizes = ["q_proj", "k_proj", "v_proj"], [64, 32, 32]
    rows = torch.randperm(128, generator=torch.Generator().manual_seed(0))

    def ask(folder: Path) -> list:
        scope = read_model(folder).open_source(Policy("auto", torch.float32), CPU).scope("model.layers.1.self_attn")
        return scope.linear(names, sizes, 64, bias=True, rows=rows)

    (weight,) = ask(folder)
    assert torch.equal(weight.tensors[0], whole[rows])
    assert torch.equal(weight.bias, torch.cat([p.bias for p in parts]).detach()[rows])
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.weight"] = tensors["model.layers.1.self_attn.k_proj.weight"].bfloat16()
    save_file(tensors, file)
    mixed = ask(folder)
    assert {w.format for w in mixed} == {Dense(torch.float32), Dense(torch.bfloat16)}
    stacked = torch.cat([w.tensors[0].float() for w in mixed])
    assert torch.allclose(stacked, whole[rows], atol=0.01)
    assert torch.equal(torch.cat([w.bias for w in mixed]), weight.bias)


def test_biases_and_small_tensors_are_private_copies(tmp_path: Path) -> None:
    """A layer may write to them (attention cuts the K bias out): the file's mapping must not change."""
    folder, _ = make("qwen2", tmp_path)
    checkpoint = read_model(folder)
    for _ in range(2):
        source = checkpoint.open_source(Policy("auto", torch.float32), CPU).scope("model.layers.0")
        (weight,) = source.linear(["self_attn.k_proj"], [32], 64, bias=True)
        norm = source.tensor("input_layernorm.weight", (64,), offset=1.0)
        assert weight.bias is not None
        assert weight.bias.abs().min() > 0
        assert norm.mean() > 1.5
        weight.bias.zero_()
        norm.zero_()


def test_tied_head_is_the_embedding_and_stored_once(tmp_path: Path) -> None:
    folder, _ = make("qwen3", tmp_path, tie_word_embeddings=True)
    source = read_model(folder).open_source(Policy("auto", torch.float32), CPU)
    (table,) = source.linear(["model.embed_tokens"], [512], 64, role="embedding")
    (head,) = source.linear(["lm_head"], [512], 64, role="head")
    assert head is table
    assert source.nbytes == 512 * 64 * 4


def test_every_fault_is_named_in_one_error(tmp_path: Path) -> None:
    folder, _ = make("qwen3", tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.self_attn.v_proj.weight"], tensors["model.layers.3.input_layernorm.weight"]
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 96)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(128, 64, dtype=torch.int32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
    save_file(tensors, file)
    checkpoint = read_model(folder)
    with pytest.raises(ModelError) as info:
        _build(checkpoint.config, checkpoint.open_source(Policy("auto", torch.float32), CPU))
    text = str(info.value)
    for part in (
        str(folder),
        "5 weights do not fit the model",
        "model.layers.2.self_attn.v_proj.weight [64, 64] is missing",
        "model.layers.3.input_layernorm.weight [64] is missing",
        "model.layers.1.mlp.down_proj.weight is [64, 96], must be [64, 128]",
        "model.layers.0.mlp.up_proj.weight is stored as I32",
        "model.layers.0.self_attn.q_proj.bias is in the file but not in the model",
    ):
        assert part in text


def test_a_long_list_of_faults_is_bounded(tmp_path: Path) -> None:
    folder, _ = make("qwen3", tmp_path)
    file = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "layers.1." not in k and "layers.2." not in k}, file)
    checkpoint = read_model(folder)
    with pytest.raises(ModelError, match="22 weights do not fit") as info:
        _build(checkpoint.config, checkpoint.open_source(Policy("auto", torch.float32), CPU))
    assert str(info.value).endswith("and 2 more")


def test_quantising_a_width_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder, _ = make("qwen2", tmp_path, intermediate_size=72)
    checkpoint = read_model(folder)
    with pytest.raises(ModelError, match=r"down_proj\.weight: w8 needs a width that is a multiple of 32, not 72"):
        _build(checkpoint.config, checkpoint.open_source(Policy("w8", torch.float32), CPU))
    assert _build(checkpoint.config, checkpoint.open_source(Policy("auto", torch.float32), CPU)) > 0


def _dummy(seed: int = 0, quantization: Quantization = "auto", shape: str = "qwen3.8-27b-fp8") -> DummySource:
    config = config_from_shape(shape)
    return DummySource(ConfigStorage(config), Policy(quantization, torch.float32), CPU, tied_head=False, seed=seed)


@pytest.mark.parametrize("quantization", ["auto", "none", "bf16", "w8", "w4"])
def test_dummy_weights_have_fan_in_scale_and_distinct_rows(quantization: Quantization) -> None:
    (weight,) = _dummy(quantization=quantization).linear(["model.layers.0.mlp.down_proj"], [1024], 4096)
    values = weight.format.decode(weight.tensors).float()
    assert 0.85 < float(values.std() * 64) < 1.15
    assert abs(float(values.mean())) < 1e-3
    assert len(torch.unique(values[:, :16], dim=0)) == 1024


def test_dummy_is_reproducible_and_seeded() -> None:
    def first(seed: int, name: str) -> torch.Tensor:
        (weight,) = _dummy(seed).linear([name], [64], 256)
        return weight.format.decode(weight.tensors)

    assert torch.equal(first(1, "a"), first(1, "a"))
    assert not torch.equal(first(1, "a"), first(2, "a"))
    assert not torch.equal(first(1, "a"), first(1, "b"))
    source = _dummy()
    norm = source.tensor("model.layers.0.input_layernorm.weight", (4096,), offset=1.0)
    assert 0.95 < float(norm.mean()) < 1.05
    assert float(source.tensor("model.layers.0.linear_attn.A_log", (48,)).max()) < 1.4


def test_dummy_respects_modules_kept_unquantised() -> None:
    source, base = _dummy(), "model.layers.0.linear_attn."
    assert source.linear([base + "in_proj_z"], [128], 256)[0].format == Fp8Block()
    assert source.linear([base + "in_proj_a"], [48], 256, role="small")[0].format == Dense(torch.bfloat16)
    assert source.linear(["lm_head"], [256], 256, role="head")[0].format == Dense(torch.bfloat16)


def test_weights_of_the_27b_take_what_the_checkpoint_takes() -> None:
    """27.44 GiB of text weights: 22.71 in the layers, 2.37 each for embedding and head (published file sizes)."""
    config = config_from_shape("qwen3.8-27b-fp8")
    source = PlannedSource(ConfigStorage(config), Policy("auto", torch.bfloat16), tied_head=False)
    total = _build(config, source)
    assert round(total / 2**30, 2) in (27.44, 27.45)
    assert abs(2 * 248320 * 5120 * 2 / 2**30 - 2 * 2.37) < 0.01
    plain = config_from_shape("qwen3.5-27b")
    whole = _build(plain, PlannedSource(ConfigStorage(plain), Policy("auto", torch.bfloat16), tied_head=False))
    assert 1.99 < (whole - 2 * 248320 * 5120 * 2) / (total - 2 * 248320 * 5120 * 2) < 2.01
