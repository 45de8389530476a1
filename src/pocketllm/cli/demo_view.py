"""What the demo looks like: live on a terminal, plain lines elsewhere, nothing with --json."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from pocketllm.cli import console
from pocketllm.cli.demo import Lane, Outcome, memory_per_slot
from pocketllm.engine.memory_plan import gib

if TYPE_CHECKING:
    from pocketllm.llm import LLM

Update = Callable[[], None]

_REDRAW = 1 / 12  # seconds between two pictures: calm to look at, and too few to slow the engine down
_LINES = 3  # of an answer that are shown while it grows, so that nothing jumps
_STATE_STYLE = {"waiting": "dim", "prefill": "yellow", "decode": "cyan", "done": "green"}


def facts(llm: LLM) -> str:
    engine = llm.engine
    threads = engine.options.num_threads()
    where = f"{threads} CPU thread{'s' if threads > 1 else ''}" if engine.device.type == "cpu" else str(engine.device)
    plan = engine.plan
    return (
        f"{engine.checkpoint.name} · {where} · {engine.kernels.name} kernels · "
        f"{plan.kv.num_slots} slots of {plan.max_context} tokens"
    )


def results(llm: LLM, outcome: Outcome) -> list[tuple[str, str, str]]:
    """Label, figure, remark: what the demo has to say."""
    tokens = sum(len(lane.tokens) for lane in outcome.together)
    serial = sum(len(lane.tokens) for lane in outcome.serial)
    plan = llm.engine.plan
    return [
        ("together", f"{outcome.together_tok_s:.1f} tok/s", f"{tokens} tokens in {outcome.together_s:.1f} s"),
        ("one after the other", f"{outcome.serial_tok_s:.1f} tok/s", f"{serial} tokens in {outcome.serial_s:.1f} s"),
        ("speed-up", f"{outcome.speedup:.2f}x", ""),
        ("identical tokens", "yes" if outcome.identical else "NO", "compared token by token"),
        (
            "memory per slot",
            gib(memory_per_slot(llm)),
            f"for {plan.max_context} tokens as {plan.kv.kv_format.name}; the weights, {gib(plan.weights)}, are shared",
        ),
    ]


class SilentView:
    def status(self, text: str) -> AbstractContextManager[object]:
        return nullcontext()

    def start(self, llm: LLM) -> None:
        pass

    def together(self, lanes: Sequence[Lane]) -> AbstractContextManager[Update]:
        return nullcontext(lambda: None)

    def one_by_one(self, lanes: Sequence[Lane], total: int) -> AbstractContextManager[Update]:
        return nullcontext(lambda: None)

    def summary(self, llm: LLM, outcome: Outcome) -> None:
        pass


class PlainView(SilentView):
    """A line for each thing that happens."""

    def start(self, llm: LLM) -> None:
        self._print(facts(llm))

    @contextmanager
    def together(self, lanes: Sequence[Lane]) -> Iterator[Update]:
        self._print("together:")
        with self._done_lines(lanes, show_text=True) as update:
            yield update

    @contextmanager
    def one_by_one(self, lanes: Sequence[Lane], total: int) -> Iterator[Update]:
        self._print("one after the other:")
        with self._done_lines(lanes, show_text=False) as update:
            yield update

    def summary(self, llm: LLM, outcome: Outcome) -> None:
        for label, figure, remark in results(llm, outcome):
            self._print(f"{label}: {figure}" + (f" ({remark})" if remark else ""))

    @contextmanager
    def _done_lines(self, lanes: Sequence[Lane], show_text: bool) -> Iterator[Update]:
        told: set[int] = set()

        def update() -> None:
            for index, lane in enumerate(lanes):
                if lane.state == "done" and index not in told:
                    told.add(index)
                    rate = f"{lane.tok_s:.1f} tok/s" if lane.tok_s else "-"
                    answer = " | " + " ".join(lane.text.split()) if show_text else ""
                    self._print(f"  slot {lane.slot} | done | {len(lane.tokens)} tokens | {rate}{answer}")

        yield update

    @staticmethod
    def _print(line: str) -> None:
        console.stdout().print(Text(line), soft_wrap=True)


class LiveView(SilentView):
    def __init__(self) -> None:
        self._console = console.stdout()

    def status(self, text: str) -> AbstractContextManager[object]:
        return self._console.status(Text(text, style="dim"), spinner="dots", spinner_style="dim")

    def start(self, llm: LLM) -> None:
        self._console.print(Text.assemble(("PocketLLM", "bold"), ("  " + facts(llm), "dim")))
        self._console.print()

    @contextmanager
    def together(self, lanes: Sequence[Lane]) -> Iterator[Update]:
        with self._live(lambda: self._table(lanes, _LINES)) as (live, update):
            yield update
            live.update(self._table(lanes, None), refresh=True)
        self._console.print()

    @contextmanager
    def one_by_one(self, lanes: Sequence[Lane], total: int) -> Iterator[Update]:
        def bar() -> RenderableType:
            done = sum(len(lane.tokens) for lane in lanes)
            number = sum(lane.state != "waiting" for lane in lanes)
            line = Table.grid(padding=(0, 2))
            line.add_row(
                Text(f"the same prompts one after the other, {number} of {len(lanes)}", style="dim"),
                ProgressBar(total=max(total, 1), completed=done, width=24),
                Text(f"{done} of {total} tokens", style="dim"),
            )
            return line

        with self._live(bar, transient=True) as (_, update):
            yield update

    def summary(self, llm: LLM, outcome: Outcome) -> None:
        grid = Table.grid(padding=(0, 3))
        grid.add_column(style="dim")
        grid.add_column(justify="right", style="bold")
        grid.add_column(style="dim")
        good = {"speed-up": "bold green" if outcome.speedup > 1 else "bold yellow",
                "identical tokens": "bold green" if outcome.identical else "bold red"}  # fmt: skip
        for label, figure, remark in results(llm, outcome):
            grid.add_row(label, Text(figure, style=good.get(label, "bold")), remark)
        self._console.print(Group(Rule(style="dim"), grid))

    @contextmanager
    def _live(self, picture: Callable[[], RenderableType], transient: bool = False) -> Iterator[tuple[Live, Update]]:
        drawn = 0.0
        with Live(picture(), console=self._console, auto_refresh=False, transient=transient) as live:

            def update() -> None:
                nonlocal drawn
                if time.perf_counter() - drawn >= _REDRAW:
                    live.update(picture(), refresh=True)
                    drawn = time.perf_counter()

            yield live, update

    def _table(self, lanes: Sequence[Lane], lines: int | None) -> Table:
        """lines: how many of each answer's last lines are shown; None: all of it."""
        table = Table(box=None, expand=True, padding=(0, 2, 1, 0), header_style="dim")
        for name, width in (("slot", 4), ("state", 7), ("tokens", 6), ("tok/s", 6)):
            table.add_column(name, width=width, justify="left" if name == "state" else "right")
        table.add_column("text", ratio=1)
        width = max(self._console.width - 4 - 7 - 6 - 6 - 5 * 2, 20)
        for index, lane in enumerate(lanes):
            answer = Text(" ".join(lane.text.split()))
            if lines is not None:
                wrapped = answer.wrap(self._console, width)
                kept = list(wrapped[-lines:])
                answer = Text("\n").join(kept + [Text("")] * (lines - len(kept)))
            table.add_row(
                str(index if lane.slot is None else lane.slot),
                Text(lane.state, style=_STATE_STYLE[lane.state]),
                str(len(lane.tokens)),
                f"{lane.tok_s:.1f}" if lane.tok_s else "",
                Group(Text(lane.prompt, style="bold", no_wrap=True, overflow="ellipsis"), answer),
            )
        return table
