"""Gated DeltaNet on a GPU against the reference: on a GPU as it is, elsewhere in Triton's interpreter."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pocketllm.kernels.reference import gated_delta as reference
from pocketllm.kernels.triton import gated_delta
from pocketllm.kernels.types import Bridge, GatedDeltaWeights, LayerState, LinearWeight, Paired
from pocketllm.weights.formats import FORMATS

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SLOTS, DRAFTS = 3, 5
SMALL = (1, 3, 16, 32)  # key heads, value heads, dk, dv
GEOMETRIES = [SMALL, (2, 6, 128, 128), (1, 2, 48, 80)] if GPU else [SMALL, (2, 2, 20, 16)]


@dataclass(frozen=True)
class Layer:
    weights: GatedDeltaWeights
    state: LayerState
    dtype: torch.dtype = torch.float32

    def inputs(self, tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
        """qkv, z, b, a as a projection gives them: parts of wider rows."""
        w = self.weights
        channels = 2 * w.num_key_heads * w.key_head_dim + w.num_value_heads * w.value_head_dim
        sizes = (channels, w.num_value_heads * w.value_head_dim, w.num_value_heads, w.num_value_heads)
        rows = torch.randn(tokens, sum(sizes), generator=torch.Generator().manual_seed(seed))
        return rows.to(DEVICE, self.dtype).split(sizes, dim=1)

    def copy(self) -> LayerState:
        return copy.deepcopy(self.state)


def make_layer(geometry: tuple[int, int, int, int], dtype: torch.dtype = torch.float32) -> Layer:
    """Random weights and state; the journal, and all of slot 1, is NaN."""
    key_heads, value_heads, dk, dv = geometry
    generator = torch.Generator().manual_seed(7)
    channels, taps = 2 * key_heads * dk + value_heads * dv, 4

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weights = GatedDeltaWeights(
        (random(channels, taps) / 2).to(DEVICE), random(value_heads).to(DEVICE), random(value_heads).to(DEVICE),
        random(dv).to(DEVICE), 1e-6, key_heads, value_heads, dk, dv,
    )  # fmt: skip
    conv, recurrent = random(SLOTS + 1, channels, taps - 1), random(SLOTS + 1, value_heads, dk, dv) / 10
    conv[1], recurrent[1] = float("nan"), float("nan")
    sizes = ((channels,), (key_heads, dk), (value_heads, dv), (value_heads,))
    journal = [torch.full((SLOTS + 1, DRAFTS, *size), float("nan"), device=DEVICE) for size in sizes]
    journal[0] = journal[0].to(dtype)
    return Layer(weights, LayerState(conv.to(DEVICE, dtype), recurrent.to(DEVICE), *journal), dtype)


@pytest.fixture(params=GEOMETRIES, ids=lambda g: "-".join(map(str, g)))
def layer(request: pytest.FixtureRequest) -> Layer:
    return make_layer(request.param)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def same(a: LayerState, b: LayerState) -> bool:
    return all(torch.equal(x.nan_to_num(9), y.nan_to_num(9)) for x, y in ((a.conv, b.conv), (a.recurrent, b.recurrent)))


def prefill(layer: Layer, state: LayerState, inputs: tuple[Tensor, ...], slot: int, start: int, end: int) -> Tensor:
    part = [x[start:end] for x in inputs]
    return gated_delta.gated_delta_prefill(
        *part, layer.weights, state, ints(slot), ints(0, end - start), ints(end)
    )  # fmt: skip


def test_prefill_is_the_reference(layer: Layer) -> None:
    """Three sequences of 130, 1 and 2 tokens in one pass; the first and the second continue at odd places."""
    inputs, mine, wanted_state = layer.inputs(133), layer.copy(), layer.copy()
    arguments = (ints(2, 0, 3), ints(0, 130, 131, 133), ints(150, 78, 2))
    got = gated_delta.gated_delta_prefill(*inputs, layer.weights, mine, *arguments)
    wanted = reference.gated_delta_prefill(*inputs, layer.weights, wanted_state, *arguments)
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=2e-3)
    torch.testing.assert_close(mine.recurrent, wanted_state.recurrent, atol=2e-5, rtol=1e-3, equal_nan=True)
    assert torch.equal(mine.conv.nan_to_num(9), wanted_state.conv.nan_to_num(9))


def test_prefill_in_16_bits_stays_near_the_reference() -> None:
    layer = make_layer(GEOMETRIES[0], torch.bfloat16)
    inputs, mine, wanted_state = layer.inputs(100), layer.copy(), layer.copy()
    got = prefill(layer, mine, inputs, 2, 0, 100).float()
    exact = [x.float() for x in inputs]
    arguments = (ints(2), ints(0, 100), ints(100))
    wanted = reference.gated_delta_prefill(*exact, layer.weights, wanted_state, *arguments)
    assert (got - wanted).norm() < 0.03 * wanted.norm()
    change = (mine.recurrent[2] - wanted_state.recurrent[2]).norm()
    assert change < 0.02 * wanted_state.recurrent[2].norm()


def test_decode_and_verify_in_16_bits_stay_near_the_reference() -> None:
    layer = make_layer(GEOMETRIES[0], torch.bfloat16)
    inputs, mine, wanted_state = layer.inputs(4), layer.copy(), layer.copy()
    for step in (slice(0, 2), slice(2, 4)):
        part = [x[step] for x in inputs]
        for verify in (True, False):  # the same tokens; decode moves the state on
            arguments = (*part, layer.weights), ((ints(0, 2), 1) if verify else (ints(0, 2),))
            name = "gated_delta_verify" if verify else "gated_delta_decode"
            got = getattr(gated_delta, name)(*arguments[0], mine, *arguments[1]).float()
            wanted = getattr(reference, name)(*arguments[0], wanted_state, *arguments[1]).float()
            assert (got - wanted).norm() < 0.02 * wanted.norm()
    assert torch.equal(mine.conv[2], wanted_state.conv[2])
    assert torch.equal(mine.journal_x[2, 0], wanted_state.journal_x[2, 0])
    torch.testing.assert_close(mine.recurrent[2], wanted_state.recurrent[2], atol=1e-5, rtol=1e-4)


def test_equal_keys_written_without_decay_stay_exact() -> None:
    """The triangular system at its worst: every token writes along the same key, and nothing is forgotten."""
    layer = make_layer(SMALL)
    qkv, z, b, a = (x.clone() for x in layer.inputs(64))
    qkv[:, :], b[:, :], a[:, :] = qkv[:1], 6.0, -30.0
    mine, wanted_state = layer.copy(), layer.copy()
    got = prefill(layer, mine, (qkv, z, b, a), 2, 0, 64)
    arguments = (ints(2), ints(0, 64), ints(64))
    wanted = reference.gated_delta_prefill(qkv, z, b, a, layer.weights, wanted_state, *arguments)
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=2e-3)
    torch.testing.assert_close(mine.recurrent[2], wanted_state.recurrent[2], atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("cuts", [(64, 128), (128,)], ids=str)
def test_cuts_at_multiples_of_64_change_no_bit(cuts: tuple[int, ...]) -> None:
    layer = make_layer(GEOMETRIES[-1])
    inputs, whole_state, cut_state = layer.inputs(150), layer.copy(), layer.copy()
    whole = prefill(layer, whole_state, inputs, 2, 0, 150)
    ends = (*cuts, 150)
    parts = [prefill(layer, cut_state, inputs, 2, start, end) for start, end in zip((0, *cuts), ends, strict=True)]
    assert torch.equal(torch.cat(parts), whole)
    assert same(cut_state, whole_state)


def test_a_sequence_alone_is_itself_in_a_batch() -> None:
    layer = make_layer(SMALL)
    inputs, together, alone = layer.inputs(90), layer.copy(), layer.copy()
    arguments = (ints(0, 2), ints(0, 20, 90), ints(20, 70))
    got = gated_delta.gated_delta_prefill(*inputs, layer.weights, together, *arguments)
    tail = tuple(x[20:] for x in inputs)
    assert torch.equal(prefill(layer, alone, tail, 2, 0, 70), got[20:])
    assert torch.equal(alone.recurrent[2], together.recurrent[2])
    assert torch.equal(alone.conv[2], together.conv[2])


def test_decode_of_several_slots_is_each_alone(layer: Layer) -> None:
    inputs, together, wanted_state = layer.inputs(3), layer.copy(), layer.copy()
    slots = ints(2, SLOTS, 0)
    got = gated_delta.gated_delta_decode(*inputs, layer.weights, together, slots)
    wanted = reference.gated_delta_decode(*inputs, layer.weights, wanted_state, slots)
    torch.testing.assert_close(got, wanted, atol=5e-4, rtol=1e-3)
    torch.testing.assert_close(together.recurrent, wanted_state.recurrent, atol=1e-5, rtol=1e-4, equal_nan=True)
    assert torch.equal(together.conv.nan_to_num(9), wanted_state.conv.nan_to_num(9))
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


def test_prefill_goes_on_as_decode_does() -> None:
    """70 tokens at once, or 66 and then one after the other: near to each other, and the same conv tail."""
    layer = make_layer(SMALL)
    inputs, whole, stepped = layer.inputs(70), layer.copy(), layer.copy()
    wanted = prefill(layer, whole, inputs, 0, 0, 70)
    prefill(layer, stepped, inputs, 0, 0, 66)
    for t in range(66, 70):
        row = gated_delta.gated_delta_decode(*(x[t : t + 1] for x in inputs), layer.weights, stepped, ints(0))
        torch.testing.assert_close(row[0], wanted[t], atol=1e-3, rtol=2e-3)
    assert torch.equal(stepped.conv[0], whole.conv[0])
    torch.testing.assert_close(stepped.recurrent[0], whole.recurrent[0], atol=2e-5, rtol=1e-3)


def test_more_tokens_than_the_journal_holds_are_refused() -> None:
    layer = make_layer(SMALL)
    with pytest.raises(ValueError, match="at most 5"):
        gated_delta.gated_delta_verify(*layer.inputs(6), layer.weights, layer.state, ints(0), 6)


@pytest.mark.skipif(not GPU, reason="the interpreter's products depend on how many rows they have")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_how_the_scan_shares_out_columns_changes_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on how many sequences there are, so a row's result must not depend on it."""
    layer = make_layer((1, 2, 128, 128), dtype)
    inputs, results = layer.inputs(150), []
    for few in (0, 132):
        monkeypatch.setattr(gated_delta, "FEW", few)
        state = layer.copy()
        results.append((prefill(layer, state, inputs, 2, 0, 150), state.recurrent[2]))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_short_and_empty_sequences_in_a_batch() -> None:
    """Shorter than the convolution's taps, empty, and longer than a program's tokens: each as the reference has it."""
    layer = make_layer(SMALL)
    inputs, mine, wanted_state = layer.inputs(204), layer.copy(), layer.copy()
    arguments = (ints(0, 3, 2), ints(0, 2, 2, 204), ints(66, 64, 202))
    got = gated_delta.gated_delta_prefill(*inputs, layer.weights, mine, *arguments)
    wanted = got.clone()
    for seq, (start, end) in ((0, (0, 2)), (2, (2, 204))):
        part, slot, kv_len = [x[start:end] for x in inputs], arguments[0][seq : seq + 1], arguments[2][seq : seq + 1]
        bounds = ints(0, end - start)
        wanted[start:end] = reference.gated_delta_prefill(*part, layer.weights, wanted_state, slot, bounds, kv_len)
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=2e-3)
    torch.testing.assert_close(mine.recurrent, wanted_state.recurrent, atol=2e-5, rtol=1e-3, equal_nan=True)
    assert torch.equal(mine.conv.nan_to_num(9), wanted_state.conv.nan_to_num(9))


