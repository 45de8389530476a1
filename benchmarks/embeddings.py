"""What `--quantize-embeddings` costs in quality: next-token distributions against plain embeddings, on one text.

    python benchmarks/embeddings.py MODEL --text FILE [--window 512] [--tokens 4096] [--threads N] [--json]

All engines read the same chunks of the text. Keys of --json: model, window, tokens, machine and rows, one per storage, with
embeddings, weights (bytes, of the whole model), perplexity, kl_mean (nats, against plain ones) and top1 (share of tokens
whose likeliest next token is the same).
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from common import machine, machine_line, parser_of, print_json, show
from pocketllm.engine.slot_engine import SlotEngine, SlotRequest
from pocketllm.kv_eval import Comparison, compare
from pocketllm.models.registry import Checkpoint, read_model
from pocketllm.options import EmbeddingStorage, EngineOptions
from pocketllm.text.tokenizer import load_tokenizer

STORAGES: tuple[EmbeddingStorage, ...] = get_args(EmbeddingStorage)
STEP = 128  # tokens whose logits are kept at a time


def logits_of(engine: SlotEngine, slot: int, ids: list[int]) -> Tensor:
    (result,) = engine.batch_prefill([SlotRequest(slot, ids)], all_logits=True)
    if result.error is not None or result.logits is None:
        raise RuntimeError("the text could not be read") from result.error
    return result.logits


def measure(checkpoint: Checkpoint, ids: list[int], tokens: int, options: EngineOptions) -> dict[str, Any]:
    """ids: the text; options: max_context is the window, one slot."""
    window = options.max_context or 0
    engines = {name: SlotEngine(checkpoint, replace(options, quantize_embeddings=name)) for name in STORAGES}
    plain = engines["none"]
    if engines["w8"].plan.weights == plain.plan.weights:
        raise SystemExit(f"{checkpoint.name}: its embeddings are quantised in the file: nothing to compare")
    found: dict[str, list[Comparison]] = {name: [] for name in engines}
    for begin in range(0, min(tokens, len(ids) - 1) // window * window, window):
        part = ids[begin : begin + window]
        slots = {name: engine.acquire_slot(window) for name, engine in engines.items()}
        for start in range(0, window - 1, STEP):
            chunk = part[start : min(start + STEP, window - 1)]
            targets = torch.tensor(part[start + 1 : start + 1 + len(chunk)])
            base = logits_of(plain, slots["none"], chunk)
            for name, engine in engines.items():
                logits = base if engine is plain else logits_of(engine, slots[name], chunk)
                found[name].append(compare(base, logits, targets))
        for name, engine in engines.items():
            engine.release_slot(slots[name])
    if not found["none"]:
        raise SystemExit(f"the text has {len(ids)} tokens: at least one more than --window are needed")
    return {
        "model": checkpoint.name,
        "window": window,
        "tokens": sum(len(part.nll) for part in found["none"]),
        "machine": machine(options.num_threads()),
        "rows": [row(name, engine, found[name]) for name, engine in engines.items()],
    }


def row(name: str, engine: SlotEngine, parts: list[Comparison]) -> dict[str, Any]:
    return {
        "embeddings": name,
        "weights": engine.plan.weights,
        "perplexity": round(math.exp(torch.cat([part.nll for part in parts]).mean()), 4),
        "kl_mean": round(float(torch.cat([part.kl for part in parts]).mean()), 6),
        "top1": round(float(torch.cat([part.same_top for part in parts]).double().mean()), 4),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", help="folder, GGUF file or hub id, whose embeddings are stored plain")
    parser.add_argument("--text", required=True, type=Path, help="UTF-8")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args(arguments)
    checkpoint = read_model(args.model)
    if checkpoint.path is None:
        raise SystemExit("give a trained model: random weights predict nothing")
    ids = load_tokenizer(checkpoint.path).encode(args.text.read_text(encoding="utf-8"), add_special=False)
    options = EngineOptions(max_batch_size=1, max_context=args.window, threads=args.threads)
    values = measure(checkpoint, ids, args.tokens, options)
    if args.json:
        print_json(values)
    else:
        rows = values["rows"]
        show([machine_line(values["machine"])], list(rows[0]), [list(r.values()) for r in rows], left=["embeddings"])


if __name__ == "__main__":
    main()
