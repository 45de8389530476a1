"""Gated DeltaNet on a CPU against the reference; and prefill, decode, verify and commit bit for bit against each other."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from pocketllm.kernels.numba import gated_delta, threads
from pocketllm.kernels.reference import gated_delta as reference
from pocketllm.kernels.types import GatedDeltaWeights, LayerState

SLOTS, DRAFTS = 3, 5
GEOMETRIES = [(2, 6, 16, 16), (2, 4, 128, 128), (1, 2, 48, 80)]  # key heads, value heads, dk, dv


@dataclass(frozen=True)
class Layer:
    weights: GatedDeltaWeights
    state: LayerState

    def inputs(self, tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
        """qkv, z, b, a as a projection gives them: parts of wider rows."""
        w = self.weights
        channels = 2 * w.num_key_heads * w.key_head_dim + w.num_value_heads * w.value_head_dim
        sizes = (channels, w.num_value_heads * w.value_head_dim, w.num_value_heads, w.num_value_heads)
        return torch.randn(tokens, sum(sizes), generator=torch.Generator().manual_seed(seed)).split(sizes, dim=1)

    def copy(self) -> LayerState:
        return copy.deepcopy(self.state)


@pytest.fixture(params=GEOMETRIES, ids=lambda g: "-".join(map(str, g)))
def layer(request: pytest.FixtureRequest) -> Layer:
    """Random weights and state; the journal, and all of slot 1, is NaN."""
    key_heads, value_heads, dk, dv = request.param
    generator = torch.Generator().manual_seed(7)
    channels, taps = 2 * key_heads * dk + value_heads * dv, 4

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weights = GatedDeltaWeights(
        random(channels, taps) / 2, random(value_heads), random(value_heads), random(dv), 1e-6,
        key_heads, value_heads, dk, dv,
    )  # fmt: skip
    conv, recurrent = random(SLOTS + 1, channels, taps - 1), random(SLOTS + 1, value_heads, dk, dv) / 10
    conv[1], recurrent[1] = float("nan"), float("nan")
    sizes = ((channels,), (key_heads, dk), (value_heads, dv), (value_heads,))
    journal = [torch.full((SLOTS + 1, DRAFTS, *size), float("nan")) for size in sizes]
    return Layer(weights, LayerState(conv, recurrent, *journal))


@pytest.fixture(params=[1, 3], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = threads.pool().num_threads
    threads.set_num_threads(request.param)
    yield request.param
    threads.set_num_threads(before)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def same(a: LayerState, b: LayerState) -> bool:
    return torch.equal(a.conv.nan_to_num(9), b.conv.nan_to_num(9)) and torch.equal(
        a.recurrent.nan_to_num(9), b.recurrent.nan_to_num(9)
    )


def test_prefill_matches_the_chunked_reference(layer: Layer) -> None:
    """Two sequences, of 130 tokens and of 1, in one pass; the second continues at an odd place."""
    inputs, mine, want_state = layer.inputs(131), layer.copy(), layer.copy()
    arguments = (ints(2, 0), ints(0, 130, 131), ints(130, 78))
    got = gated_delta.gated_delta_prefill(*inputs, layer.weights, mine, *arguments)
    want = reference.gated_delta_prefill(*inputs, layer.weights, want_state, *arguments)
    torch.testing.assert_close(got, want, atol=5e-4, rtol=1e-3)
    torch.testing.assert_close(mine.recurrent, want_state.recurrent, atol=1e-5, rtol=1e-4, equal_nan=True)
    assert torch.equal(mine.conv.nan_to_num(9), want_state.conv.nan_to_num(9))


def test_prefill_is_decode_bit_for_bit_however_it_is_cut(layer: Layer) -> None:
    inputs, whole_state = layer.inputs(100), layer.copy()

    def prefill(state: LayerState, start: int, end: int) -> Tensor:
        part = [x[start:end] for x in inputs]
        bounds = ints(0, end - start)
        return gated_delta.gated_delta_prefill(*part, layer.weights, state, ints(2), bounds, ints(end))

    whole = prefill(whole_state, 0, 100)
    cut_state = layer.copy()
    assert torch.equal(torch.cat([prefill(cut_state, *cut) for cut in ((0, 2), (2, 66), (66, 100))]), whole)
    assert same(cut_state, whole_state)
    state = layer.copy()
    tokens = [
        gated_delta.gated_delta_decode(*(x[i : i + 1] for x in inputs), layer.weights, state, ints(2))
        for i in range(100)
    ]
    assert torch.equal(torch.cat(tokens), whole)
    assert same(state, whole_state)


def test_decode_of_several_slots_is_each_alone(layer: Layer) -> None:
    inputs, together = layer.inputs(3), layer.copy()
    slots = ints(2, SLOTS, 0)
    got = gated_delta.gated_delta_decode(*inputs, layer.weights, together, slots)
    want = reference.gated_delta_decode(*inputs, layer.weights, layer.copy(), slots)
    torch.testing.assert_close(got, want, atol=5e-4, rtol=1e-3)
    alone = layer.copy()
    for i in range(3):
        row = gated_delta.gated_delta_decode(*(x[i : i + 1] for x in inputs), layer.weights, alone, slots[i : i + 1])
        assert torch.equal(row[0], got[i])
    assert same(alone, together)


@pytest.mark.parametrize("accepted", [0, 1, 4])
def test_verify_and_commit_are_decode_bit_for_bit(layer: Layer, accepted: int) -> None:
    inputs, state = layer.inputs(8), layer.copy()
    got = gated_delta.gated_delta_verify(*inputs, layer.weights, state, ints(0, 2), 4)
    assert same(state, layer.state)  # until the commit
    decoded = layer.copy()
    for j in range(4):
        rows = [x[[j, 4 + j]] for x in inputs]
        out = gated_delta.gated_delta_decode(*rows, layer.weights, decoded, ints(0, 2))
        assert torch.equal(out, got[[j, 4 + j]])
        if j == accepted - 1:
            expected = copy.deepcopy(decoded)
    gated_delta.gated_delta_commit(state, ints(0, 2), ints(accepted, accepted))
    assert same(state, expected if accepted else layer.state)


def test_more_tokens_than_the_journal_holds_are_refused(layer: Layer) -> None:
    with pytest.raises(ValueError, match="at most 5"):
        gated_delta.gated_delta_verify(*layer.inputs(6), layer.weights, layer.state, ints(0), 6)
