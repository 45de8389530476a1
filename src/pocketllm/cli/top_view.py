"""What `pocketllm top` shows: a state of a server, and rates from the state before it."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_STYLES = {"prefill": "yellow", "decode": "cyan", "queued": "magenta", "verifying": "blue", "free": "dim"}


class Reading:
    """One answer of /slots, with the one before it, if that is of the same server process."""

    def __init__(self, state: dict[str, Any], before: Reading | None = None) -> None:
        self.state = state
        earlier = before.state if before is not None and before.state["uptime"] < state["uptime"] else None
        self._earlier = earlier
        self._seconds = state["uptime"] - earlier["uptime"] if earlier is not None else 0.0

    def rate(self, counter: str) -> float | None:
        """Of one of the engine's counters, a second; None if it is not known yet."""
        if self._earlier is None:
            return None
        change: int = self.state["stats"][counter] - self._earlier["stats"][counter]
        return change / self._seconds

    def slot_rate(self, slot: dict[str, Any]) -> float | None:
        """Tokens a second of the request in a slot; None unless it ran there before too."""
        name = slot["request_id"]
        for old in self._earlier["slots"] if self._earlier is not None and name is not None else ():
            if old["request_id"] == name:
                return float(slot["output_tokens"] - old["output_tokens"]) / self._seconds
        return None

    def as_json(self) -> dict[str, Any]:
        return {
            **self.state,
            "decode_tok_s": self.rate("output_tokens"),
            "prefill_tok_s": self.rate("prompt_tokens"),
        }


def picture(reading: Reading, trouble: str | None = None) -> RenderableType:
    """trouble: why the state shown is not the newest."""
    state = reading.state
    minutes, seconds = divmod(int(state["uptime"]), 60)
    facts = f"  {state['model']} · {state['memory']['device']} · up {minutes // 60}:{minutes % 60:02}:{seconds:02}"
    lines: list[RenderableType] = [Text.assemble(("PocketLLM", "bold"), (facts, "dim")), Text()]
    lines += [_figures(reading), Text(), _slots(reading)]
    if trouble is not None:
        lines += [Text(), Text(trouble, style="red")]
    return Group(*lines)


def _figures(reading: Reading) -> Table:
    state, stats, memory = reading.state, reading.state["stats"], reading.state["memory"]
    rates = [_rate(reading.rate(counter)) or "-" for counter in ("output_tokens", "prompt_tokens")]
    planned = f"{_bytes(memory['total'])} planned"
    if memory["budget"] is not None:
        planned += f" of {_bytes(memory['budget'])}"
    what = "process" if memory["device"] == "cpu" else "tensors"
    used = "" if memory["used"] is None else f" · {what} {_bytes(memory['used'])}"
    pages, total = state["pages_used"], state["pages_total"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_row("tokens/s", Text.assemble((rates[0], "bold"), " decode · ", (rates[1], "bold"), " prefill"))
    grid.add_row("requests", f"{stats['running']} running · {stats['waiting']} waiting")
    grid.add_row("pages", f"{pages:,} of {total:,} ({pages / total:.0%})")
    grid.add_row("memory", planned + used)
    largest = sorted(memory["planned"].items(), key=lambda part: -part[1])[:4]
    grid.add_row("", Text(" · ".join(f"{name} {_bytes(size)}" for name, size in largest), style="dim"))
    return grid


def _slots(reading: Reading) -> Table:
    context = reading.state["max_context"]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("slot", justify="right")
    table.add_column("state", width=9)
    table.add_column(f"of {context:,} tokens", ratio=1)
    for name in ("tokens", "generated", "tok/s"):
        table.add_column(name, justify="right", min_width=9)
    for slot in reading.state["slots"]:
        name = slot["state"] or slot["use"]
        style = _STYLES.get(name, "")
        busy = slot["request_id"] is not None
        limit = f" / {slot['max_tokens']:,}" if busy and slot["max_tokens"] is not None else ""
        table.add_row(
            str(slot["id"]),
            Text(name, style=style),
            ProgressBar(total=context, completed=slot["tokens"], complete_style=style or "white", finished_style=style),
            f"{slot['tokens']:,}",
            f"{slot['output_tokens']:,}{limit}" if busy else "",
            _rate(reading.slot_rate(slot)),
        )
    return table


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.1f}"


def _bytes(nbytes: int) -> str:
    """As `memory_plan.gib`, whose module would load torch."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
