"""A long prefill pass piece by piece on one GPU, at the shapes of Qwen3.5-27B: what rounds activations to e4m3, and the
library's products.

    python benchmarks/gpu_prefill_pieces.py [--rows N] [--no-variants]

Rounding where a result is made (one kernel, `readers` given) is first checked against float32, then timed against making the
result in 16 bits and rounding it in a second kernel, with other sizes of programs besides. `floor` is the time in which a
device-to-device copy would move the bytes of the one kernel.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_attention import copy_bandwidth
from gpu_linear import DEVICE, SHAPES, error, inputs, random_weight
from pocketllm.kernels import reference
from pocketllm.kernels import triton as kernels
from pocketllm.kernels.triton import quantize as quantizing
from pocketllm.kernels.triton import summands
from pocketllm.kernels.triton.linear_fp8 import library_product
from pocketllm.kernels.triton.quantize import quantize
from pocketllm.kernels.triton.tune import time_graph
from pocketllm.kernels.types import Activations, LinearWeight, Quantized
from pocketllm.parallel import Summands
from pocketllm.weights.formats import FORMATS

HIDDEN, INNER, HEADS, HEAD_DIM, EPS = 5120, 17408, 24, 256, 1e-6
COPIES = 3  # of inputs that a timed graph walks through, so that none is left in the L2
SIZES = ((8, 4, 4), (8, 4, 8), (8, 2, 4), (16, 4, 8), (4, 4, 4))  # rows, groups, warps
NORM_WARPS = (4, 8, 16)


@dataclass(frozen=True)
class Piece:
    """make(inputs, readers) -> the activations; exact(inputs) -> the same in float32."""

    name: str
    inputs: Callable[[int], tuple[Tensor, ...]]
    make: Callable[..., Activations]
    exact: Callable[..., Tensor]
    nbytes: float  # for each row, that one kernel reads and writes
    readers: tuple[LinearWeight, ...]
    setting: tuple[Any, str, tuple[Any, ...]]  # module, name and values of what to vary


def reader(fmt: str, k: int) -> LinearWeight:
    """A weight of which only the format and the width matter."""
    planes = tuple(torch.empty(s.shape, dtype=s.dtype, device=DEVICE) for s in FORMATS[fmt].specs(128, k))
    return LinearWeight(FORMATS[fmt], (128, k), planes)


def attention_gate(rows: int) -> tuple[Tensor, Tensor]:
    """x [T, H D], and the gate's part [T, H, D] of q | gate."""
    return inputs(rows, HEADS * HEAD_DIM), inputs(rows, 2 * HEADS * HEAD_DIM).view(rows, HEADS, -1)[:, :, HEAD_DIM:]


def pieces() -> list[Piece]:
    gain = torch.rand(HIDDEN, device=DEVICE) + 0.5
    fp8 = 1 + 4 / 128  # bytes of a number with its share of a scale
    plain_sizes, pair_sizes = (quantizing, "SIZES", SIZES), (quantizing, "COMBINED_SIZES", SIZES)

    def norm(x: Tensor, residual: Tensor, readers: tuple[LinearWeight, ...] = ()) -> Activations:
        return kernels.add_rms_norm(Summands.of(x), residual, gain, EPS, readers)

    def exact_norm(x: Tensor, residual: Tensor) -> Tensor:
        return reference.rms_norm((x.float() + residual.float()).bfloat16().float(), gain, EPS)

    def norms(name: str, formats: tuple[str, ...], nbytes: float) -> Piece:
        return Piece(
            name, lambda rows: (inputs(rows, HIDDEN), inputs(rows, HIDDEN)), norm, exact_norm, HIDDEN * nbytes,
            tuple(reader(fmt, HIDDEN) for fmt in formats), (summands, "_LONG_WARPS", NORM_WARPS),
        )  # fmt: skip

    def plain(k: int) -> Piece:
        def make(x: Tensor, readers: object = ()) -> Activations:
            return quantize(x) if readers else x

        return Piece(f"quantize {k}", lambda rows: (inputs(rows, k),), make, lambda x: x.float(), k * (2 + fp8),
                     (reader("fp8_block", k),), plain_sizes)  # fmt: skip

    return [
        Piece("silu(gate) * up", lambda rows: (inputs(rows, 2 * INNER),), kernels.silu_mul,
              lambda x: reference.silu_mul(x.float()), INNER * (4 + fp8), (reader("fp8_block", INNER),), pair_sizes),
        norms("norm", ("fp8_block",), 6 + fp8),
        norms("norm, also in 16 bits", ("fp8_block", "bf16"), 8 + fp8),
        Piece("x * sigmoid(gate)", attention_gate, kernels.sigmoid_mul,
              lambda x, gate: reference.sigmoid_mul(x.float(), gate.float()), HEADS * HEAD_DIM * (4 + fp8),
              (reader("fp8_block", HEADS * HEAD_DIM),), pair_sizes),
        *(plain(k) for k in (5120, 6144, 17408)),
    ]  # fmt: skip


