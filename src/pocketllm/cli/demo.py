"""`pocketllm demo`: four conversations in four slots of one engine, then the same ones one after the other.

It shows the two things slots are for: the tokens are the same, and together they come faster.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pocketllm.cli import console
from pocketllm.cli.flags import DRAFTS, ENGINE_FLAGS, PLAN_ONLY, with_flags, without
from pocketllm.options import EngineOptions, SamplingParams

if TYPE_CHECKING:
    from pocketllm.llm import LLM

PROMPTS = (
    "Explain to a child why the sky is blue.",
    "What does a lighthouse keeper do all day?",
    "How do I make a good cup of coffee?",
    "Tell me about the history of bicycles.",
)
_WARM_UP_TOKENS = 3  # compiles kernels, touches memory; counts for neither run


@dataclass
class Lane:
    """One prompt's way through the engine, as the table shows it."""

    prompt: str
    slot: int | None = None
    state: str = "waiting"  # then prefill, decode, done
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    first: float = 0.0  # perf_counter seconds of the first and the last token
    last: float = 0.0

    @property
    def tok_s(self) -> float | None:
        """Tokens per second since the first token."""
        return (len(self.tokens) - 1) / (self.last - self.first) if self.last > self.first else None


@dataclass(frozen=True)
class Outcome:
    together: list[Lane]
    together_s: float
    serial: list[Lane]
    serial_s: float

    @property
    def identical(self) -> bool:
        return all(a.tokens == b.tokens for a, b in zip(self.together, self.serial, strict=True))

    @property
    def together_tok_s(self) -> float:
        return sum(len(lane.tokens) for lane in self.together) / self.together_s

    @property
    def serial_tok_s(self) -> float:
        return sum(len(lane.tokens) for lane in self.serial) / self.serial_s

    @property
    def speedup(self) -> float:
        return self.together_tok_s / self.serial_tok_s


@with_flags(
    "given",
    without(ENGINE_FLAGS, *PLAN_ONLY, *DRAFTS, "max_batch_size", "load_format"),
    lambda **given: given,
    max_context=1024,
)
def demo(
    model: Annotated[
        str | None, typer.Argument(help="Folder, GGUF file or hub id (default: the embedded model).")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="New tokens per prompt.")] = 48,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Four conversations at once, then one after the other: same tokens? how much faster? Exit 1 if tokens differ.

    --json keys: identical, speedup, slots; together_tok_s, serial_tok_s, together_s, serial_s, tokens (new ones, of
    one run), memory_per_slot and weights (bytes), max_context, kv_cache_dtype, model, kernels, device, threads, and
    results, one per prompt, with prompt, slot, tokens, text.
    """
    params = SamplingParams(max_tokens=max_tokens)
    options = demo_options(given)
    from pocketllm.cli.demo_view import LiveView, PlainView, SilentView
    from pocketllm.llm import LLM

    view = SilentView() if json else LiveView() if sys.stdout.isatty() else PlainView()
    with view.status("loading the model"):
        llm = LLM(model, options)
        prompts = [llm.chat_prompt([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    with view.status("warming up"):
        short = SamplingParams(max_tokens=min(_WARM_UP_TOKENS, max_tokens))
        run_prompts(llm, prompts, short, new_lanes(), lambda: None)
        run_prompts(llm, prompts[:1], short, new_lanes()[:1], lambda: None)
    view.start(llm)
    together, serial = new_lanes(), new_lanes()
    with view.together(together) as update:
        together_s = run_prompts(llm, prompts, params, together, update)
    serial_s = 0.0
    with view.one_by_one(serial, sum(len(lane.tokens) for lane in together)) as update:
        for lane, prompt in zip(serial, prompts, strict=True):
            serial_s += run_prompts(llm, [prompt], params, [lane], update)
    outcome = Outcome(together, together_s, serial, serial_s)
    if json:
        console.print_json(_as_json(llm, outcome))
    else:
        view.summary(llm, outcome)
    if not outcome.identical:
        raise typer.Exit(1)


def demo_options(given: dict[str, Any]) -> EngineOptions:
    """The options given, one slot a prompt, and what keeps the demo quick on the reference kernels.

    Those decode a quantised weight anew for every product, and threads that wait for each other by spinning make them
    many times slower on a busy machine: so the weights are decoded once, at load, and one thread computes.
    """
    options = EngineOptions.of(max_batch_size=len(PROMPTS), **given)
    from pocketllm.engine.device import pick_device
    from pocketllm.kernels import select_kernels

    device = pick_device(options.device).type
    if device == "cpu" and select_kernels(options.kernels, device).name == "reference":
        given = {"quantization": "none", "threads": 1, **given}
    return EngineOptions.of(max_batch_size=len(PROMPTS), **given)


def new_lanes() -> list[Lane]:
    return [Lane(prompt) for prompt in PROMPTS]


def run_prompts(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, lanes: list[Lane], update: Callable[[], None]
) -> float:
    """Generate all prompts at once, keeping their lanes up to date; the seconds it took. Raises a prompt's error."""
    start = time.perf_counter()
    for lane in lanes:
        lane.state = "prefill"
    update()
    for delta in llm.stream(prompts, params):
        generation, lane, now = delta.generation, lanes[delta.generation.index], time.perf_counter()
        if generation.error is not None:
            raise generation.error
        lane.first = lane.first or now
        lane.last = now
        lane.slot, lane.text = generation.slot, generation.text
        lane.tokens = list(generation.token_ids)
        lane.state = "decode" if generation.finish_reason is None else "done"
        update()
    return time.perf_counter() - start


def memory_per_slot(llm: LLM) -> int:
    """Bytes that one more slot of the same size takes: its pages, and its recurrent state."""
    plan = llm.engine.plan
    return plan.kv.max_pages * plan.kv.page_nbytes + plan.state.nbytes // (plan.kv.num_slots + 1)


def _as_json(llm: LLM, outcome: Outcome) -> dict[str, Any]:
    engine = llm.engine
    return {
        "identical": outcome.identical,
        "speedup": round(outcome.speedup, 3),
        "slots": engine.plan.kv.num_slots,
        "together_tok_s": round(outcome.together_tok_s, 2),
        "serial_tok_s": round(outcome.serial_tok_s, 2),
        "together_s": round(outcome.together_s, 3),
        "serial_s": round(outcome.serial_s, 3),
        "tokens": sum(len(lane.tokens) for lane in outcome.together),
        "memory_per_slot": memory_per_slot(llm),
        "weights": engine.plan.weights,
        "max_context": engine.plan.max_context,
        "kv_cache_dtype": engine.plan.kv.kv_format.name,
        "model": engine.checkpoint.name,
        "kernels": engine.kernels.name,
        "device": str(engine.device),
        "threads": engine.options.num_threads(),
        "results": [
            {"prompt": lane.prompt, "slot": lane.slot, "tokens": len(lane.tokens), "text": lane.text}
            for lane in outcome.together
        ],
    }
