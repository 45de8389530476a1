"""Which settings for my cards? The tables of docs/settings.md, made by the memory plan.

    python benchmarks/plan_table.py [--cards 1x24,2x22,...] [--models NAME,...] [--write docs/settings.md]

A card of N GB is taken to have N GiB, of which an engine plans with the share it takes by default. Weights are kept as the
checkpoint stores them if they leave room for a slot of 4,096 tokens, else in the first smaller storage that does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pocketllm.engine.device import GPU_SHARE
from pocketllm.engine.memory_advice import context_table
from pocketllm.errors import OptionError
from pocketllm.models.config import ModelConfig
from pocketllm.models.registry import config_from_shape
from pocketllm.options import EngineOptions, Quantization

CARDS = "1x24,2x22,2x24,1x48,1x80,1x141"
MODELS = (
    "qwen3.8-27b-fp8,qwen3.5-27b,qwen3.5-9b,qwen3.5-4b,qwen3.5-35b-a3b,qwen3-next-80b-a3b,qwen3-30b-a3b,qwen3-32b,"
    "qwen3-14b,qwen3-8b,qwen3-4b,qwen2.5-32b,qwen2.5-14b,qwen2.5-7b"
)
SLOTS = (1, 2, 4, 8, 16, 32)
KV_TYPES = ("bf16", "int8_per_token_head", "turboquant_k8v4")
WEIGHTS: tuple[Quantization, ...] = ("auto", "w8", "w4")
LEAST = 4096  # tokens
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


@dataclass(frozen=True)
class Choice:
    weights: Quantization
    contexts: dict[str, dict[int, int]]  # KV type -> slots -> most tokens each (0: does not fit)


def choose(config: ModelConfig, ranks: int, gib: int) -> Choice | None:
    """The first storage of the weights with which the model can be used on `ranks` cards; None: with none."""
    for weights in WEIGHTS:
        options = EngineOptions(tensor_parallel=ranks, quantization=weights)
        try:
            table = context_table(config, options, int(gib * 2**30 * GPU_SHARE), "cuda")
        except OptionError:  # this storage can't be sharded so
            continue
        contexts = {kv: {slots: table[kv][slots] for slots in SLOTS} for kv in KV_TYPES}
        if contexts[KV_TYPES[0]][1] >= LEAST:
            return Choice(weights, contexts)
    return None


def lines(cards: str, models: str) -> Iterator[str]:
    configs = {name: config_from_shape(name) for name in models.split(",")}
    for card in cards.split(","):
        ranks, gib = map(int, card.split("x"))
        yield f"## {ranks} x {gib} GB"
        yield ""
        if ranks > 1:
            yield f"With `--tensor-parallel {ranks}`."
            yield ""
        yield "| model | weights | KV | " + " | ".join(map(str, SLOTS)) + " |"
        yield "|---|---|---|" + "--:|" * len(SLOTS)
        missing = []
        for name, config in configs.items():
            choice = choose(config, ranks, gib)
            if choice is None:
                missing.append(name)
                continue
            weights = "as stored" if choice.weights == "auto" else f"`{choice.weights}`"
            for kv, contexts in choice.contexts.items():
                cells = (f"{n:,}" if n else "-" for n in contexts.values())
                yield f"| {name} | {weights} | `{kv}` | " + " | ".join(cells) + " |"
                name = weights = ""
        yield ""
        if missing:
            yield f"Too large: {', '.join(missing)}."
            yield ""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", default=CARDS, help="number x GB, separated by commas")
    parser.add_argument("--models", default=MODELS, help="shapes, separated by commas")
    parser.add_argument("--write", type=Path, help="put the tables between the two marks of this file")
    args = parser.parse_args(arguments)
    text = "\n".join(lines(args.cards, args.models))
    if args.write is None:
        print(text)
        return
    before, _, rest = args.write.read_text().partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        parser.error(f"{args.write} has no {BEGIN} ... {END}")
    args.write.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
