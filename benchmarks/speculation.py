"""How much faster answers are with drafts that one pass verifies, and what drafts cost where nothing repeats.

    python benchmarks/speculation.py [MODEL] [--drafts N] [--slots 1,4] [--tokens N] [--rounds N] [--json]

Two engines on the same weights, one of them with `drafter="ngram"`, take turns on the same prompts: a function to be
written again as it is, a list to be gone on with, and prose, which is drawn at temperature 1 so that it does not go round in
circles; the others are greedy. Answers have --tokens tokens. A round that is not counted comes first.

--json keys: benchmark (speculation), model, drafts, tokens, rounds, machine, and rows, each with answer, slots, ratio (speed
with drafts over that without, the median of the rounds), drafted and accepted (tokens of a round), same (whether both gave
the same tokens).
"""

from __future__ import annotations

import inspect
import textwrap
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from common import (
    add_engine_arguments,
    engine_options,
    machine,
    machine_line,
    numbers,
    parser_of,
    print_json,
    ratio,
    show,
    take_turns,
)  # fmt: skip
from pocketllm import LLM, SamplingParams

FUNCTION = inspect.getsource(textwrap.dedent)
FRUIT = "apple, banana, cherry, date, elderberry, fig, grape, kiwi"
PROMPTS = {  # with a temperature
    "a function again": (f"A Python function:\n\n{FUNCTION}\n\nThe same function, without any change:\n\n", 0.0),
    "a list": (f"Fruit: {FRUIT}. Fruit again: apple, banana, cherry,", 0.0),
    "prose": ("It was a cold morning in November, and the harbour lay under fog. Captain Ames had not slept. He", 1.0),
}
Answers = tuple[float, list[list[int]]]  # seconds, tokens


def answer(llm: LLM, prompts: list[str], params: SamplingParams) -> Answers:
    start = time.perf_counter()
    answers = llm.generate(prompts, params)
    return time.perf_counter() - start, [generation.token_ids for generation in answers]


def compare(plain: LLM, drafting: LLM, prompts: list[str], params: SamplingParams, rounds: int) -> dict[str, Any]:
    cases = {"plain": partial(answer, plain, prompts, params), "drafts": partial(answer, drafting, prompts, params)}
    for case in cases.values():
        case()
    before = drafting.engine.stats
    found = take_turns(cases, rounds)
    after = drafting.engine.stats
    return {
        "ratio": ratio([seconds for seconds, _ in found["plain"]], [seconds for seconds, _ in found["drafts"]]),
        "drafted": (after.drafted_tokens - before.drafted_tokens) // rounds,
        "accepted": (after.accepted_tokens - before.accepted_tokens) // rounds,
        "same": all(a == b for (_, a), (_, b) in zip(found["plain"], found["drafts"], strict=True)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_engine_arguments(parser)
    parser.add_argument("--drafts", type=int, default=4, help="max_draft_tokens (default: 4)")
    parser.add_argument("--slots", type=numbers, default=[1, 4], help="answers at once (default: 1,4)")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer (default: 160)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    sizes = {"max_batch_size": max(args.slots), "max_context": 2048}
    plain = LLM(args.model, engine_options(args, **sizes))
    drafting = LLM(args.model, engine_options(args, **sizes, drafter="ngram", max_draft_tokens=args.drafts))
    rows = []
    for name, (text, temperature) in PROMPTS.items():
        params = SamplingParams(max_tokens=args.tokens, temperature=temperature, seed=1, ignore_eos=True)
        for slots in args.slots:
            found = compare(plain, drafting, [text] * slots, params, args.rounds)
            rows.append({"answer": name, "slots": slots, **found})
    facts = machine(plain.engine.options.num_threads())
    if args.json:
        settings = {
            "model": args.model or "embedded",
            "drafts": args.drafts,
            "tokens": args.tokens,
            "rounds": args.rounds,
        }
        print_json({"benchmark": "speculation", **settings, "machine": facts, "rows": rows})
        return
    columns = ("answer", "slots", "ratio", "drafted", "accepted", "same")
    show([machine_line(facts)], columns, [[row[name] for name in columns] for row in rows], left=("answer",))


if __name__ == "__main__":
    main()
