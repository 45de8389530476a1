"""Bridges of several ranks, which send each other sums and parts of sums. All ranks but one are played by the test."""

from __future__ import annotations

import time

import pytest
import torch

pytest.importorskip("triton")
from torch import Tensor

from pocketllm.kernels import reference
from pocketllm.kernels import triton as kernels
from pocketllm.kernels.triton.bridge import parts_of
from pocketllm.kernels.types import Bridge
from pocketllm.parallel import FEW_ROWS, Place, inbox_nbytes, place_nbytes
from test_triton_bridge import BRIDGED, DEVICE, SHAPES, random_bridge

pytestmark = pytest.mark.skipif(not BRIDGED, reason="needs a GPU whose table says bridge")


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def words_of(sums: Tensor, stamp: int) -> Tensor:
    return (sums.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF) | stamp << 32


def place_of(rank: int, size: int, rows: int, hidden: int, parts: int) -> tuple[Place, list[Tensor]]:
    """Of one of `size` ranks that live in one process, and the inboxes of all, [size, parts, rows, hidden]."""
    inboxes = [torch.zeros(inbox_nbytes(hidden, size) // 8, dtype=torch.int64, device=DEVICE) for _ in range(size)]
    unused = torch.zeros(size, dtype=torch.int64, device=DEVICE)
    place = Place(
        torch.zeros(place_nbytes(hidden), dtype=torch.uint8, device=DEVICE), unused, unused,
        torch.tensor([t.data_ptr() for t in inboxes], dtype=torch.int64, device=DEVICE),
        torch.zeros(1, dtype=torch.int32, device=DEVICE), rank, size,
    )  # fmt: skip
    return place, [t[: size * parts * rows * hidden].view(size, parts, rows, hidden) for t in inboxes]


def places_of(weights: Bridge, rank: int, size: int, rows: int) -> tuple[list[Place], list[list[Tensor]]]:
    """Of both sums. A few rows of two ranks come in parts, as many as programs share a tile."""
    parts = [n if size == 2 and rows <= FEW_ROWS else 1 for n in parts_of(weights)[::2]]
    made = [place_of(rank, size, rows, weights.out.shape[0], n) for n in parts]
    for place, _ in made[1:]:
        object.__setattr__(place, "stop", made[0][0].stop)
    return [place for place, _ in made], [inboxes for _, inboxes in made]


def put_words(inboxes: list[list[Tensor]], rank: int, theirs: Tensor, stamp: int) -> None:
    """The other ranks' sums theirs [2, size, rows, hidden] into a rank's inboxes, all but the first part being 0."""
    for each, sums in zip(inboxes, theirs, strict=True):
        words = words_of(torch.zeros_like(each[rank], dtype=torch.float32), stamp)
        words[:, 0] = words_of(sums, stamp)
        others = torch.arange(len(words), device=DEVICE) != rank
        each[rank][others] = words[others]


@pytest.mark.parametrize(("shape", "rank", "size"), [(2, 0, 2), (2, 1, 2), (0, 1, 2), (2, 2, 4)])
@pytest.mark.parametrize("rows", [1, 8, 9, 40])
def test_ranks_add_each_others_sums(rows: int, shape: int, rank: int, size: int) -> None:
    """Of ranks in one process: the other ones' words are there in advance. Twice, as inboxes are used again."""
    weights = random_bridge(*SHAPES[shape], small=True, last=False)
    assert weights.next_norm is not None
    hidden, width = SHAPES[shape][:2]
    places, inboxes = places_of(weights, rank, size, rows)
    for stamp in (1, 2):
        x, residual = (torch.randn(rows, n, device=DEVICE).bfloat16() for n in (width, hidden))
        theirs = torch.randn(2, size, rows, hidden, device=DEVICE)
        theirs[:, rank] = 0
        put_words(inboxes, rank, theirs, stamp)
        own, (first, second) = reference.linear(x.float(), weights.out), theirs.sum(1)
        exact = residual.float() + own + first
        h = reference.gated_linear(reference.rms_norm(exact, weights.norm, weights.eps), weights.gate_up)
        exact = exact + reference.linear(h, weights.down) + second
        wanted = reference.linear(reference.rms_norm(exact, weights.next_norm, weights.eps), weights.next_in[0])
        cross = kernels.bridge(weights, rows, torch.bfloat16, places)
        assert cross is not None
        got = cross(x, residual)[0].float()
        assert ((got - wanted).norm() / wanted.norm()).item() < 6e-3
        assert ((residual.float() - exact).norm() / exact.norm()).item() < 4e-3
        others = [i for i in range(size) if i != rank]
        for each in inboxes:  # this rank's words have been sent, with the stamp, to all; nothing else has been written
            sent = each[rank][rank]
            assert bool((sent[0] >> 32 == stamp).all())
            assert bool(((sent >> 32 == stamp) | (sent == 0)).all())
            assert all(torch.equal(sent, each[i][rank]) for i in others)
            assert not any(each[i][j].any() for i in others for j in others)
        values = inboxes[0][rank][rank].to(torch.int32).view(torch.float32).sum(0)
        assert ((values - own).norm() / own.norm()).item() < 2e-3


def test_ranks_add_a_row_alike_alone_and_among_others() -> None:
    """Parts that are sent as they are, and sums of more rows: the same bits."""
    weights, rows, row = random_bridge(*SHAPES[2], small=False, last=False), 40, 17
    hidden, width = SHAPES[2][:2]
    x, residual = (torch.randn(rows, n, device=DEVICE).bfloat16() for n in (width, hidden))
    theirs = torch.randn(2, 2, rows, hidden, device=DEVICE)
    found = []
    for some in (slice(0, rows), slice(row, row + 1)):
        num_rows = len(x[some])
        places, inboxes = places_of(weights, 0, 2, num_rows)
        put_words(inboxes, 0, theirs[:, :, some], 1)
        cross, kept = kernels.bridge(weights, num_rows, torch.bfloat16, places), residual[some].clone()
        assert cross is not None
        found.append((cross(x[some], kept)[0], kept))
    assert all(torch.equal(many[row : row + 1], one) for many, one in zip(*found, strict=True))


@pytest.mark.parametrize("rows", [3, 20])
def test_words_may_come_late_or_never(rows: int) -> None:
    """A kernel waits for the other rank's words; where that has died, `stop`, which comes while it waits, lets it end."""
    weights = random_bridge(*SHAPES[2], small=False, last=False)
    hidden, width = SHAPES[2][:2]
    places, inboxes = places_of(weights, 0, 2, rows)
    x, residual = (torch.randn(rows, n, device=DEVICE).bfloat16() for n in (width, hidden))
    theirs, other = torch.randn(2, 2, rows, hidden, device=DEVICE), torch.cuda.Stream()
    results = []
    for stamp, late in enumerate((False, True, True), 1):
        if not late:
            put_words(inboxes, 0, theirs, stamp)
        words = [torch.zeros_like(each[0][1]) for each in inboxes]
        for each, sums in zip(words, theirs, strict=True):
            each.copy_(words_of(torch.zeros_like(each, dtype=torch.float32), stamp))
            each[0] = words_of(sums[1], stamp)
        pinned = [each.cpu().pin_memory() for each in words]
        torch.cuda.synchronize()
        cross, kept = kernels.bridge(weights, rows, torch.bfloat16, places), residual.clone()
        assert cross is not None
        output = cross(x, kept)[0]
        if late:
            with torch.cuda.stream(other):  # by the copy engine: the kernel has all multiprocessors
                for each, from_host in zip(inboxes, pinned, strict=True):
                    time.sleep(0.01)
                    each[0][1].copy_(from_host, non_blocking=True)
        torch.cuda.synchronize()
        results.append((output, kept))
    assert all(torch.equal(a, b) for later in results[1:] for a, b in zip(later, results[0], strict=True))
    said, unsaid = (torch.full((1,), i, dtype=torch.int32).pin_memory() for i in (1, 0))
    for _ in range(20):
        kernels.bridge(weights, rows, torch.bfloat16, places)(x, residual.clone())  # type: ignore[misc]
        with torch.cuda.stream(other):
            time.sleep(0.002)
            places[0].stop.copy_(said, non_blocking=True)
        torch.cuda.synchronize()
        places[0].stop.copy_(unsaid)


def test_the_last_bridge_of_ranks_leaves_parts_in_its_place() -> None:
    """For whoever comes next; its first sum is sent as in the others."""
    weights, rows = random_bridge(*SHAPES[2], small=False, last=True), 5
    hidden, width = SHAPES[2][:2]
    places, inboxes = places_of(weights, 0, 2, rows)
    x, residual = (torch.randn(rows, n, device=DEVICE).bfloat16() for n in (width, hidden))
    theirs = torch.randn(2, 2, rows, hidden, device=DEVICE)
    put_words(inboxes[:1], 0, theirs[:1], 1)
    exact = residual.float() + reference.linear(x.float(), weights.out) + theirs[0, 1]
    h = reference.gated_linear(reference.rms_norm(exact, weights.norm, weights.eps), weights.gate_up)
    wanted = reference.linear(h, weights.down)
    (parts,) = kernels.bridge(weights, rows, torch.bfloat16, places)(x, residual)  # type: ignore[misc]
    assert parts.data_ptr() == places[1].memory.data_ptr()
    assert ((parts.sum(0) - wanted).norm() / wanted.norm()).item() < 6e-3
    assert not any(each.any() for each in inboxes[1])


def test_bridges_of_two_shapes_do_not_share_inboxes() -> None:
    """Their kernels would count apart, so that old words of one could pass for the other's."""
    first, second = (random_bridge(*shape, small=False, last=False) for shape in SHAPES[::2])
    places = [place_of(0, 2, 3, SHAPES[2][0], 1)[0] for _ in range(2)]
    assert kernels.bridge(first, 3, torch.bfloat16, places) is not None
    assert kernels.bridge(second, 3, torch.bfloat16, places) is None
    assert kernels.bridge(first, 3, torch.bfloat16, places) is not None
    others = [place_of(0, 2, 3, SHAPES[2][0], 1)[0] for _ in range(2)]
    assert kernels.bridge(second, 3, torch.bfloat16, others) is not None
