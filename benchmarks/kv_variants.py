"""Ways to store V in 4 bits: bytes, error on Gaussian values, loss on a real model, and time of encode and decode.

    python benchmarks/kv_variants.py [MODEL] --text FILE [--text FILE ...] [--variants NAME,...] [--window 1024]
                                     [--tokens 8192] [--kernels NAME] [--threads N] [--json]

K is stored as in the package's own 4-bit format (8 bits, rotated, without the model's K bias) in every row, so rows differ
by V alone; `v16` keeps V whole and shows what K costs by itself. Without --text only bytes, error and time are measured.
Times are those of the PyTorch definitions, in nanoseconds a value: they rank the work, a kernel does it faster.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pocketllm.cache.formats import KV_FORMATS, KVFormat, grouped_v4
from pocketllm.cache.formats.cubic_levels import levels
from pocketllm.cache.formats.int8_per_token_head import encode_int8
from pocketllm.cache.formats.rotation import rotate, rotate_back
from pocketllm.cache.formats.turboquant_k8v4 import encode_v4
from pocketllm.kernels.types import PlaneSpec
from pocketllm.kv_eval import KVEval
from pocketllm.options import EngineOptions

CURRENT = "turboquant_k8v4"


def cubic(c: float) -> Tensor:
    x = torch.arange(16, dtype=torch.float32) - 7.5
    return x + c * x**3


def lloyd_max() -> Tensor:
    """The 16 levels with the least mean squared error for a standard normal variable, found by Lloyd's iteration."""

    def pdf(x: Tensor) -> Tensor:
        return torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def cdf(x: Tensor) -> Tensor:
        return (1 + torch.erf(x / math.sqrt(2))) / 2

    table = torch.linspace(-2.7, 2.7, 16, dtype=torch.float64)
    for _ in range(3000):
        middle = (table[1:] + table[:-1]) / 2
        edges = torch.cat((torch.tensor([-20.0]), middle, torch.tensor([20.0]))).double()
        table = (pdf(edges[:-1]) - pdf(edges[1:])) / (cdf(edges[1:]) - cdf(edges[:-1]))
    return table.float()


@dataclass(frozen=True)
class Scale:
    """How a scale is stored: bytes, and the value that comes back."""

    name: str
    dtype: torch.dtype

    def store(self, scale: Tensor) -> Tensor:
        return scale.to(self.dtype)

    def load(self, stored: Tensor) -> Tensor:
        return stored.float()


class PowerOfTwo(Scale):
    """One byte: the exponent (e8m0 of the OCP MX formats)."""

    def store(self, scale: Tensor) -> Tensor:
        return (scale.log2().round() + 127).clamp(0, 254).to(torch.uint8)

    def load(self, stored: Tensor) -> Tensor:
        return torch.exp2(stored.float() - 127)


class TopOfHalf(Scale):
    """One byte: exponent and 3 bits of mantissa, the upper half of an fp16 without its sign, rounded to nearest."""

    def store(self, scale: Tensor) -> Tensor:
        bits = scale.half().view(torch.int16).int()
        return ((bits + 64) >> 7).clamp(0, 255).to(torch.uint8)

    def load(self, stored: Tensor) -> Tensor:
        return (stored.int() << 7).to(torch.int16).view(torch.float16).float()


F32, F16 = Scale("fp32", torch.float32), Scale("fp16", torch.float16)
E8M0, E5M3 = PowerOfTwo("e8m0", torch.uint8), TopOfHalf("e5m3", torch.uint8)


