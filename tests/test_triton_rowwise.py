"""The row operations of the GPU backend against the reference: on a GPU as they are, elsewhere in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pocketllm.kernels import reference
from pocketllm.kernels.triton import rowwise, summands
from pocketllm.parallel import Summands

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
EPS = 1e-6
DTYPES = pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=["float32", "bfloat16"]
)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(got: Tensor, wanted: Tensor, limit: float) -> bool:
    """Relative to the largest number of the row: one rounding of the result's type, and what float32 leaves open."""
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    scale = wanted.float().abs().amax(dim=-1, keepdim=True).clamp_min(1e-3)
    return bool(((got.float() - wanted.float()).abs() / scale).max() < limit)


@DTYPES
@pytest.mark.parametrize("width", [16, 96, 1000, 5120])
def test_rms_norm(width: int, dtype: torch.dtype, limit: float) -> None:
    wide, weight = random(5, width + 64, dtype=dtype), random(width, seed=1) + 1
    x = wide[:, 8 : 8 + width]  # rows as parts of wider ones
    got = rowwise.rms_norm(x, weight, EPS)
    assert close(got, reference.rms_norm(x, weight, EPS), limit)
    for i in range(5):
        assert torch.equal(rowwise.rms_norm(x[i : i + 1], weight, EPS)[0], got[i])


@DTYPES
def test_add_rms_norm_adds_in_place(dtype: torch.dtype, limit: float) -> None:
    x, residual, weight = random(3, 200, dtype=dtype), random(3, 200, dtype=dtype, seed=1) * 9, random(200, seed=2)
    wanted_residual, kept = residual.clone(), x.clone()
    wanted = reference.add_rms_norm(Summands.of(x), wanted_residual, weight, EPS)
    got = summands.add_rms_norm(Summands.of(x), residual, weight, EPS)
    assert close(residual, wanted_residual, limit)  # the interpreter cuts floats off where a GPU rounds them
    assert torch.equal(residual, wanted_residual) or (dtype == torch.bfloat16 and not GPU)
    assert close(got, wanted, limit)
    assert torch.equal(got, rowwise.rms_norm(residual, weight, EPS))  # the norm is of the sum as it is stored
    assert torch.equal(x, kept)


@DTYPES
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (64, 8), (96, 48), (256, 32)])
@pytest.mark.parametrize("with_norm", [True, False])
def test_norm_rope(dim: int, half: int, with_norm: bool, dtype: torch.dtype, limit: float) -> None:
    x = random(4, 3, 2 * dim, dtype=dtype)[:, :, :dim]  # q of q | gate, as a gated attention layer has it
    norm = random(dim, seed=1) + 1 if with_norm else None
    angles = torch.arange(50, device=DEVICE)[:, None] * random(half, seed=2).abs()
    cos, sin, positions = angles.cos(), angles.sin(), torch.tensor([0, 49, 7, 7], device=DEVICE)
    got = rowwise.norm_rope(x, norm, EPS, cos, sin, positions)
    assert got.is_contiguous()
    assert close(got, reference.norm_rope(x, norm, EPS, cos, sin, positions), limit)
    assert torch.equal(rowwise.norm_rope(x[2:3], norm, EPS, cos, sin, positions[2:3])[0], got[2])


@DTYPES
@pytest.mark.parametrize("width", [48, 1500])
def test_silu_mul(width: int, dtype: torch.dtype, limit: float) -> None:
    gate_up = random(3, 2 * width, dtype=dtype) * 4
    exact = reference.silu_mul(gate_up.float()).to(dtype)
    assert close(rowwise.silu_mul(gate_up), exact, limit)


@DTYPES
@pytest.mark.parametrize(("width", "gates"), [(48, 48), (1500, 1500), (1500, 1)])
def test_sigmoid_mul(width: int, gates: int, dtype: torch.dtype, limit: float) -> None:
    x, gate = random(3, width, dtype=dtype), random(3, gates, dtype=dtype, seed=1) * 4
    exact = reference.sigmoid_mul(x.float(), gate.float()).to(dtype)
    assert close(rowwise.sigmoid_mul(x, gate), exact, limit)


@DTYPES
@pytest.mark.parametrize("head", [16, 96, 500])
def test_sigmoid_mul_by_heads_that_lie_apart(head: int, dtype: torch.dtype, limit: float) -> None:
    """As a gated attention layer has them: q | gate of a head, then the next head's."""
    x, gate = random(3, 4 * head, dtype=dtype), random(3, 4, 2 * head, dtype=dtype, seed=1)[:, :, head:] * 4
    both = torch.cat((gate, gate), dim=2)[:, :, head:]
    assert torch.equal(rowwise.sigmoid_mul(x, both), rowwise.sigmoid_mul(x, gate.flatten(1)))
    assert close(rowwise.sigmoid_mul(x, both), reference.sigmoid_mul(x.float(), both.float()).to(dtype), limit)


def test_no_rows_are_no_work() -> None:
    """A prefill chunk that asks for no logits leaves none for the last norm."""
    empty = random(0, 64)
    assert rowwise.rms_norm(empty, random(64), EPS).shape == (0, 64)
    assert summands.add_rms_norm(Summands.of(empty), empty.clone(), random(64), EPS).shape == (0, 64)


def test_a_residual_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        summands.add_rms_norm(Summands.of(random(4, 8)), random(8, 4).T, random(8), EPS)
