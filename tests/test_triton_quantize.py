"""Activations that are rounded to e4m3 where they are made: on a GPU as they are, elsewhere in Triton's interpreter.

The interpreter's e4m3 loses what should be carried into the exponent (124 becomes 64): torch's is put in its place.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

import tiny_models
from engines import feed, prompt
from pocketllm import SlotEngine
from pocketllm.kernels import reference
from pocketllm.kernels import triton as kernels
from pocketllm.kernels.triton import quantize as module
from pocketllm.kernels.triton.quantize import quantize
from pocketllm.kernels.types import Activations, LinearWeight, Quantized
from pocketllm.parallel import Summands
from pocketllm.weights.formats import FORMATS, encode
from poison import poison_empty

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
RELATIVE, ABSOLUTE = 2**-4, 2**-10  # of a number, and of its group's scale
EPS = 1e-6
ROWS = 66  # more than 64, and no multiple of 4


@pytest.fixture(autouse=True)
def _fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that multiplies e4m3, and memory that nobody wrote to is NaN."""
    if not GPU:
        monkeypatch.setattr(module, "fp8_units", lambda device: True)
        convert = interpreter._convert_float

        def converted(x: Any, source: Any, target: Any, rounding: Any) -> Any:
            if target != tl.float8e4nv:
                return convert(x, source, target, rounding)
            return torch.from_numpy(x.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

        monkeypatch.setattr(interpreter, "_convert_float", converted)
    torch.manual_seed(0)
    poison_empty(monkeypatch)


def weight(name: str, n: int, k: int) -> LinearWeight:
    stored = encode(FORMATS[name], torch.randn(n, k) * k**-0.5)
    return LinearWeight(stored.format, (n, k), tuple(t.to(DEVICE) for t in stored.tensors))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def check(got: Activations, wanted: Tensor) -> None:
    """`got` is `wanted` [M, K] float32 rounded to e4m3 by groups, and not by way of bfloat16."""
    assert isinstance(got, Quantized)
    assert got.shape == wanted.shape
    groups = wanted.view(len(wanted), -1, 128)
    scales = got.scales.T[: len(got), :, None]
    assert torch.allclose(scales[..., 0], groups.abs().amax(2) / 448, rtol=1e-5)
    decoded = got.codes[: len(got)].float().view(groups.shape) * scales
    assert ((decoded - groups).abs() <= (groups.abs() * RELATIVE + scales * ABSOLUTE) * 1.001).all()
    assert (decoded - groups).norm() / groups.norm() < 4e-2


def test_a_gated_product_is_rounded_where_it_is_made() -> None:
    gate_up, down = random(ROWS, 2 * 256) * 4, weight("fp8_block", 64, 256)
    check(kernels.silu_mul(gate_up, [down]), reference.silu_mul(gate_up.float()))
    x, weights = random(ROWS, 128), weight("fp8_block", 2 * 256, 128)
    got, both = kernels.gated_linear(x, weights, [down]), kernels.linear(x, weights)
    check(got, reference.silu_mul(both.float()))
    x, gate = random(ROWS, 2 * 256)[:, 256:], random(ROWS, 256) * 4
    check(kernels.sigmoid_mul(x, gate, [down]), reference.sigmoid_mul(x.float(), gate.float()))
    by_heads = random(ROWS, 2, 2 * 128)[:, :, 128:]
    check(kernels.sigmoid_mul(x, by_heads, [down]), reference.sigmoid_mul(x.float(), by_heads.float()))
    by_small_heads = random(ROWS, 4, 2 * 64)[:, :, 64:]
    assert isinstance(kernels.sigmoid_mul(x, by_small_heads, [down]), Tensor)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_norm_is_rounded_where_it_is_made(splits: int) -> None:
    parts, old, gain = random(splits, ROWS, 384), random(ROWS, 384), random(384, dtype=torch.float32)
    fp8, plain = weight("fp8_block", 64, 384), weight("bf16", 64, 384)
    stored, residuals = kernels.add_up(Summands(parts), torch.float32), [old.clone() for _ in range(3)]
    alone = kernels.add_rms_norm(Summands(parts), residuals[0], gain, EPS)
    got = kernels.add_rms_norm(Summands(parts), residuals[1], gain, EPS, [fp8, fp8])
    both = kernels.add_rms_norm(Summands(parts), residuals[2], gain, EPS, [fp8, plain])
    assert all(torch.equal(residual, residuals[0]) for residual in residuals)
    assert torch.allclose(residuals[0].float(), stored + old.float(), rtol=1e-2, atol=1e-2)
    assert isinstance(alone, Tensor)
    wanted = reference.rms_norm(residuals[0].float(), gain, EPS)
    check(got, wanted)
    check(both, wanted)
    assert isinstance(got, Quantized)
    assert got.plain is None
    assert isinstance(both, Quantized)
    assert both.plain is not None
    assert torch.allclose(both.plain.float(), alone.float(), rtol=1e-2)
    assert torch.equal(kernels.linear(both, plain), kernels.linear(both.plain, plain))
    with pytest.raises(ValueError, match="not among the readers"):
        kernels.linear(got, plain)
    with pytest.raises(ValueError, match=r"x has shape \(66, 384\): the weight needs \[M, 128\]"):
        kernels.linear(got, weight("fp8_block", 64, 128))


def test_a_row_of_codes_does_not_depend_on_the_others() -> None:
    x, gain, reader = random(80, 256), random(128, dtype=torch.float32), [weight("fp8_block", 64, 128)]
    makers = (
        lambda part: quantize(part),
        lambda part: kernels.silu_mul(part, reader),
        lambda part: kernels.sigmoid_mul(part[:, :128], part[:, 128:], reader),
        lambda part: kernels.add_rms_norm(Summands.of(part[:, :128]), part[:, 128:].clone(), gain, EPS, reader),
    )
    for make in makers:
        whole, part = make(x), make(x[7:75])
        assert torch.equal(part.codes[:68].view(torch.uint8), whole.codes[7:75].view(torch.uint8))
        assert torch.equal(part.scales[:, :68], whole.scales[:, 7:75])


@pytest.mark.parametrize(
    ("rows", "dtype", "name", "k"),
    [
        (64, torch.bfloat16, "fp8_block", 128),
        (66, torch.float32, "fp8_block", 128),
        (66, torch.bfloat16, "fp8_block", 192),
        (66, torch.bfloat16, "w8", 128),
    ],
)
def test_other_readers_get_tensors(rows: int, dtype: torch.dtype, name: str, k: int) -> None:
    both, reader = random(rows, 2 * k, dtype=dtype), [weight(name, 64, k)]
    x, other = both[:, :k], both[:, k:]
    assert isinstance(kernels.silu_mul(both, reader), Tensor)
    assert isinstance(kernels.sigmoid_mul(x, other, reader), Tensor)
    assert isinstance(kernels.add_rms_norm(Summands.of(x), other.clone(), x[0].float(), EPS, reader), Tensor)


def test_layers_round_their_input_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of more than 64 tokens through both kinds of layer. What nobody told its readers is rounded by itself: the
    first block's norm, and what a Gated DeltaNet layer gives its output projection."""
    folder, _ = tiny_models.make_fp8(
        "qwen3_5", tmp_path, num_hidden_layers=2, layer_types=["full_attention", "linear_attention"],
        intermediate_size=384, linear_value_head_dim=128,
    )  # fmt: skip
    linear = importlib.import_module("pocketllm.kernels.triton.linear")  # the package's function has its name
    rounded: list[int] = []
    monkeypatch.setattr(linear, "quantize", lambda x: rounded.append(x.shape[1]) or quantize(x))

    def logits() -> Tensor:
        slots = SlotEngine(
            folder, kernels="triton", device=DEVICE.type, dtype="bfloat16", max_batch_size=1, max_context=128,
            page_size=16, load_format="dummy",  # a file's weights may begin anywhere, which descriptors do not allow
        )  # fmt: skip
        slot = slots.acquire_slot(100)
        return feed(slots, {slot: prompt(70)})[slot].float()

    fused = logits()
    assert rounded == [256, 768]
    monkeypatch.setattr("pocketllm.kernels.triton.summands.takes_codes", lambda *_: False)
    monkeypatch.setattr("pocketllm.kernels.triton.rowwise.all_take_codes", lambda *_: False)
    alone = logits()
    assert len(rounded) > 6
    assert (fused - alone).norm() / alone.norm() < 0.15
