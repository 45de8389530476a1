"""Sums that come in parts, of splits and of ranks: on a GPU as they are, elsewhere in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pocketllm.kernels import reference
from pocketllm.kernels.triton import linear, linear_summands
from pocketllm.kernels.triton.summands import add_rms_norm, add_up
from pocketllm.kernels.types import LinearWeight
from pocketllm.parallel import Place, Summands
from pocketllm.weights.formats import FORMATS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-6


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def ranks_of(size: int, nbytes: int, rank: int, programs: int = 64) -> tuple[Place, list[Tensor], list[Tensor]]:
    """The place of one rank, and the memory and flags of all: they live in one process here."""
    memories = [torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=DEVICE) for _ in range(size)]
    flags = [torch.zeros(programs, size, dtype=torch.int32, device=DEVICE) for _ in range(size)]

    def addresses(tensors: list[Tensor]) -> Tensor:
        return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=DEVICE)

    unused = addresses([]), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    return Place(memories[rank], addresses(memories), addresses(flags), *unused, rank, size), memories, flags


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_splits_are_added_in_order(splits: int) -> None:
    parts, residual, weight = random(splits, 3, 200) * 100, random(3, 200), random(200)
    total = torch.zeros(3, 200, device=DEVICE)
    for part in parts:
        total = total + part
    assert torch.equal(add_up(Summands(parts), torch.float32), total)
    wanted_residual = residual.clone()
    wanted = reference.add_rms_norm(Summands(parts), wanted_residual, weight, EPS)
    got = add_rms_norm(Summands(parts), residual, weight, EPS)
    assert torch.allclose(residual, wanted_residual, rtol=1e-5, atol=1e-4)
    assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-5)
    one = torch.zeros(1, 200, device=DEVICE)
    assert torch.equal(add_rms_norm(Summands(parts[:, 1:2]), one, weight, EPS), _alone(parts, weight))


def _alone(parts: Tensor, weight: Tensor) -> Tensor:
    """Row 1 among the others."""
    return add_rms_norm(Summands(parts), torch.zeros(3, 200, device=DEVICE), weight, EPS)[1:2]


@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("splits", [1, 3])
def test_ranks_meet_and_read_each_others_parts(size: int, rank: int, splits: int) -> None:
    rows, width = 3, 96
    place, memories, flags = ranks_of(size, splits * rows * width * 4, rank)
    held = [
        memory.view(torch.float32).view(splits, rows, width).copy_(random(splits, rows, width)) for memory in memories
    ]
    for peer in range(size):
        if peer != rank:
            flags[rank][:, peer] = 1  # they have come: in one process nobody could while the kernel waits
    total = torch.zeros(rows, width, device=DEVICE)
    for parts in held:
        total = total + add_up(Summands(parts), torch.float32)
    summands = Summands(held[rank], place)
    assert torch.equal(add_up(summands, torch.float32), total)
    told = [[int(f[program, rank]) for program in range(4)] for f in flags]
    assert told == [[1, 1, 1, 0] if peer != rank else [0] * 4 for peer in range(size)]  # a program a row says so
    assert not flags[rank][:rows].any()  # and each has taken note of the others
    for flag in flags:
        flag.zero_()
    for peer in range(size):
        flags[rank][:, peer] = int(peer != rank)
    residual, weight = random(rows, width), random(width)
    wanted_residual = residual.clone()
    wanted = reference.add_rms_norm(Summands.of(total), wanted_residual, weight, EPS)
    assert torch.allclose(add_rms_norm(summands, residual, weight, EPS), wanted, rtol=1e-4, atol=1e-5)
    assert torch.allclose(residual, wanted_residual, rtol=1e-5, atol=1e-5)


def weight_of(n: int, k: int, *, bias: bool = False) -> LinearWeight:
    matrix = random(n, k, dtype=torch.bfloat16)
    return LinearWeight(FORMATS["bf16"], (n, k), (matrix,), random(n) if bias else None)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 80])
def test_a_product_in_parts_is_the_product(rows: int, bias: bool) -> None:
    """With and without a place, and for more than may be sent in parts."""
    weight, x = weight_of(48, 1024, bias=bias), random(rows, 1024)
    wanted = linear(x, weight)
    summands = linear_summands(x, weight)
    assert (len(summands.parts) > 1) == (rows <= 64 and not bias)
    assert torch.allclose(add_up(summands, torch.float32), wanted, rtol=1e-5, atol=1e-4)
    place, _, _ = ranks_of(2, 2**20, 0)
    sent = linear_summands(x, weight, place)
    assert sent.place is place
    assert sent.parts.data_ptr() == place.memory.data_ptr()
    assert torch.equal(add_up(Summands(sent.parts), torch.float32), add_up(summands, torch.float32))


def test_few_bytes_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = weight_of(48, 1024), random(5, 1024)
    place, _, _ = ranks_of(2, 2**20, 0)
    many = linear_summands(x, weight, place)
    assert len(many.parts) > 1
    total = add_up(Summands(many.parts.clone()), torch.float32)
    monkeypatch.setattr("pocketllm.kernels.triton.summands._MOST_SENT", 100)
    few = linear_summands(x, weight, place)
    assert few.parts.shape == (1, 5, 48)
    assert torch.equal(few.parts[0], total)


def test_no_more_programs_meet_than_there_are_flags() -> None:
    place, _, _ = ranks_of(2, 2**22, 0, programs=1)
    with pytest.raises(ValueError, match="at most 1024"):
        add_up(Summands(place.room((1, 64, 17 * 1024), torch.float16), place), torch.float32)
