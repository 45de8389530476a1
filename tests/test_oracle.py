"""The network against transformers: logits of prefill, chunked prefill, decode and verify, and greedy continuations."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import tiny_models
from engines import CPU_BACKENDS
from pocketllm import LLM, Engine, SamplingParams, SlotEngine, SlotRequest

LENGTH = 130  # three chunks of the delta rule, the last one partly filled
TOLERANCE = 2e-4  # per standard deviation of the logits, float32

VARIANTS: list[tuple[str, dict[str, Any]]] = [(kind, {}) for kind in tiny_models.KINDS] + [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    }}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen3_moe", {"mlp_only_layers": [1]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen3_5", {"num_hidden_layers": 8}),
]  # fmt: skip


def prompt(length: int = LENGTH, seed: int = 0, vocab: int = 500) -> Tensor:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def oracle_logits(oracle: Any, ids: Tensor) -> Tensor:
    logits: Tensor = oracle(ids[None]).logits[0].float()
    return logits


@torch.no_grad()
def exact_logits(oracle: Any, ids: Tensor) -> tuple[Tensor, float]:
    """The oracle's logits [T, V] in float64 and the tolerance: 2e-4 per standard deviation, but at least three times what
    transformers' own float32 arithmetic is off. (Its expert products exist in float32 only: no float64 there.)"""
    logits = oracle_logits(oracle, ids)
    tolerance = TOLERANCE * max(float(logits.std()), 1.0)
    if any("experts" in name for name, _ in oracle.named_parameters()):
        return logits, tolerance
    exact = copy.deepcopy(oracle).double()(ids[None]).logits[0].float()
    return exact, max(tolerance, 3 * float((logits - exact).abs().max()))


def check_logits(engine: SlotEngine, oracle: Any, ids: Tensor) -> None:
    """Prefill of 100 tokens, 20 decodes, a verify of 4 of which 2 are kept, and a second chunk."""
    want, atol = exact_logits(oracle, ids)
    slot = engine.acquire_slot()

    def close(got: Tensor | None, expected: Tensor) -> None:
        assert got is not None
        torch.testing.assert_close(got, expected, atol=atol, rtol=0)

    close(engine.batch_prefill([SlotRequest(slot, ids[:100])])[0].logits, want[99])
    for i in range(100, 120):
        close(engine.batch_decode([SlotRequest(slot, ids[i : i + 1])])[0].logits, want[i])
    close(engine.batch_verify([SlotRequest(slot, ids[120:124])])[0].logits, want[120:124])
    engine.commit([slot], [2])
    close(engine.batch_prefill([SlotRequest(slot, ids[122:])], all_logits=True)[0].logits, want[122:])
    engine.release_slot(slot)


def greedy(engine: Engine, ids: Tensor, count: int) -> list[int]:
    engine.add_request(ids, SamplingParams(max_tokens=count, ignore_eos=True))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens += output.new_token_ids
    return tokens


