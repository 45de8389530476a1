"""From mixer to mixer in one kernel: pairs of e4m3, how a product is shared out, and the seam in the model anywhere; the
kernel itself, which is made for Hopper, on a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from engines import engine, feed, prompt
from pocketllm.kernels import reference
from pocketllm.kernels import triton as kernels
from pocketllm.kernels.protocol import Cross
from pocketllm.kernels.triton.bridge import ADDED_ROWS, GROUPS, MOST_UNEVEN, SIZES, num_parts, own_pairs
from pocketllm.kernels.triton.linear_tuning import linear_table
from pocketllm.kernels.triton.pairs import round_e4m3, to_pairs, weight_pairs
from pocketllm.kernels.triton.quantize import times_sigmoid
from pocketllm.kernels.types import Bridge, LinearWeight, Paired
from pocketllm.parallel import SMALL_BATCH, Summands
from pocketllm.weights.formats import FORMATS, encode

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
BRIDGED = GPU and linear_table(DEVICE).bridge
on_hopper = pytest.mark.skipif(not BRIDGED, reason="needs a GPU whose table says bridge")


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def values_of(x: Paired) -> Tensor:
    """[M, K] float32: what pairs stand for."""
    rows, k = len(x.codes) // 2, x.shape[1]
    codes = x.codes.float().view(2, rows, k // 128, 128)
    return (codes * x.scales.view(-1, 2, rows).permute(1, 2, 0)[..., None]).sum(0).view(rows, k)[: len(x)]


def rows_with_outliers(num_rows: int, k: int) -> Tensor:
    x = torch.randn(num_rows, k, device=DEVICE)
    x[:, 5] *= 300
    x[0, 128:256] = 0
    return x.bfloat16()


@triton.jit
def round_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, round_e4m3(tl.load(x + i)))


def test_rounding_to_e4m3() -> None:
    """As torch rounds, ties and small numbers included; and NaN, whatever its bits, stays NaN."""
    x = (torch.randn(4096) * torch.exp2(torch.randint(-14, 8, (4096,)))).clamp(-255, 255)
    x[:4] = torch.tensor([0.015625, -0.015625, 0.0, 17.0])
    x[4:8].view(torch.int32).copy_(torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, 0x7F800001], dtype=torch.int64).int())
    out = torch.empty(4096, device=DEVICE)
    round_kernel[(1,)](x.to(DEVICE), out, 4096)
    assert out[4:8].isnan().all()
    wanted = x.to(torch.float8_e4m3fn).float()
    assert torch.equal(out.cpu()[:4], wanted[:4])
    assert torch.equal(out.cpu()[8:], wanted[8:])


@pytest.mark.parametrize("num_rows", [1, 3, 8, 33])
def test_pairs_hold_all_of_a_bfloat16(num_rows: int) -> None:
    x = rows_with_outliers(num_rows, 512)
    got, largest = values_of(to_pairs(x)), x.float().view(num_rows, 4, 128).abs().amax(-1, keepdim=True)
    small = (x.float().view(num_rows, 4, 128).abs() < largest / 2**12).view(num_rows, 512)
    assert torch.equal(got[~small], x.float()[~small])
    assert ((got - x.float()).abs().view(num_rows, 4, 128) <= largest / 2**20).all()


def test_pairs_of_a_gated_result() -> None:
    """Gates lie apart from each other, as attention's do; nothing is rounded to 16 bits before."""
    x, gate = rows_with_outliers(3, 512), torch.randn(3, 2, 512, device=DEVICE).bfloat16()[..., 256:]
    wanted = (x.view(3, 2, 256).float() * torch.sigmoid(gate.float())).view(3, 512)
    got = values_of(to_pairs(x, gate, times_sigmoid))
    assert ((got - wanted).abs().view(3, 4, 128) <= wanted.abs().view(3, 4, 128).amax(-1, keepdim=True) / 2**8).all()
    assert ((got - wanted).norm() / wanted.norm()).item() < 2e-3


def test_a_narrow_matrix_as_pairs() -> None:
    matrix = torch.randn(96, 512).bfloat16()
    codes, scales = weight_pairs(matrix)
    blocks = codes.float().view(2, 128, 4, 128) * scales[:, None, :, None]
    got = blocks.sum(0).view(128, 512)
    assert torch.equal(got[96:], torch.zeros(32, 512))
    assert (got[:96] - matrix.float()).abs().max() <= matrix.float().abs().max() / 2**20
    planned = weight_pairs(torch.empty(96, 512, dtype=torch.bfloat16, device="meta"))
    assert [(t.shape, t.dtype) for t in planned] == [(codes.shape, codes.dtype), (scales.shape, scales.dtype)]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 140))
