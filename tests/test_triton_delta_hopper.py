"""`delta_hopper_kernels`, with each way to share out the work, against the reference and the kernels of all devices.

`test_triton_gated_delta` runs it too, where it is chosen; here there are more heads than multiprocessors.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pocketllm.kernels.reference import gated_delta as reference
from pocketllm.kernels.triton import delta_hopper, gated_delta
from pocketllm.kernels.triton.delta_hopper import HopperStep
from pocketllm.kernels.types import GatedDeltaWeights, LayerState

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = torch.device("cuda" if HOPPER else "cpu")
KEY_HEADS, HEADS, DIM, SLOTS, DRAFTS = 2, 6, 128, 64, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
CONFIGS = [None, HopperStep(4, 3, 2, 96), HopperStep(4, 3, 1, 104), HopperStep(8, 3, 1, 96)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def make_weights(dim: int = DIM, taps: int = 4) -> GatedDeltaWeights:
    channels = (2 * KEY_HEADS + HEADS) * dim
    return GatedDeltaWeights(
        random(channels, taps) / 2, random(HEADS, seed=1), random(HEADS, seed=2), random(dim, seed=3), 1e-6, KEY_HEADS,
        HEADS, dim, dim,
    )  # fmt: skip


def make_state(dim: int = DIM) -> LayerState:
    channels = (2 * KEY_HEADS + HEADS) * dim
    journal = [
        torch.full((SLOTS + 1, DRAFTS, *size), float("nan"), device=DEVICE)
        for size in ((channels,), (KEY_HEADS, dim), (HEADS, dim), (HEADS,))
    ]
    conv = random(SLOTS + 1, channels, 3, seed=4).bfloat16()
    return LayerState(
        conv, random(SLOTS + 1, HEADS, dim, dim, seed=5) / 10, journal[0].bfloat16(), *journal[1:]
    )  # fmt: skip


def make_inputs(tokens: int) -> tuple[Tensor, ...]:
    sizes = (CHANNELS, HEADS * DIM, HEADS, HEADS)
    return random(tokens, sum(sizes), seed=6).bfloat16().split(sizes, dim=1)


def slots_of(count: int) -> Tensor:
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(7))
    return order[:count].to(DEVICE, torch.int32)


@pytest.fixture(params=CONFIGS, ids=str)
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HopperStep | None:
    if not HOPPER and request.param is not None:
        pytest.skip("no Hopper GPU")
    monkeypatch.setattr(gated_delta, "HOPPER_STEP", request.param)
    return request.param


def near(got: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool((got.float() - wanted.float()).norm() <= tolerance * wanted.float().norm())


@pytest.mark.parametrize("count", [1, 3, 23, 64] if HOPPER else [2])
def test_decode_is_the_reference_at_any_number_of_slots(config: HopperStep | None, count: int) -> None:
    """Twice, so that what programs leave for each other is as it was."""
    w, mine, wanted_state, slots = make_weights(), make_state(), make_state(), slots_of(count)
    inputs = make_inputs(2 * count)
    for part in (slice(0, count), slice(count, 2 * count)):
        rows = [x[part] for x in inputs]
        got: Any = gated_delta.gated_delta_decode(*rows, w, mine, slots)
        wanted: Any = reference.gated_delta_decode(*rows, w, wanted_state, slots)
        assert near(got, wanted, 0.01)
        assert near(mine.recurrent, wanted_state.recurrent, 1e-5)
        assert torch.equal(mine.conv, wanted_state.conv)


@pytest.mark.skipif(not HOPPER, reason="too long for the interpreter")
def test_a_row_is_the_same_among_64_and_alone(config: HopperStep | None) -> None:
    w, start, slots, inputs = make_weights(), make_state(), slots_of(64), make_inputs(64)
    together = copy.deepcopy(start)
    got: Any = gated_delta.gated_delta_decode(*inputs, w, together, slots)
    for row in (0, 31, 63):
        alone, slot = copy.deepcopy(start), int(slots[row])
        one: Any = gated_delta.gated_delta_decode(*(x[row : row + 1] for x in inputs), w, alone, slots[row : row + 1])
        assert torch.equal(one[0], got[row])
        assert torch.equal(alone.recurrent[slot], together.recurrent[slot])
        assert torch.equal(alone.conv[slot], together.conv[slot])


@pytest.mark.skipif(not HOPPER, reason="too long for the interpreter")
@pytest.mark.parametrize("accepted", [0, 1, 4])
def test_verify_and_commit_of_many_slots_are_decode(config: HopperStep | None, accepted: int) -> None:
    w, start, slots, inputs = make_weights(), make_state(), slots_of(40), make_inputs(160)
    verified, decoded = copy.deepcopy(start), copy.deepcopy(start)
    got: Any = gated_delta.gated_delta_verify(*inputs, w, verified, slots, 4)
    assert torch.equal(verified.recurrent, start.recurrent)
    assert torch.equal(verified.conv, start.conv)
    gated_delta.gated_delta_commit(verified, slots, torch.full_like(slots, accepted))
    for j in range(accepted):
        one: Any = gated_delta.gated_delta_decode(*(x[j::4] for x in inputs), w, decoded, slots)
        assert torch.equal(one, got[j::4])
    assert torch.equal(verified.recurrent, decoded.recurrent)
    assert torch.equal(verified.conv, decoded.conv)


def test_where_it_fits() -> None:
    """By the model and the device only: never by the number of rows."""
    assert delta_hopper.fits(make_weights(), make_state()) == HOPPER
    assert not delta_hopper.fits(make_weights(64), make_state(64))
    assert not delta_hopper.fits(make_weights(taps=3), make_state())
