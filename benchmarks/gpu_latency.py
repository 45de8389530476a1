"""What the user of a conversation waits for on a GPU: the first token after a short prompt, and the others with drafts.

    python benchmarks/gpu_latency.py [--model NAME] [--drafts N] [--slots 1,4,8] [--ranks N] [--out FILE] [--seconds N]

Parts: `prompts` (milliseconds to the first token, of passes that are recorded and of the same passes as Python calls
them), `plain` (answers without drafts), and with `drafter="mtp"`: `drafts, always` (weights are random, so drafts are wrong:
what they cost), `drafts, wrong` (the same, made as long as they pay), `drafts, right` (all of them are replaced by what the
answers without drafts were: the most there is to gain).

Rows: part, slots, tokens, ms (median of a step; of a prompt, the least), tok_s (of all slots), drafted and accepted
(tokens), same (whether tokens are those without drafts, or recordings).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common import numbers
from gpu_report import Report
from pocketllm.cli.bench_run import random_tokens
from pocketllm.engine.engine import Engine
from pocketllm.engine.inputs import SlotTokens
from pocketllm.engine.payoff import Payoff
from pocketllm.options import EngineOptions, SamplingParams

PROMPT, ANSWER = 200, 160
PROMPTS = ((1, 16), (1, 64), (1, 200), (1, 512), (4, 50), (4, 128), (1, 1024))  # at once, of so many tokens
WARM_UP = 4  # steps before the clock starts


def build(model: str, ranks: int, slots: int, **more: Any) -> Engine:
    gc.collect()
    torch.cuda.empty_cache()
    sizes: dict[str, Any] = {"max_batch_size": slots, "max_context": 4096, "tensor_parallel": ranks}
    options = EngineOptions(load_format="dummy", device="cuda", kernels="triton", **sizes, **more)
    return Engine(model, options)


def answers(engine: Engine, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[tuple[float, int]]]:
    """Greedy answers; and of each step but the first few, its seconds and how many tokens it gave."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    names = [engine.add_request(prompt, params) for prompt in prompts]
    found: dict[str, list[int]] = {name: [] for name in names}
    steps = []
    while engine.has_work:
        start = time.perf_counter()
        outputs = engine.step()
        steps.append((time.perf_counter() - start, sum(len(output.new_token_ids) for output in outputs)))
        for output in outputs:
            if output.error is not None:
                raise output.error
            found[output.request_id] += output.new_token_ids
    return [found[name] for name in names], steps[WARM_UP:]


def first_tokens(report: Report, engine: Engine) -> None:
    runner: Any = engine.runner
    recorded = runner._prefills
    sizes = list(recorded._sizes)
    for count, length in PROMPTS:
        prompts = [[random_tokens(engine, length, 10 * seed + i) for i in range(count)] for seed in range(4)]
        rows, tokens = {}, {}
        for name, used in (("recorded", sizes), ("called", [])):
            recorded._sizes = used
            times = []
            tokens[name] = []
            for some in prompts:
                start = time.perf_counter()
                found, _ = answers(engine, some, 1)
                times.append(time.perf_counter() - start)
                tokens[name].append(found)
            rows[name] = round(min(times[1:]) * 1e3, 1)
        recorded._sizes = sizes
        report.row(part="prompts", slots=count, tokens=length, same=tokens["recorded"] == tokens["called"], ms=rows)


def decode(
    report: Report, engine: Engine, part: str, prompts: list[list[int]], wanted: list[list[int]] | None
) -> list[list[int]]:
    answers(engine, prompts, ANSWER // 2)
    before = engine.stats
    found, steps = answers(engine, prompts, ANSWER)
    after = engine.stats
    report.row(
        part=part,
        slots=len(prompts),
        tokens=ANSWER,
        ms=round(statistics.median(seconds for seconds, _ in steps) * 1e3, 2),
        tok_s=round(sum(tokens for _, tokens in steps) / sum(seconds for seconds, _ in steps), 1),
        drafted=after.drafted_tokens - before.drafted_tokens,
        accepted=after.accepted_tokens - before.accepted_tokens,
        same=wanted is None or found == wanted,
    )
    return found


def knowing(engine: Engine, whole: list[list[int]], most: int) -> Callable[[Sequence[SlotTokens]], torch.Tensor]:
    """The layer's work, and in place of its drafts what follows in one of the `whole` prompts with their answers."""
    propose = engine.runner.propose

    def right(items: Sequence[SlotTokens]) -> torch.Tensor:
        drafts = propose(items).clone()
        for row, item in enumerate(items):
            request = engine.scheduler.running[item.slot]
            so_far = request.tokens_so_far()
            (text,) = [text for text in whole if text[: len(so_far)] == so_far]
            tokens = text[request.num_tokens : request.num_tokens + most]
            drafts[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        return drafts

    return right


def run(report: Report, model: str, ranks: int, slot_counts: list[int], most: int) -> None:
    slots = max(slot_counts)
    engine = build(model, ranks, slots)
    prompts = [random_tokens(engine, PROMPT, slot) for slot in range(slots)]
    if ranks == 1:
        report.part("prompts", 60, partial(first_tokens, report, engine))
    wanted = {count: decode(report, engine, "plain", prompts[:count], None) for count in slot_counts}
    engine.close()
    del engine
    drafting = build(model, ranks, slots, drafter="mtp", max_draft_tokens=most)
    propose: Any = drafting.runner.propose
    runner: Any = drafting.runner
    speculation: Any = drafting._speculation
    for count in slot_counts:
        some = prompts[:count]
        whole = [prompt + answer for prompt, answer in zip(some, wanted[count], strict=True)]
        for part, used, payoff in (
            ("drafts, always", propose, None),
            ("drafts, wrong", propose, Payoff()),
            ("drafts, right", knowing(drafting, whole, most), Payoff()),
        ):
            runner.propose = used
            speculation.payoff = payoff
            decode(report, drafting, part, some, wanted[count])
        runner.propose = propose
    drafting.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.8-27b-fp8")
    parser.add_argument("--drafts", type=int, default=3, help="max_draft_tokens (default: 3)")
    parser.add_argument("--slots", type=numbers, default=[1, 4, 8])
    parser.add_argument("--ranks", type=int, default=1, help="GPUs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=200)
    args = parser.parse_args()
    report = Report("gpu_latency", args.out, args.seconds)
    report.fact("model", args.model)
    report.fact("device", f"{args.ranks} x {torch.cuda.get_device_name(0)}")
    report.fact("drafts", args.drafts)
    report.part("all", args.seconds, partial(run, report, args.model, args.ranks, args.slots, args.drafts))
    print(json.dumps({**report.facts, "rows": report.rows}), flush=True)


if __name__ == "__main__":
    main()
