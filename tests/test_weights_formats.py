"""Weight formats: the layouts other code relies on, encoding error bounds, stacking and row order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from pocketllm.errors import ModelError
from pocketllm.kernels.types import LinearWeight
from pocketllm.weights import gguf_blocks
from pocketllm.weights.formats import (
    FORMATS,
    W4,
    W8,
    Dense,
    Fp8Block,
    W4Shifted,
    convert,
    encode,
    merge,
    reorder_columns,
    reorder_rows,
)

CPU = torch.device("cpu")


def _matrix(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FORMATS)
def test_tensors_are_as_specified(name: str) -> None:
    weight = encode(FORMATS[name], _matrix(200, 320))
    specs = FORMATS[name].specs(200, 320)
    assert [(t.shape, t.dtype) for t in weight.tensors] == [(torch.Size(s.shape), s.dtype) for s in specs]
    assert weight.nbytes == sum(s.nbytes for s in specs)
    assert FORMATS[name].name == name


@pytest.mark.parametrize("name", FORMATS)
def test_decode_rows_equals_rows_of_decode(name: str) -> None:
    weight = encode(FORMATS[name], _matrix(200, 320))
    rows = torch.tensor([199, 0, 130, 130, 64])
    assert torch.equal(weight.format.decode_rows(weight.tensors, rows), weight.format.decode(weight.tensors)[rows])


def test_w4_layout_by_hand() -> None:
    """Element j of a group is the low nibble of byte j, element 16 + j the high one."""
    q = torch.tensor([[0x21 + j % 3 for j in range(16)]], dtype=torch.uint8)
    decoded = W4().decode((q, torch.tensor([[2.0]]).half(), torch.tensor([[-5.0]]).half()))
    assert decoded[0, :3].tolist() == [2 * 1 - 5, 2 * 2 - 5, 2 * 3 - 5]
    assert decoded[0, 16:].tolist() == [2 * 2 - 5] * 16


def test_fp8_block_scale_covers_its_block_only() -> None:
    weight = torch.ones(130, 140).to(torch.float8_e4m3fn)
    decoded = Fp8Block().decode((weight, torch.tensor([[1.0, 2.0], [3.0, 4.0]])))
    corners = decoded[[127, 127, 128, 128], [127, 128, 127, 128]]
    assert corners.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(("name", "steps"), [("w8", 127), ("w4", 15)])
def test_rounding_error_is_half_a_step(name: str, steps: int) -> None:
    x = _matrix(64, 256)
    weight = encode(FORMATS[name], x)
    groups = x.view(64, 8, 32)
    step = groups.abs().amax(2) / 127 if name == "w8" else (groups.amax(2) - groups.amin(2)) / steps
    error = (weight.format.decode(weight.tensors) - x).view(64, 8, 32).abs().amax(2)
    assert bool((error <= 0.5 * step * 1.02 + 2e-3 * groups.abs().amax(2)).all())  # + float16 rounding
    assert error.max() > 0.3 * step.min()  # the bound is not idle


def test_constant_and_zero_groups_are_exact() -> None:
    x = torch.zeros(2, 64)
    for form in (W8(), W4(), W4Shifted(), Fp8Block()):
        assert torch.equal(form.decode(form.encode(x)), x)
    x[1, 32:] = 0.5  # no range to spread over 15 steps: the minimum alone holds it
    assert torch.equal(W4().decode(W4().encode(x)), x)


@pytest.mark.parametrize("form", [W8(), W4()])
def test_bad_values_and_widths_are_refused(form: W8 | W4) -> None:
    with pytest.raises(ModelError, match="multiple of 32, not 40"):
        form.specs(4, 40)
    with pytest.raises(ModelError, match="multiple of 32, not 40"):
        form.encode(torch.zeros(4, 40))
    with pytest.raises(ModelError, match="not finite"):
        form.encode(torch.full((1, 32), float("inf")))
    with pytest.raises(ModelError, match="too large"):
        form.encode(torch.linspace(-3e7, 3e7, 32)[None])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16", "F32"])
def test_gguf_blocks_are_repacked_bit_for_bit(kind: str) -> None:
    gguf_type = GGMLQuantizationType[kind]
    raw = quants.quantize(_matrix(48, 192).numpy(), gguf_type).view(np.uint8)
    form = gguf_blocks.format_of(gguf_type)
    decoded = form.decode(gguf_blocks.unpack(raw, gguf_type)).float()
    assert torch.equal(decoded, torch.from_numpy(quants.dequantize(raw, gguf_type).astype(np.float32)))


def test_other_gguf_types_become_w8() -> None:
    raw = quants.quantize(_matrix(48, 256).numpy(), GGMLQuantizationType.Q5_0)
    decoded = W8().decode(gguf_blocks.unpack(raw, GGMLQuantizationType.Q5_0))
    exact = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType.Q5_0))
    assert gguf_blocks.format_of(GGMLQuantizationType.Q5_0) == W8()
    assert 0 < (decoded - exact).abs().max() < 0.02
    with pytest.raises(ModelError, match="Q8_1 is not supported"):
        gguf_blocks.format_of(GGMLQuantizationType.Q8_1)


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", ["bf16", "fp8_block", "w8"])
def test_convert_in_slices_equals_convert_at_once(source: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pocketllm.weights.formats._CHUNK_ROWS", 128)
    weight = encode(FORMATS[source], _matrix(300, 192))
    got = convert(weight, FORMATS[target], CPU)
    whole = weight if source == target else encode(FORMATS[target], weight.format.decode(weight.tensors))
    for a, b in zip(got.tensors, whole.tensors, strict=True):
        assert torch.equal(a.float(), b.float())


def test_merge_stacks_neighbours_of_one_format() -> None:
    x = _matrix(96, 64)
    a, b, c = (encode(f, x[i : i + 32]) for i, f in ((0, W8()), (32, W8()), (64, W4())))
    biased = LinearWeight(b.format, b.shape, b.tensors, torch.ones(32))
    first, second = merge([a, biased, c])
    assert (first.shape, second.shape) == ((64, 64), (32, 64))
    assert torch.equal(first.format.decode(first.tensors)[32:], b.format.decode(b.tensors))
    assert first.bias is not None
    assert first.bias.tolist() == [0.0] * 32 + [1.0] * 32


def test_merge_keeps_ragged_fp8_apart() -> None:
    whole, ragged = (encode(Fp8Block(), _matrix(n, 200, n)) for n in (256, 130))
    (joined,) = merge([whole, ragged])
    assert joined.shape == (386, 200)
    assert torch.equal(joined.format.decode(joined.tensors)[256:], ragged.format.decode(ragged.tensors))
    assert [w.shape[0] for w in merge([ragged, whole])] == [130, 256]


@pytest.mark.parametrize("name", FORMATS)
def test_rows_move_by_whole_blocks(name: str) -> None:
    weight = encode(FORMATS[name], _matrix(384, 64))
    rows = torch.arange(384).view(3, 128)[[2, 0, 1]].flatten()
    moved = reorder_rows(weight, rows)
    assert torch.equal(moved.format.decode(moved.tensors), weight.format.decode(weight.tensors)[rows])
    odd = torch.arange(384).flip(0)
    if name == "fp8_block":
        with pytest.raises(ModelError, match="whole blocks of 128"):
            reorder_rows(weight, odd)
    else:
        back = reorder_rows(weight, odd)
        assert torch.equal(back.format.decode(back.tensors), weight.format.decode(weight.tensors).flip(0))


@pytest.mark.parametrize("form", [Dense(torch.float32), W8(), W4()])
def test_columns_move_by_whole_groups(form: Dense | W8 | W4) -> None:
    weight = encode(form, _matrix(8, 128))
    columns = torch.arange(128).view(4, 32)[[3, 1, 0, 2]].flatten()
    moved = reorder_columns(weight, columns)
    assert torch.equal(moved.format.decode(moved.tensors), weight.format.decode(weight.tensors)[:, columns])
    if form != Dense(torch.float32):
        with pytest.raises(ModelError, match="whole groups of 32"):
            reorder_columns(weight, columns.flip(0))
