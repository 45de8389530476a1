"""The plot of `pocketllm kv-eval`: mean KL divergence against bytes per token, as SVG text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 64, 56
COLORS = ("#2a6fbb", "#c2571a", "#3d8b57", "#8a5aa8")  # one a window size
FLOOR = 1e-8  # KL below this is drawn here: it is rounding
LINE = 15  # height of a line of labels


def draw(values: Mapping[str, Any]) -> str:
    """SVG of the rows of `kv-eval --json`; the baseline, whose divergence is zero, is left out."""
    rows = [row for row in values["rows"] if row["kv"] != values["baseline"]]
    windows = list(dict.fromkeys(row["window"] for row in rows))
    x = _Axis([row["bytes_per_token"] / 1024 for row in rows], LEFT, WIDTH - RIGHT, math.log2)
    y = _Axis([max(row["kl_mean"], FLOOR) for row in rows], HEIGHT - BOTTOM, TOP, math.log10)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" '
        'font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(LEFT, 22, f"{values['model']}: what a smaller KV cache costs", size=15, weight=600),
    ]
    for i, window in enumerate(windows):
        parts.append(f'<circle cx="{LEFT + 6 + 160 * i}" cy="41" r="5" fill="{COLORS[i % len(COLORS)]}"/>')
        parts.append(_text(LEFT + 17 + 160 * i, 45, f"windows of {window:,} tokens"))
    for power in range(math.floor(y.low), math.ceil(y.high) + 1):
        at = y.at_power(power)
        if TOP <= at <= HEIGHT - BOTTOM:
            parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
            parts.append(_text(LEFT - 8, at + 4, f"{10.0**power:.0e}", anchor="end"))
    for size in sorted({row["bytes_per_token"] for row in rows}):
        at = x.at(size / 1024)
        parts.append(f'<path d="M{at:.1f} {HEIGHT - BOTTOM}v5" stroke="#999"/>')
    parts.append(f'<path d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}" stroke="#999"/>')
    parts += _size_labels(sorted({row["bytes_per_token"] for row in rows}), x)
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "KiB per token, all layers", anchor="middle"))
    parts.append(
        f'<text transform="translate(18 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">mean KL divergence, nats</text>'
    )
    taken: list[tuple[float, float]] = []
    for row in rows:
        color = COLORS[windows.index(row["window"]) % len(COLORS)]
        point = x.at(row["bytes_per_token"] / 1024), y.at(max(row["kl_mean"], FLOOR))
        parts.append(f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="5" fill="{color}"/>')
        if row["window"] == windows[0]:
            parts.append(_label(row["kv"], point, taken))
    return "\n".join([*parts, "</svg>", ""])


class _Axis:
    """A logarithmic axis that shows all `values`, with a margin of a tenth on both sides."""

    def __init__(self, values: Sequence[float], start: float, end: float, log: Callable[[float], float]) -> None:
        low, high = log(min(values)), log(max(values))
        margin = 0.1 * (high - low) or 1.0
        self.low, self.high = low - margin, high + margin
        self._start, self._end, self._log = start, end, log

    def at(self, value: float) -> float:
        return self.at_power(self._log(value))

    def at_power(self, power: float) -> float:
        return self._start + (power - self.low) / (self.high - self.low) * (self._end - self._start)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )


def _label(name: str, at: tuple[float, float], taken: list[tuple[float, float]]) -> str:
    """The point's name beside it, on the side where there is room, moved up until it touches no earlier label."""
    width = 7.0 * len(name)
    anchor, start = ("start", at[0] + 9) if at[0] + 9 + width < WIDTH - RIGHT else ("end", at[0] - 9 - width)
    y = at[1] - 5
    while any(abs(y - other) < LINE and abs(start - left) < width for left, other in taken):
        y -= LINE
    taken.append((start, y))
    return _text(start if anchor == "start" else at[0] - 9, y, name, anchor=anchor)


def _size_labels(sizes: Sequence[int], x: _Axis) -> list[str]:
    """Sizes under the axis; one that would touch its left neighbour is left out."""
    labels, end = [], -math.inf
    for size in sizes:
        text, at = f"{size / 1024:.3g}", x.at(size / 1024)
        if at - 3.5 * len(text) > end:
            labels.append(_text(at, HEIGHT - BOTTOM + 20, text, anchor="middle"))
            end = at + 3.5 * len(text) + 6
    return labels
