"""An engine on the GPU backend gives the tokens of the reference: on a GPU as it is, elsewhere in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tiny_models
from engines import feed, prompt
from pocketllm import SlotEngine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = {0: prompt(9, seed=1), 1: prompt(2, seed=2)}


LAYERS = {"qwen2": {}, "qwen3_5": {"layer_types": ["linear_attention", "full_attention"]}}


def build(kind: str, tmp_path: Path, kernels: str, **options: Any) -> SlotEngine:
    folder, _ = tiny_models.make(kind, tmp_path, num_hidden_layers=2, **LAYERS[kind])
    sizes = {"max_batch_size": 3, "max_context": 128, "page_size": 16}
    return SlotEngine(folder, kernels=kernels, device=DEVICE, dtype="float32", **sizes, **options)


def greedy(slots: SlotEngine, steps: int) -> list[list[int]]:
    """Tokens of the prompts' slots, one list a step."""
    held = {slots.acquire_slot(100): ids for ids in PROMPTS.values()}
    logits = feed(slots, held)
    tokens = []
    for _ in range(steps):
        chosen = {slot: [int(row.argmax())] for slot, row in logits.items()}
        tokens.append([ids[0] for ids in chosen.values()])
        logits = feed(slots, chosen, "decode")
    return tokens


@pytest.mark.parametrize(("kind", "kv"), [("qwen2", "auto"), ("qwen2", "turboquant_k8v4"), ("qwen3_5", "auto")])
def test_greedy_tokens_are_those_of_the_reference(kind: str, kv: str, tmp_path: Path) -> None:
    wanted = greedy(build(kind, tmp_path, "reference", kv_cache_dtype=kv), 3)
    assert greedy(build(kind, tmp_path, "triton", kv_cache_dtype=kv), 3) == wanted


def test_verified_and_committed_tokens_are_decoded_ones(tmp_path: Path) -> None:
    slots = build("qwen3_5", tmp_path, "triton", max_draft_tokens=1)
    first, second = (slots.acquire_slot(100) for _ in range(2))
    feed(slots, dict.fromkeys((first, second), PROMPTS[1]))
    verified = feed(slots, {first: [7, 8]}, "verify")[first]
    slots.commit([first], [1])
    decoded = feed(slots, {second: [7]}, "decode")[second]
    torch.testing.assert_close(decoded, verified[0], atol=1e-4, rtol=1e-4)
    after = feed(slots, {first: [9], second: [9]}, "decode")
    torch.testing.assert_close(after[first], after[second], atol=1e-4, rtol=1e-4)
