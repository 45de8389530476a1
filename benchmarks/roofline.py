"""Draws the rows of a GPU report on the card's roofline: operations a second against operations per byte, both logarithmic.

    python benchmarks/roofline.py benchmarks/results/h200-27b-fp8.json docs/images/roofline-h200.svg

A decode step reads every weight, K, V and state once, and multiplies with each weight once a slot: so it stands left of the
ridge, under the line of the memory's rate (the copy bandwidth of the report). Its operations are those of matrix products
and of attention. Prefill reads the weights once a chunk, and stands far right, under the rate of the tensor cores
(--tflops: what the card's library reaches, `benchmarks/gpu_linear.py`).
"""

from __future__ import annotations

import argparse
import json
import math
from html import escape
from pathlib import Path
from typing import Any

from plot import COLOURS, FAINT, FONT, TEXT, text
from pocketllm.models.config import ModelConfig
from pocketllm.models.registry import read_model

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 56, 48
X_RANGE, Y_RANGE = (1.0, 5e4), (1e12, 4e15)  # operations per byte; operations a second
CHUNK = 8192  # tokens of a prefill pass


def multiplied(config: ModelConfig) -> int:
    """Elements of all the weights that a token is multiplied with."""
    hidden, gdn = config.hidden_size, config.gated_delta
    attention = config.num_heads * config.head_dim
    q = attention * (2 if config.attn_output_gate else 1)
    mixers = len(config.attention_layers) * hidden * (q + 2 * config.num_kv_heads * config.head_dim + attention)
    if gdn is not None:
        mixers += len(config.state_layers) * hidden * (gdn.conv_dim + 2 * gdn.value_dim + 2 * gdn.num_value_heads)
    return mixers + config.num_layers * 3 * hidden * config.intermediate_size + hidden * config.vocab_size


def attended(config: ModelConfig, context: float) -> float:
    """Operations of attention of one token over `context` others, all layers."""
    return 4.0 * len(config.attention_layers) * config.num_heads * config.head_dim * context


def points_of(report: dict[str, Any], config: ModelConfig) -> list[tuple[str, str, float, float]]:
    """(name, kind, operations per byte, operations a second)."""
    weights, points = multiplied(config), []
    for row in report["rows"]:
        if row.get("before"):  # kept for comparison, from an older version
            continue
        operations = row["slots"] * (2 * weights + attended(config, row["context"]))
        seconds = row["step_ms"] * 1e-3
        kv = {"int8_per_token_head": "int8", "turboquant_k8v4": "K8V4"}.get(row["kv"], row["kv"])
        name = f"{row['slots']} x {row['context']:,} {kv}"
        points.append((name, "decode", operations / row["bytes_per_step"], operations / seconds))
    one = next(row for row in report["rows"] if row["slots"] == 1)
    for fact, value in report.items():
        if fact.startswith("prefill ") and isinstance(value, dict) and "tok_s" in value:
            length = int(fact.split()[-1])
            a_token = 2 * weights + attended(config, length / 2)
            points.append((fact, "prefill", a_token * CHUNK / one["bytes_per_step"], a_token * value["tok_s"]))
    return points


def draw(points: list[tuple[str, str, float, float]], bandwidth: float, peak: float, title: str) -> str:
    def x(value: float) -> float:
        low, high = map(math.log10, X_RANGE)
        return LEFT + (math.log10(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        low, high = map(math.log10, Y_RANGE)
        return HEIGHT - BOTTOM - (math.log10(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="{FONT}" font-size="12" fill="{TEXT}">',
        f"<title>{escape(title)}</title>",
        text(LEFT - 40, 22, title, font_size=15, font_weight=600),
    ]
    for power in range(5):
        parts.append(f'<path d="M{x(10**power):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{FAINT}"/>')
        parts.append(text(x(10**power), HEIGHT - BOTTOM + 17, f"{10**power:,}", text_anchor="middle"))
    for power in (12, 13, 14, 15):
        parts.append(f'<path d="M{LEFT} {y(10.0**power):.1f}H{WIDTH - RIGHT}" stroke="{FAINT}"/>')
        parts.append(text(LEFT - 8, y(10.0**power) + 4, f"{10 ** (power - 12):,}", text_anchor="end"))
    parts.append(text((LEFT + WIDTH) / 2, HEIGHT - 10, "operations per byte", text_anchor="middle"))
    parts.append(text(LEFT - 40, TOP - 12, "TFLOP/s"))
    ridge = peak / bandwidth
    parts.append(
        f'<path d="M{x(X_RANGE[0]):.1f} {y(bandwidth * X_RANGE[0]):.1f}L{x(ridge):.1f} {y(peak):.1f}H{WIDTH - RIGHT}" '
        f'fill="none" stroke="{TEXT}" stroke-width="1.5"/>'
    )
    parts.append(text(x(ridge) + 6, y(peak) - 7, f"{bandwidth / 1e12:.2f} TB/s, {peak / 1e12:,.0f} TFLOP/s"))
    for kind, colour, column, first in (
        ("decode", COLOURS[0], x(110), y(9e13)),
        ("prefill", COLOURS[1], x(2000), y(3e14)),
    ):
        shown = sorted((p for p in points if p[1] == kind), key=lambda point: (-point[2], -point[3]))
        for i, (name, _, intensity, rate) in enumerate(shown):
            px, py, at = x(intensity), y(rate), first + 14 * i
            roof = min(peak, bandwidth * intensity)
            parts.append(
                f'<path d="M{px:.1f} {py:.1f}L{column - 4:.1f} {at - 4:.1f}" stroke="{colour}" opacity="0.35"/>'
            )
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{colour}"/>')
            parts.append(text(column, at, f"{name}: {rate / roof:.0%}", font_size=11, fill=colour))
    return "\n".join([*parts, "</svg>", ""])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="a report of gpu_step.py")
    parser.add_argument("svg", type=Path, help="where the picture goes")
    parser.add_argument("--tflops", type=float, default=1200, help="rate of the tensor cores in FP8")
    args = parser.parse_args(argv)
    report = json.loads(args.report.read_text())
    points = points_of(report, read_model(report["model"], "dummy").config)
    title = f"{report['model']} on {report['device']}: share of the roofline"
    args.svg.parent.mkdir(parents=True, exist_ok=True)
    args.svg.write_text(draw(points, report["bandwidth"], args.tflops * 1e12, title))


if __name__ == "__main__":
    main()
