"""Row operations of the CPU backend against the reference, mixture of experts, and what the backend as a whole offers."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from pocketllm import kernels
from pocketllm.errors import OptionError
from pocketllm.kernels import numba as backend
from pocketllm.kernels import reference
from pocketllm.kernels.numba import rowwise
from pocketllm.kernels.numba.moe import mixture
from pocketllm.kernels.protocol import Kernels
from pocketllm.kernels.types import LinearWeight
from pocketllm.parallel import Summands

SHAPES = [(1, 896), (3, 100), (70, 1024), (2, 7)]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * 3


def part_of_wider_rows(x: Tensor) -> Tensor:
    return torch.cat((torch.full_like(x, float("nan")), x), dim=-1)[..., x.shape[-1] :]


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_match_the_reference(shape: tuple[int, int]) -> None:
    x, weight = random(*shape), random(shape[1])
    view = part_of_wider_rows(x)
    close(rowwise.rms_norm(view, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    mine, want = x.flip(0), x.flip(0)
    close(
        rowwise.add_rms_norm(Summands.of(view), mine, weight, 1e-6),
        reference.add_rms_norm(Summands.of(x), want, weight, 1e-6),
    )
    assert torch.equal(mine, want)
    close(rowwise.silu_mul(torch.cat((view, mine), dim=1)), reference.silu_mul(torch.cat((x, mine), dim=1)))
    close(rowwise.sigmoid_mul(view, mine), reference.sigmoid_mul(x, mine))
    close(rowwise.sigmoid_mul(view, mine[:, 1:2]), reference.sigmoid_mul(x, mine[:, 1:2]))
    by_heads = torch.stack((x, mine), dim=2)[:, :, 1:]
    assert torch.equal(rowwise.sigmoid_mul(view, by_heads), rowwise.sigmoid_mul(view, mine))


@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (256, 64), (48, 24), (20, 10)])
@pytest.mark.parametrize("normed", [True, False])
def test_norm_rope_matches_the_reference(dim: int, rotary: int, normed: bool) -> None:
    x, norm = random(5, 3, dim), random(dim) if normed else None
    cos, sin, positions = random(50, rotary // 2), random(50, rotary // 2).flip(0), torch.tensor([3, 9, 49, 0, 1])
    view = part_of_wider_rows(x.flatten(1)).unflatten(1, (3, dim))
    close(
        rowwise.norm_rope(view, norm, 1e-6, cos, sin, positions),
        reference.norm_rope(x, norm, 1e-6, cos, sin, positions),
    )


@pytest.mark.parametrize("shape", [(70, 1024), (5, 100)], ids=str)
def test_a_row_gives_the_same_bits_alone(shape: tuple[int, int]) -> None:
    x, weight, other = random(*shape), random(shape[1]), random(*shape).flip(0)
    for i in (0, shape[0] - 1):
        row = slice(i, i + 1)
        assert torch.equal(rowwise.rms_norm(x, weight, 1e-6)[row], rowwise.rms_norm(x[row], weight, 1e-6))
        assert torch.equal(rowwise.sigmoid_mul(x, other)[row], rowwise.sigmoid_mul(x[row], other[row]))


def test_gates_of_extreme_values_stay_finite() -> None:
    x = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4]])
    close(rowwise.silu_mul(torch.cat((x, torch.ones_like(x)), dim=1)), torch.nn.functional.silu(x))
    assert rowwise.silu_mul(torch.tensor([[float("nan"), 1.0]])).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_returned_as_given(dtype: torch.dtype) -> None:
    x = random(3, 100).to(dtype)
    assert rowwise.rms_norm(x, random(100), 1e-6).dtype == dtype
    mine, want = x.clone(), x.clone()
    got, expected = (
        rowwise.add_rms_norm(Summands.of(x), mine, random(100), 1e-6),
        reference.add_rms_norm(Summands.of(x), want, random(100), 1e-6),
    )
    assert torch.equal(mine, want)
    torch.testing.assert_close(got, expected)


def test_experts_are_summed_in_one_order() -> None:
    matrices = [random(32, 16).roll(i) for i in range(4)], [random(16, 16).roll(i) for i in range(4)]
    weights: Any = [[LinearWeight(None, tuple(m.shape), (m,)) for m in part] for part in matrices]  # type: ignore[arg-type]

    def linear(x: Tensor, weight: LinearWeight) -> Tensor:
        return (x.unsqueeze(1) * weight.tensors[0]).sum(-1)

    def gated_linear(x: Tensor, weight: LinearWeight) -> Tensor:
        return reference.silu_mul(linear(x, weight))

    x, ids = random(6, 16), torch.tensor([[0, 3], [2, 1], [3, 0], [1, 2], [0, 1], [3, 2]])
    share = random(6, 2).softmax(-1)
    got = mixture(linear, gated_linear, x, ids, share, *weights)
    for i in range(6):
        expert_outputs = [
            linear(reference.silu_mul(linear(x[i : i + 1], weights[0][e])), weights[1][e])[0] for e in ids[i].tolist()
        ]
        torch.testing.assert_close(
            got[i], (torch.stack(expert_outputs) * share[i].unsqueeze(1)).sum(0), rtol=1e-4, atol=1e-3
        )
        assert torch.equal(
            mixture(linear, gated_linear, x[i : i + 1], ids[i : i + 1], share[i : i + 1], *weights)[0], got[i]
        )


def test_the_backend_offers_every_operation() -> None:
    operations = {name for name in vars(Kernels) if not name.startswith("_")}
    assert operations
    missing = {name for name in operations if not callable(getattr(backend, name, None))}
    assert not missing
    assert backend.name == "numba"


def test_numba_on_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BACKENDS", ("reference", "numba"))
    with pytest.raises(OptionError, match="runs on a CPU"):
        kernels.select_kernels("numba", "cuda")


def test_without_numba_auto_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BACKENDS", ("reference", "numba"))
    assert kernels.select_kernels("auto", "cpu").name == "numba"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kernels.select_kernels("auto", "cpu").name == "reference"
    with pytest.raises(OptionError, match="pip install"):
        kernels.select_kernels("numba", "cpu")