def decoded(x: Activations) -> Tensor:
    assert isinstance(x, Quantized)
    return (x.codes.float() * x.scales.T.repeat_interleave(128, dim=1))[: len(x)]


def two_steps(piece: Piece, *tensors: Tensor) -> Quantized:
    x = piece.make(*tensors)
    assert isinstance(x, Tensor)
    return quantize(x)


def one_step(piece: Piece, *tensors: Tensor) -> Activations:
    return piece.make(*tensors, readers=piece.readers)


def check(piece: Piece, rows: int) -> tuple[float, float]:
    """Errors of the two ways against float32. AssertionError if the new is the worse, or a row depends on the others."""
    made = piece.inputs(rows)
    wanted = piece.exact(*made)
    old, new = (way(piece, *(t.clone() for t in made)) for way in (two_steps, one_step))
    off = error(decoded(old), wanted), error(decoded(new), wanted)
    assert off[1] < max(off[0] * 1.01, 0.01), f"{piece.name}: error {off[1]:.1e} in one step, {off[0]:.1e} in two"
    part = one_step(piece, *(t[rows - 66 :].clone() for t in made))
    assert isinstance(new, Quantized)
    assert isinstance(part, Quantized)
    assert torch.equal(part.codes[:66].view(torch.uint8), new.codes[rows - 66 : rows].view(torch.uint8)), piece.name
    assert torch.equal(part.scales[:, :66], new.scales[:, rows - 66 : rows]), piece.name
    return off


def time_piece(piece: Piece, rows: int, bandwidth: float, variants: bool) -> None:
    old_error, new_error = check(piece, 264)
    made = [piece.inputs(rows) for _ in range(COPIES)]

    def us(way: Callable[..., object]) -> float:
        return time_graph([partial(way, piece, *tensors) for tensors in made], 5)

    floor = piece.nbytes * rows / bandwidth * 1e6
    found = {"two steps": us(two_steps), "one": us(one_step)}
    module, name, values = piece.setting
    chosen = getattr(module, name)
    for value in values if variants else ():
        setattr(module, name, value)
        found[str(value)] = us(one_step)
    setattr(module, name, chosen)
    times = "  ".join(f"{label} {value:.1f}" for label, value in found.items())
    print(f"{piece.name:22} floor {floor:.1f} us  {times}  (errors {old_error:.4f} {new_error:.4f})", flush=True)


def time_product(name: str, n: int, k: int, rows: int) -> None:
    weights, x = [random_weight("fp8_block", n, k) for _ in range(COPIES)], quantize(inputs(rows, k))
    us = time_graph([partial(library_product, x, weight) for weight in weights], 5)
    print(f"{name:22} N {n:5} K {k:5}  {us:7.1f} us  {2.0 * rows * n * k / us / 1e6:5.0f} TFLOP/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--no-variants", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    start, bandwidth = time.perf_counter(), copy_bandwidth()
    torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name(DEVICE)}, copy {bandwidth / 1e12:.2f} TB/s, {args.rows} rows", flush=True)
    for name, (n, k, _, _) in SHAPES.items():
        time_product(name, n, k, args.rows)
    for piece in pieces():
        time_piece(piece, args.rows, bandwidth, not args.no_variants)
    print(f"{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