@pytest.mark.parametrize("name", ["gated_delta_decode", "gated_delta_verify"])
def test_gates_may_come_as_summands(name: str) -> None:
    """In parts of wider rows, as a product that is split over K leaves them; the rest is in 16 bits."""
    layer = make_layer(SMALL, torch.bfloat16)
    arguments = (ints(2, 0),) if name == "gated_delta_decode" else (ints(3), 2)
    qkv, z, _, _ = layer.inputs(2)
    heads = layer.weights.num_value_heads
    parts = torch.randn(2, 2, 2 * heads + 1, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    b, a = parts[:, :, :heads], parts[:, :, heads : 2 * heads]
    results = []
    for module, gates in ((gated_delta, (b, a)), (gated_delta, (b[0] + b[1], a[0] + a[1])), (reference, (b, a))):
        results.append(getattr(module, name)(qkv, z, *gates, layer.weights, layer.copy(), *arguments).float())
    assert torch.equal(results[0], results[1])
    assert (results[0] - results[2]).norm() < 0.02 * results[2].norm()


def bridge(columns: int) -> Bridge:
    """A reader that takes pairs of so many columns."""
    fmt, norm = FORMATS["fp8_block"], torch.ones(64, device=DEVICE)
    tensors = tuple(torch.zeros(spec.shape, dtype=spec.dtype, device=DEVICE) for spec in fmt.specs(64, columns))
    out = LinearWeight(fmt, (64, columns), tensors)
    return Bridge(out, norm, out, out, None, (), 1e-6)


def unpaired(x: Paired) -> Tensor:
    """scale (high + low / 16), [M, K] float32."""
    values = x.codes.float() * x.scales.T.repeat_interleave(128, dim=1)
    half = len(values) // 2
    return (values[:half] + values[half:])[: len(x)]


@pytest.mark.parametrize("q_len", [1, 3])
def test_pairs_for_a_bridge(q_len: int) -> None:
    """Decode (q_len 1) and verify: what the tensor would hold in 32 bits, but for 8 bits and a sign; the same states."""
    layer = make_layer((1, 2, 16, 128), torch.bfloat16)
    qkv, z, b, a = layer.inputs(2 * q_len)
    results: list[Any] = []
    states = []
    for gate, readers in ((z.float(), ()), (z, bridge(256))):
        state = layer.copy()
        arguments = (qkv, gate, b, a, layer.weights, state, ints(2, 0))
        if q_len == 1:
            results.append(gated_delta.gated_delta_decode(*arguments, readers=readers))
        else:
            results.append(gated_delta.gated_delta_verify(*arguments, q_len, readers=readers))
        states.append(state)
    plain, paired = results
    assert isinstance(paired, Paired)
    assert paired.dtype == torch.bfloat16
    assert paired.shape == plain.shape
    assert paired.codes.shape == (16, 256)
    largest = plain.view(-1, 2, 128).abs().amax(dim=2).repeat_interleave(128, dim=1)
    assert ((unpaired(paired) - plain).abs() <= 1.01 * 2**-9 * plain.abs() + 2**-20 * largest).all()
    assert torch.equal(paired.scales[:, 8 : 8 + 2 * q_len] * 16, paired.scales[:, : 2 * q_len])
    assert torch.equal(states[0].recurrent.nan_to_num(9), states[1].recurrent.nan_to_num(9))
    assert torch.equal(states[0].journal_d.nan_to_num(9), states[1].journal_d.nan_to_num(9))


def test_a_row_of_pairs_is_the_same_decoded_and_verified() -> None:
    layer, readers = make_layer((1, 2, 16, 128), torch.bfloat16), bridge(256)
    inputs, decoded = layer.inputs(6), layer.copy()
    verified: Any = gated_delta.gated_delta_verify(*inputs, layer.weights, layer.copy(), ints(0, 2), 3, readers=readers)
    for j in range(3):
        rows = [x[[j, 3 + j]] for x in inputs]
        row: Any = gated_delta.gated_delta_decode(*rows, layer.weights, decoded, ints(0, 2), readers=readers)
        for half in (0, 8):  # high parts, then low ones
            got, wanted = row.codes[half : half + 2], verified.codes[[half + j, half + 3 + j]]
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
            assert torch.equal(row.scales[:, half : half + 2], verified.scales[:, [half + j, half + 3 + j]])


def test_no_pairs_of_heads_that_are_no_group() -> None:
    layer = make_layer((1, 2, 16, 32), torch.bfloat16)
    inputs = layer.inputs(1)
    got = gated_delta.gated_delta_decode(*inputs, layer.weights, layer.copy(), ints(0), readers=bridge(64))
    wanted = gated_delta.gated_delta_decode(*inputs, layer.weights, layer.copy(), ints(0))
    assert isinstance(got, Tensor)
    assert isinstance(wanted, Tensor)
    assert torch.equal(got, wanted)
