"""Draws decode speed against slots, PocketLLM beside its peers, as one SVG for the README.

    python benchmarks/peers.py FILE.gguf ... --json > peers.json
    python benchmarks/plot.py peers.json docs/images/decode-cpu.svg [--title TEXT]

Takes the line of `peers.py` (a panel for each file, a line for each engine), or of `decode.py` (a panel for each context,
a line for each KV type). The picture has no background, and colours that read well on a white page and on a dark one.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

COLOURS = ("#e8590c", "#3b82f6", "#8b949e", "#2f9e77", "#a855f7")
TEXT, FAINT = "#7a8490", "#7a84903d"  # FAINT: TEXT, mostly transparent, for lines behind the data
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
PANEL_WIDTH, PANEL_HEIGHT, GAP = 250, 190, 50
LEFT, TOP, BOTTOM, RIGHT = 46, 86, 44, 16
NAMES = {"pocketllm": "PocketLLM"}


@dataclass
class Panel:
    title: str
    lines: dict[str, dict[int, float]] = field(default_factory=dict)  # name -> slots -> tok/s

    def add(self, line: str, slots: int, tok_s: float) -> None:
        self.lines.setdefault(NAMES.get(line, line), {})[slots] = tok_s


def panels_of(report: dict[str, Any]) -> list[Panel]:
    panels: dict[str, Panel] = {}
    if report["benchmark"] == "peers":
        for entry in report["files"]:
            panel = panels.setdefault(f"{entry['weights']} weights", Panel(f"{entry['weights']} weights"))
            for row in entry["rows"]:
                if row["measure"] == "decode":
                    for name, tok_s in row["tok_s"].items():
                        panel.add(name, row["slots"], tok_s)
    elif report["benchmark"] == "decode":
        for row in report["rows"]:
            title = f"{row['context']} tokens of context"
            panels.setdefault(title, Panel(title)).add(f"{row['kv']} KV", row["slots"], row["tok_s"])
    else:
        raise SystemExit(f"the report is of {report['benchmark']!r}: give one of peers.py or of decode.py")
    return list(panels.values())


def round_step(top: float, most: int = 5) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... that reaches `top` in at most `most` steps."""
    power = 1.0
    while True:
        for factor in (1, 2, 5):
            if factor * power * most >= top:
                return factor * power
        power *= 10


def text(x: float, y: float, content: str, **attributes: object) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(content)}</text>'


def panel_svg(panel: Panel, x0: float, top: float, step: float, colours: dict[str, str]) -> list[str]:
    """One panel whose axis goes from 0 to `top`, its left edge at x0. Slots stand at equal distances."""
    counts = sorted({n for line in panel.lines.values() for n in line})
    inset = 22
    gap = (PANEL_WIDTH - 2 * inset) / max(1, len(counts) - 1)
    xs = {n: x0 + inset + i * gap for i, n in enumerate(counts)}

    def y(value: float) -> float:
        return TOP + PANEL_HEIGHT * (1 - value / top)

    parts = [text(x0 + PANEL_WIDTH / 2, TOP - 12, panel.title, text_anchor="middle", font_weight=600)]
    value = 0.0
    while value <= top:
        parts.append(f'<path d="M{x0} {y(value):.1f}h{PANEL_WIDTH}" stroke="{FAINT}"/>')
        parts.append(text(x0 - 7, y(value) + 4, f"{value:g}", text_anchor="end", font_size=11))
        value += step
    for n, x in xs.items():
        parts.append(text(x, TOP + PANEL_HEIGHT + 18, str(n), text_anchor="middle", font_size=11))
    parts.append(text(x0 + PANEL_WIDTH / 2, TOP + PANEL_HEIGHT + 36, "slots", text_anchor="middle", font_size=11))
    for name, line in panel.lines.items():
        points = [(xs[n], y(line[n])) for n in sorted(line)]
        path = "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
        parts.append(
            f'<path d="M{path}" fill="none" stroke="{colours[name]}" stroke-width="2.5" stroke-linejoin="round"/>'
        )
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{colours[name]}"/>' for px, py in points]
        last = max(line)
        others = [values[last] for other, values in panel.lines.items() if other != name and last in values]
        above = all(line[last] >= value for value in others)
        parts.append(
            text(xs[last], y(line[last]) + (-9 if above else 17), f"{line[last]:.0f}", text_anchor="middle",
                 font_size=12, font_weight=600, fill=colours[name])
        )  # fmt: skip
    return parts


def draw(panels: list[Panel], title: str) -> str:
    """The SVG; all panels share one scale, so that they can be compared."""
    highest = max(value for panel in panels for line in panel.lines.values() for value in line.values())
    step = round_step(highest * 1.06)
    top = step * -(-highest * 1.06 // step)
    line_names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(line_names)}
    width = LEFT + len(panels) * PANEL_WIDTH + (len(panels) - 1) * GAP + RIGHT
    height = TOP + PANEL_HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="{FONT}" font-size="13" fill="{TEXT}">',
        f"<title>{escape(title)}</title>",
        text(LEFT - 30, 22, title, font_size=15, font_weight=600),
    ]
    x = LEFT - 30.0
    for name in line_names:
        parts.append(f'<circle cx="{x + 5:.1f}" cy="42" r="4.5" fill="{colours[name]}"/>')
        parts.append(text(x + 15, 46.5, name))
        x += 34 + 7.2 * len(name)
    for i, panel in enumerate(panels):
        parts += panel_svg(panel, LEFT + i * (PANEL_WIDTH + GAP), top, step, colours)
    return "\n".join([*parts, "</svg>", ""])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="a file with the JSON line of peers.py or decode.py")
    parser.add_argument("svg", type=Path, help="where the picture goes")
    parser.add_argument("--title", default="Tokens per second, all slots together")
    args = parser.parse_args(argv)
    panels = panels_of(json.loads(args.report.read_text()))
    args.svg.parent.mkdir(parents=True, exist_ok=True)
    args.svg.write_text(draw(panels, args.title))


if __name__ == "__main__":
    main()
