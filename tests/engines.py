"""Small helpers that several tests share: tiny engines and ways to run them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tiny_models
from pocketllm import Engine, SlotEngine, SlotRequest
from pocketllm.engine.request import RequestOutput
from pocketllm.kernels import BACKENDS

CPU_BACKENDS = [name for name in BACKENDS if name != "triton"]  # which has tests of its own, in Triton's interpreter


def prompt(length: int, seed: int = 0, vocab: int = 500) -> list[int]:
    ids: list[int] = torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def engine(kind: str, tmp_path: Path, **options: Any) -> Engine:
    """An engine of a tiny model: 4 slots of 256 tokens in pages of 16."""
    folder, _ = tiny_models.make(kind, tmp_path)
    return Engine(folder, **{"max_batch_size": 4, "max_context": 256, "page_size": 16, **options})


def feed(slots: SlotEngine, requests: dict[int, Sequence[int]], kind: str = "prefill") -> dict[int, Tensor]:
    """One explicit pass; the logits by slot. Fails on any error."""
    call = {"prefill": slots.batch_prefill, "decode": slots.batch_decode, "verify": slots.batch_verify}[kind]
    logits = {}
    for result in call([SlotRequest(slot, ids) for slot, ids in requests.items()]):
        assert result.error is None, result.error
        assert result.logits is not None
        logits[result.slot] = result.logits
    return logits


def drain(running: Engine) -> dict[str, list[RequestOutput]]:
    """Steps until nothing is left; all outputs by request."""
    outputs: dict[str, list[RequestOutput]] = {}
    while running.has_work:
        for output in running.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]