class Variant(KVFormat):
    """K8 and V in 4 bits: groups of `group` values (0: the head), each with a scale and, if `affine`, a minimum.

    Symmetric: nearest of `table` times the scale. From each of `starts` the scale is refitted by least squares `fits`
    times, and the one that ends with the smallest error is kept: for codes with levels l that is the one with the largest
    (x . l)^2 / |l|^2, so comparing costs no pass of its own. Affine: 16 even steps from minimum to maximum.
    """

    tolerance = 1.0

    def __init__(
        self,
        name: str,
        table: Tensor,
        *,
        group: int = 0,
        scale: Scale = F32,
        fits: int = 2,
        affine: bool = False,
        rotated: bool = True,
        starts: tuple[float, ...] = (1.0,),
    ) -> None:
        """starts of the search for the scale: f > 0 from f times the RMS, f < 0 from -f times the largest magnitude."""
        self.name, self._table, self._group, self._scale = name, table, group, scale
        self._fits, self._affine, self._rotated, self._starts = fits, affine, rotated, starts
        x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
        grid = table.square().mean().sqrt() * torch.linspace(0.5, 1.5, 41)  # for the RMS that fits the table best
        self._rms = float(min(grid, key=lambda rms: float((self._nearest(x * rms) / rms - x).square().mean())))

    def planes(self, head_dim: int) -> tuple[PlaneSpec, ...]:
        groups = head_dim // (self._group or head_dim)
        return (
            PlaneSpec("k", head_dim, torch.int8),
            PlaneSpec("v", head_dim // 2, torch.uint8),
            PlaneSpec("k_scale", 1, torch.float32),
            PlaneSpec("v_scale", groups, self._scale.dtype),
            *((PlaneSpec("v_low", groups, self._scale.dtype),) if self._affine else ()),
        )

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        k_codes, k_scale = encode_int8(rotate(k))
        x = rotate(v) if self._rotated else v.float()
        x = x.unflatten(-1, (-1, self._group or x.shape[-1]))  # [..., groups, group]
        codes, *numbers = self._affine_codes(x) if self._affine else self._symmetric_codes(x)
        low, high = codes.flatten(-2).to(torch.uint8).chunk(2, dim=-1)
        return k_codes, low | high << 4, k_scale, *(n.squeeze(-1) for n in numbers)

    def decode(self, planes: Sequence[Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        k, packed, k_scale, *numbers = planes
        codes = torch.cat((packed & 15, packed >> 4), dim=-1).long().unflatten(-1, (-1, self._group or head_dim))
        scale, *low = (self._scale.load(n).unsqueeze(-1) for n in numbers)
        v = codes * scale + low[0] if self._affine else self._table[codes] * scale
        v = v.flatten(-2)
        return rotate_back(k.float() * k_scale), rotate_back(v) if self._rotated else v

    def _affine_codes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, high = x.aminmax(dim=-1, keepdim=True)
        step, low = self._scale.store(((high - low) / 15).clamp_min(1e-12)), self._scale.store(low)
        codes = ((x - self._scale.load(low)) / self._scale.load(step).clamp_min(1e-12)).round().clamp(0, 15)
        return codes, step, low

    def _symmetric_codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rms, largest = x.square().mean(-1, keepdim=True).sqrt(), x.abs().amax(-1, keepdim=True)
        best, most = torch.ones_like(rms), torch.full_like(rms, -1.0)
        for start in self._starts:
            scale = start * rms / self._rms if start > 0 else -start * largest / self._table[-1]
            explained = torch.zeros_like(rms)  # of |x|^2, by the codes of this scale and the best scale for them
            for _ in range(self._fits):
                level = self._nearest(x / scale.clamp_min(1e-7))
                product, square = (x * level).sum(-1, keepdim=True), level.square().sum(-1, keepdim=True)
                scale, explained = product / square, product.square() / square
            best, most = torch.where(explained > most, scale, best), torch.maximum(explained, most)
        stored = self._scale.store(best.clamp_min(1e-7))
        return self._codes(x / self._scale.load(stored).clamp_min(1e-7)), stored

    def _codes(self, x: Tensor) -> Tensor:
        return torch.bucketize(x, (self._table[1:] + self._table[:-1]) / 2)

    def _nearest(self, x: Tensor) -> Tensor:
        return self._table[self._codes(x)]


class V16(Variant):
    """V as fp16: what is left is K's loss."""

    def planes(self, head_dim: int) -> tuple[PlaneSpec, ...]:
        k, _, k_scale, *_ = super().planes(head_dim)
        return k, PlaneSpec("v", head_dim, torch.float16), k_scale

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        codes, scale = encode_int8(rotate(k))
        return codes, v.half(), scale

    def decode(self, planes: Sequence[Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        k, v, scale = planes
        return rotate_back(k.float() * scale), v.float()


class OneScale(Variant):
    """K8V4 as it is in heads of more than 64, in all: one scale a row, the unbiased one."""

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        codes, scale = encode_int8(rotate(k))
        packed, v_scale = encode_v4(rotate(v))
        return codes, packed, scale, v_scale


def variants() -> dict[str, KVFormat]:
    even, lloyd = cubic(0.0), lloyd_max()
    near = tuple(-start for start in grouped_v4.STARTS)
    two, search = (1.0, -0.95), (0.75, 0.85, 1.0, 1.15, -0.85, -1.0)
    found: list[KVFormat] = [
        V16("v16", even),
        KV_FORMATS[CURRENT],
        OneScale("one scale", levels()),
        Variant("cubic .0035", cubic(0.0035)),
        Variant("cubic .0055", cubic(0.0055)),
        Variant("cubic .0075", cubic(0.0075)),
        Variant("cubic .0075, 8 fits", cubic(0.0075), fits=8),
        Variant("cubic .0055, 2 starts, 1 fit", cubic(0.0055), starts=two, fits=1),
        Variant("cubic .0075, 2 starts, 1 fit", cubic(0.0075), starts=two, fits=1),
        Variant("cubic .0075, 2 starts", cubic(0.0075), starts=two),
        Variant("cubic .0075, search", cubic(0.0075), starts=search, fits=3),
        Variant("lloyd-max", lloyd),
        Variant("lloyd-max, 8 fits", lloyd, fits=8),
        Variant("lloyd-max, 2 starts, 1 fit", lloyd, starts=two, fits=1),
        Variant("lloyd-max, search", lloyd, fits=3, starts=search),
        Variant("even, largest", even, fits=1, starts=(-1.0,)),
        Variant("even, search", even, fits=3, starts=search),
        Variant("min-max fp16", even, affine=True, scale=F16),
        Variant("min-max fp16, not rotated", even, affine=True, scale=F16, rotated=False),
        Variant("g32 min-max fp16", even, group=32, affine=True, scale=F16),
        Variant("g32 even fp16", even, group=32, scale=F16, starts=two, fits=1),
        Variant("g32 even e8m0", even, group=32, scale=E8M0, starts=two, fits=1),
        Variant("g32 even e5m3", even, group=32, scale=E5M3, starts=two, fits=1),
        Variant("g32 cubic .0035 e5m3", cubic(0.0035), group=32, scale=E5M3, starts=two, fits=1),
        Variant("g16 even e5m3, largest", even, group=16, scale=E5M3, starts=(-1.0,), fits=1),
        Variant("g16 even e5m3", even, group=16, scale=E5M3, starts=two, fits=1),
        Variant("g16 even e5m3, not rotated", even, group=16, scale=E5M3, starts=two, fits=1, rotated=False),
        Variant("g16 cubic .0075 e5m3", levels(), group=16, scale=E5M3, starts=near, fits=1),
        Variant("g16 cubic .0075 fp32", levels(), group=16, starts=near, fits=1),
        Variant("g16 min-max fp16", even, group=16, affine=True, scale=F16),
    ]
    return {fmt.name: fmt for fmt in found}


def error_and_time(fmt: KVFormat, head_dim: int) -> dict[str, float]:
    """V's signal-to-noise ratio in dB on Gaussian values, and nanoseconds a value of encode and decode (K included)."""
    x = torch.randn(2048, 2, head_dim, generator=torch.Generator().manual_seed(1))
    planes = fmt.encode(x, x)
    times = {"encode": math.inf, "decode": math.inf}
    for _ in range(3):
        start = time.perf_counter()
        planes = fmt.encode(x, x)
        middle = time.perf_counter()
        _, v = fmt.decode(planes, head_dim)
        times["encode"] = min(times["encode"], middle - start)
        times["decode"] = min(times["decode"], time.perf_counter() - middle)
    noise = (v - x).square().mean() / x.square().mean()
    return {
        "sqnr_db": round(-10 * math.log10(float(noise)), 2),
        **{f"{name}_ns": round(seconds / x.numel() / 2 * 1e9, 2) for name, seconds in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--text", action="append", type=Path, default=[])
    parser.add_argument("--variants", type=lambda text: text.split(";"), help="names, separated by semicolons")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true", help="one line at the end")
    options = parser.parse_args()
    known = variants()
    chosen = {name: known[name] for name in options.variants or known}
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {name: {"variant": name} for name in chosen}
    for name, fmt in chosen.items():
        sizes = {f"bytes_{d}": fmt.bytes_per_token(d) for d in (64, 128, 256)}
        rows[name] |= sizes | error_and_time(fmt, 64)
    facts: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if options.text:
        settings = EngineOptions(kernels=options.kernels, threads=options.threads, quantization="none")
        run = KVEval(options.model, settings, list(chosen.values()), window=options.window, prompts=1)
        texts = [run.read(path.name, path.read_text(encoding="utf-8")) for path in options.text]
        facts |= run.facts() | {"texts": [text.name for text in texts]}
        losses = run.losses(
            texts, options.window, options.tokens, lambda news: print(news, file=sys.stderr, flush=True)
        )
        for loss in losses[1:]:
            rows[loss.kv] |= {key: value for key, value in asdict(loss).items() if key != "kv"}
    head = f"{'V':>30} {'B d=64':>7} {'d=256':>6} {'dB':>6} {'enc ns':>7} {'dec ns':>7}"
    print(head + f" {'ppl':>8} {'+-':>7} {'KL':>9} {'top-1':>7}" * bool(options.text))
    for row in rows.values():
        line = f"{row['variant']:>30} {row['bytes_64']:7} {row['bytes_256']:6} {row['sqnr_db']:6.2f}"
        line += f" {row['encode_ns']:7.2f} {row['decode_ns']:7.2f}"
        if "change" in row:
            line += f" {row['change']:+8.3%} {row['change_error']:7.3%} {row['kl_mean']:9.2e} {row['top1']:7.2%}"
        print(line)
    if options.json:
        print(json.dumps({**facts, "variants": list(rows.values())}))


if __name__ == "__main__":
    main()