def check_greedy(engine: Engine, oracle: Any, ids: Tensor, count: int = 24) -> None:
    """Every token is the oracle's argmax after the same tokens."""
    tokens = greedy(engine, ids, count)
    want = oracle_logits(oracle, torch.cat((ids, torch.tensor(tokens)))).argmax(-1)
    assert tokens == want[len(ids) - 1 : -1].tolist()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("kind", "overrides"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_every_kind_matches_transformers(kind: str, overrides: dict[str, Any], backend: str, tmp_path: Path) -> None:
    folder, oracle = tiny_models.make(kind, tmp_path, **overrides)
    engine = Engine(folder, max_batch_size=2, max_context=256, page_size=16, max_draft_tokens=3, kernels=backend)
    ids = prompt()
    check_logits(engine, oracle, ids)
    check_greedy(engine, oracle, ids[:70])


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_5"])
def test_fp8_folder_matches_its_dequantised_weights(kind: str, tmp_path: Path) -> None:
    folder, oracle = tiny_models.make_fp8(kind, tmp_path)
    engine = Engine(
        folder, max_batch_size=2, max_context=256, page_size=16, max_draft_tokens=3, kernels="reference"
    )  # the CPU backend rounds activations to bf16 for these weights
    ids = prompt(seed=3)
    check_logits(engine, oracle, ids)
    check_greedy(engine, oracle, ids[:40])


@pytest.mark.parametrize(
    ("kind", "stored"), [("llama", "F32"), ("llama", "Q8_0"), ("qwen2", "Q4_0"), ("qwen3", "Q4_1")]
)
def test_gguf_matches_its_dequantised_weights(kind: str, stored: str, tmp_path: Path) -> None:
    path, oracle = tiny_models.make_gguf(kind, tmp_path, type=stored)
    engine = Engine(
        path, max_batch_size=2, max_context=256, page_size=16, max_draft_tokens=3, kernels="reference"
    )  # the CPU backend rounds activations to 8 bits for quantised weights
    ids = prompt(seed=4)
    check_logits(engine, oracle, ids)
    check_greedy(engine, oracle, ids[:40])


@pytest.mark.usefixtures("toy_formats")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_key_bias_left_out_of_storage_changes_nothing(kind: str, tmp_path: Path) -> None:
    """A format that drops the K bias but loses nothing else gives the plain format's logits."""
    folder, oracle = tiny_models.make(kind, tmp_path, **({"attention_bias": True} if kind != "qwen2" else {}))
    engine = SlotEngine(
        folder,
        max_batch_size=1,
        max_context=256,
        page_size=16,
        kv_cache_dtype="fp32_without_key_bias",
        kernels="reference",
    )
    ids = prompt(seed=5)
    slot = engine.acquire_slot()
    result = engine.batch_prefill([SlotRequest(slot, ids)])[0]
    torch.testing.assert_close(result.logits, oracle_logits(oracle, ids)[-1], atol=TOLERANCE, rtol=0)
    has_bias = any(bias is not None for bias in engine.runner.model.key_biases())
    assert has_bias == (kind != "qwen3")  # a norm after the bias would not let it go


def smollm_oracle(path: Path) -> LlamaForCausalLM:
    """SmolLM2 in transformers, from the GGUF file by the `gguf` package's own dequantisation."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        ))  # fmt: skip
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        data = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name.startswith("blk."):
            _, layer, name, _ = tensor.name.split(".")
            if name in ("attn_q", "attn_k"):  # llama.cpp pairs neighbouring rows, transformers the halves of a head
                data = data.view(-1, 32, 2, 576).transpose(1, 2).reshape(data.shape)
            weights[f"model.layers.{layer}.{names[name]}.weight"] = data
        else:
            weights[
                {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[
                    tensor.name
                ]
            ] = data
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval()


@pytest.mark.real_model
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_the_real_model_matches_transformers(embedded_model: Path, backend: str) -> None:
    llm = LLM(embedded_model, max_batch_size=1, max_context=512, quantization="none", kernels=backend)
    oracle = smollm_oracle(embedded_model)
    text = "The capital of France is Paris. Photosynthesis turns light, water and"
    ids = torch.tensor(llm.engine.check_tokens(llm.chat_prompt([{"role": "user", "content": text}])))
    check_greedy(llm.engine, oracle, ids, 32)
    ids = torch.tensor(llm.engine.check_tokens(llm.chat_prompt([{"role": "user", "content": text * 6}])))
    want = oracle_logits(oracle, ids)
    slot = llm.engine.acquire_slot()
    for start, end in ((0, 64), (64, 71), (71, 72), (72, 73), (73, 74), (74, len(ids))):
        forward = llm.engine.batch_decode if end - start == 1 else llm.engine.batch_prefill
        got = forward([SlotRequest(slot, ids[start:end])])[0].logits
        torch.testing.assert_close(got, want[end - 1], atol=TOLERANCE * float(want.std()), rtol=0)