def test_every_part_of_a_tile_has_one_writer(tiles: int, units: int, programs: int) -> None:
    """The kernel's arithmetic: which programs share a tile, and which part each of them writes."""
    total = tiles * units
    programs = min(programs, total)
    written: dict[int, list[int]] = {tile: [] for tile in range(tiles)}
    for program in range(programs):
        first, last = total * program // programs, total * (program + 1) // programs - 1
        assert first <= last
        for tile in range(first // units, last // units + 1):
            begun = ((tile * units + 1) * programs - 1) // total
            written[tile].append(program - begun)
    assert all(parts == list(range(len(parts))) for parts in written.values())
    assert max(map(len, written.values())) == num_parts(tiles, units, programs)


@given(st.data(), st.integers(1, 3), st.integers(1, 40), st.integers(1, 140))
def test_pairs_of_tiles_are_shared_out(data: st.DataObject, own: int, units: int, programs: int) -> None:
    """Every unit has one program. Those of shared pairs come first, at most one part to a program, and in one tile."""
    from pocketllm.kernels.triton.bridge_pairs import run_of_pairs

    shared = data.draw(st.integers(0, programs // 9))
    pairs = own * programs + shared
    shares = own_pairs(2 * pairs, units, programs)
    assume(shares is not None)
    assert shares is not None
    assert shares[:2] == (own, shared)
    cut, taken = shares[2], []
    for program in range(programs):
        first, begun, jump, total = run_of_pairs.fn(program, shares, units)
        run = [first + i + (0 if i < begun else jump) for i in range(total)]
        assert begun in (0, cut)
        assert len({unit // units for unit in run[:begun]}) <= 1
        assert run[begun:] == list(range(run[begun], run[begun] + 2 * units * own))
        assert total * programs <= MOST_UNEVEN * 2 * pairs * units
        taken += run
    assert sorted(taken) == list(range(2 * pairs * units))
    parts = 2 * units * shared // cut
    assert parts + shared * (SMALL_BATCH // ADDED_ROWS) <= programs  # the last ones add them up


def test_programs_of_the_27b_have_pairs_of_their_own() -> None:
    assert own_pairs(2 * 17408 // 128, 5120 // 256, 132) == (1, 4, 2)
    assert own_pairs(17408 // 128, 5120 // 256, 132) is None  # a rank of two: fewer pairs than programs


@pytest.mark.parametrize("rows", SIZES)
def test_a_ring_fits_and_cannot_lock_up(rows: int) -> None:
    """Who feeds it waits for the unit asked for `flight` before: were that no longer in the ring, it would wait for ever."""
    warps, places_of_weights, places_of_rows, flight = SIZES[rows]
    assert warps % 4 == 0
    assert 0 < flight <= places_of_weights
    assert places_of_rows > 0
    ring = GROUPS * (places_of_weights * 128 * 128 + places_of_rows * 2 * rows * (128 + 4))
    turned = 4 * 128 * min(rows, 32)  # results on their way to another layout
    assert ring + turned + 4096 <= 227 * 1024  # Hopper's shared memory; 4 KiB for scales and barriers


def test_pairs_are_for_bridges_alone() -> None:
    x = to_pairs(torch.randn(2, 128, device=DEVICE).bfloat16())
    weight = LinearWeight(FORMATS["bf16"], (8, 128), (torch.randn(8, 128, device=DEVICE).bfloat16(),))
    with pytest.raises(ValueError, match="pairs"):
        kernels.linear(x, weight)


class Bridged:
    """The reference backend, with a bridge that goes step by step, and b and a of the delta rule in two parts."""

    def __init__(self) -> None:
        self.crossed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    def bridge(self, weights: Bridge, num_rows: int, dtype: object, places: Any = ()) -> Cross | None:
        return lambda x, residual: self._cross(weights, x, residual)  # type: ignore[arg-type]

    def _cross(self, weights: Bridge, x: Tensor, residual: Tensor) -> list[Tensor]:
        self.crossed += 1
        parts = step_by_step(weights, x, residual)
        if weights.next_norm is None:
            return [torch.stack((parts[0] / 2, parts[0] / 2))]
        return [parts[0], *(torch.stack((part / 4, part * 3 / 4)) for part in parts[1:])]


def step_by_step(weights: Bridge, x: Tensor, residual: Tensor) -> list[Tensor]:
    h = reference.add_rms_norm(Summands.of(reference.linear(x, weights.out)), residual, weights.norm, weights.eps)
    down = reference.linear(reference.gated_linear(h, weights.gate_up), weights.down)
    if weights.next_norm is None:
        return [down]
    h = reference.add_rms_norm(Summands.of(down), residual, weights.next_norm, weights.eps)
    return [reference.linear(h, weight) for weight in weights.next_in]


def _told(operation: Callable[..., Any], readers: list[tuple[str, bool]]) -> Callable[..., Any]:
    """The operation, which keeps its name and whether a bridge was said to read its result."""

    def call(*args: Any) -> Any:
        readers.append((operation.__name__, isinstance(args[-1], Bridge)))
        return operation(*args)

    return call


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_the_model_goes_over_bridges(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits as step by step; of dense models, every block's end is a bridge."""
    options: dict[str, Any] = {"kernels": "reference", "kv_cache_dtype": "fp32", "max_draft_tokens": 2}
    plain, bridged = engine(kind, tmp_path / "a", **options), engine(kind, tmp_path / "b", **options)
    readers: list[tuple[str, bool]] = []
    for name in ("gated_delta_decode", "gated_delta_verify", "sigmoid_mul"):
        monkeypatch.setattr(reference, name, _told(getattr(reference, name), readers))
    ops, model = Bridged(), bridged.runner.model
    monkeypatch.setattr(model, "_kernels", ops)
    slots = [plain.acquire_slot(), bridged.acquire_slot()]
    for step, ids in (("prefill", prompt(9)), ("decode", [7]), ("verify", [3, 4, 5])):
        wanted, got = (feed(e, {s: ids}, step)[s] for e, s in zip((plain, bridged), slots, strict=True))
        assert torch.allclose(got, wanted, atol=1e-5)
    assert ops.crossed == 3 * len(model.blocks)
    told = [kind for kind, bridges in readers if bridges]
    assert set(told) == ({"gated_delta_decode", "gated_delta_verify", "sigmoid_mul"} if kind == "qwen3_5" else set())
    assert len(told) * 2 == len(readers)  # and of the plain engine, none


def test_attention_adds_up_a_narrow_v(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V may be stored otherwise than q and k; a bridge then gives it as two summands of 128 columns."""
    options: dict[str, Any] = {"kernels": "reference", "kv_cache_dtype": "fp32"}
    plain, other = engine("qwen3", tmp_path / "a", **options), engine("qwen3", tmp_path / "b", **options)
    mixer = other.runner.model.blocks[0].mixer
    width, outputs = mixer.num_kv_heads * mixer.head_dim, mixer.projection.outputs  # type: ignore[union-attr]

    def apart(x: Tensor) -> list[Tensor]:
        (qkv,) = outputs(x)
        v = torch.nn.functional.pad(qkv[:, -width:], (0, 128 - width))
        return [qkv[:, :-width], torch.stack((v / 2, v / 2))]

    monkeypatch.setattr(mixer.projection, "outputs", apart)
    slots = [plain.acquire_slot(), other.acquire_slot()]
    for step, ids in (("prefill", prompt(9)), ("decode", [7])):
        wanted, got = (feed(e, {s: ids}, step)[s] for e, s in zip((plain, other), slots, strict=True))
        assert torch.allclose(got, wanted, atol=1e-5)


def random_bridge(hidden: int, width: int, inner: int, outputs: int, *, small: bool, last: bool) -> Bridge:
    def fp8(n: int, k: int) -> LinearWeight:
        return encode(FORMATS["fp8_block"], torch.randn(n, k, device=DEVICE) * k**-0.5)

    def gain() -> Tensor:
        return torch.rand(hidden, device=DEVICE) + 0.5

    following = [fp8(outputs, hidden)]
    if small:
        matrix = (torch.randn(96, hidden, device=DEVICE) * hidden**-0.5).bfloat16()
        following.append(kernels.pack_weight(LinearWeight(FORMATS["bf16"], (96, hidden), (matrix,))))
    return Bridge(
        fp8(hidden, width), gain(), fp8(2 * inner, hidden), fp8(hidden, inner), None if last else gain(),
        () if last else tuple(following), 1e-6,
    )  # fmt: skip


# The third's programs have a pair of gate and up each, and four are left over; the last one's two have two each, none is.
SHAPES = [(512, 256, 768, 384), (2048, 4096, 6144, 8192), (5120, 6144, 17408, 16384), (256, 256, 512, 256)]


@on_hopper
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("small", [False, True])
def test_a_bridge_is_what_it_stands_for(shape: tuple[int, int, int, int], small: bool) -> None:
    weights = random_bridge(*shape, small=small, last=False)
    hidden, width, _, _ = shape
    x, residual = torch.randn(64, width, device=DEVICE).bfloat16(), torch.randn(64, hidden, device=DEVICE).bfloat16()
    kept, exact = residual.clone(), residual.float()
    wanted = step_by_step(weights, x.float(), exact)
    cross = kernels.bridge(weights, 64, torch.bfloat16)
    assert cross is not None
    whole = cross(x, kept)
    for got, want in zip(whole, wanted, strict=True):
        got = got.float() if got.dim() == 2 else got.sum(0)[:, : want.shape[1]]
        assert ((got - want).norm() / want.norm()).item() < 6e-3
    assert ((kept.float() - exact).norm() / exact.norm()).item() < 4e-3
    for m in (1, 2, 8, 9, 17, 33, 63):  # a row's bits do not depend on the others
        for first in (0, 64 - m):
            some = residual[first : first + m].clone()
            part = kernels.bridge(weights, m, torch.bfloat16)(x[first : first + m], some)  # type: ignore[misc]
            assert torch.equal(some, kept[first : first + m])
            assert all(torch.equal(a, b[..., first : first + m, :]) for a, b in zip(part, whole, strict=True))


@on_hopper
def test_the_last_bridge_leaves_summands() -> None:
    weights = random_bridge(*SHAPES[1], small=False, last=True)
    x, residual = torch.randn(5, 4096, device=DEVICE).bfloat16(), torch.randn(5, 2048, device=DEVICE).bfloat16()
    exact = residual.float()
    (wanted,) = step_by_step(weights, x.float(), exact)
    (parts,) = kernels.bridge(weights, 5, torch.bfloat16)(x, residual)  # type: ignore[misc]
    assert parts.shape[1:] == wanted.shape
    assert ((parts.sum(0) - wanted).norm() / wanted.norm()).item() < 6e-3


@on_hopper
@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("rows", [8, 64])
def test_bridges_follow_each_other_in_a_graph(shape: tuple[int, int, int, int], rows: int) -> None:
    """Flags of tiles and counts of parts only ever grow: many kernels, replayed, give the same bits every time."""
    weights, (hidden, width, _, _) = random_bridge(*shape, small=True, last=False), shape
    x, residual = (torch.randn(rows, n, device=DEVICE).bfloat16() for n in (width, hidden))
    cross, kept = kernels.bridge(weights, rows, torch.bfloat16), torch.empty_like(residual)
    assert cross is not None

    def run() -> list[Tensor]:
        kept.copy_(residual)
        for _ in range(5):
            outputs = cross(x, kept)
        return [kept, *outputs]

    wanted = [t.clone() for t in run()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_no_bridge_where_none_can_be() -> None:
    """Wrong dtype, too many rows, K that is no multiple of a unit, weights that are not FP8: step by step."""
    weights = random_bridge(512, 256, 768, 384, small=False, last=False)
    assert kernels.bridge(weights, 65, torch.bfloat16) is None
    assert kernels.bridge(weights, 8, torch.float32) is None
    odd = random_bridge(512, 384, 768, 384, small=False, last=False)
    assert kernels.bridge(odd, 8, torch.bfloat16) is None
    if not BRIDGED:
        assert kernels.bridge(weights, 8, torch.bfloat16) is None


def test_no_bridge_whose_scales_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge: Any = importlib.import_module("pocketllm.kernels.triton.bridge")  # the package has a function of that name
    monkeypatch.setattr(bridge, "multiprocessors", lambda _: 132)
    weights = random_bridge(512, 256, 768, 384, small=False, last=False)
    assert bridge._fits(weights)
    monkeypatch.setattr(bridge, "multiprocessors", lambda _: 1)  # has all units: 4 + 32 + 16 + 16 of 8 bytes
    monkeypatch.setattr(bridge, "KEPT", 8 * 68 - 1)
    assert not bridge._fits(weights)
    monkeypatch.setattr(bridge, "KEPT", 8 * 68)
    assert bridge._fits(weights)
