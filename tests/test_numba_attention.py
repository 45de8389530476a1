"""Attention on a CPU against the reference, and what it promises beyond: the same bits however a pass is put together.

Compiling a format for a head dimension takes seconds, so each format is tested in one geometry, chosen to cover head
dimensions, groups and key biases between them. All storage starts as 0xFF bytes (NaN in every float type): whatever reads
a row that is not the slot's own shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from pocketllm.cache.formats import KV_FORMATS, KVFormat, grouped_v4
from pocketllm.kernels.numba import attention, threads
from pocketllm.kernels.numba.format_pieces import FormatPieces
from pocketllm.kernels.reference import attention as reference
from pocketllm.kernels.types import AttentionMask, KeyBias, LayerKV, PlaneSpec

LENGTHS = (
    1100,
    1,
    529,
    16,
)  # tokens of the slots: three splits, one token, an odd end in the second split, a full page
CAPACITY = 1104
MASKS = [AttentionMask(), AttentionMask(window=100, sinks=5)]


class PairsOfInt16(KVFormat):
    """A format no kernel has heard of: fixed point, V before K in a single plane."""

    name = "pairs_of_int16"
    tolerance = 2e-3

    def planes(self, head_dim: int) -> tuple[PlaneSpec, ...]:
        return (PlaneSpec("vk", 2 * head_dim, torch.int16),)

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return ((torch.cat((v, k), dim=-1) * 1024).round().clamp(-32767, 32767).to(torch.int16),)

    def decode(self, planes: tuple[Tensor, ...], head_dim: int) -> tuple[Tensor, Tensor]:
        v, k = (planes[0].float() / 1024).chunk(2, dim=-1)
        return k, v

    def numba_pieces(self, head_dim: int) -> FormatPieces:
        from pocketllm.kernels.numba.format_simd import load_i16x16, store_i16x16
        from pocketllm.kernels.numba.simd import load_f32x16, splat
        from pocketllm.kernels.numba.vector_math import round_even

        def encode_row(k, v, row):
            for i in range(0, head_dim, 16):
                store_i16x16(row[0] + 2 * i, round_even(load_f32x16(v + 4 * i) * splat(1024.0)))
                store_i16x16(row[0] + 2 * (head_dim + i), round_even(load_f32x16(k + 4 * i) * splat(1024.0)))

        def load_k(row, i):
            return load_i16x16(row[0] + 2 * (head_dim + i))

        def load_v(row, i):
            return load_i16x16(row[0] + 2 * i)

        def scale(row):
            return 1.0 / 1024

        return FormatPieces(self.name, head_dim, (4 * head_dim,), None, encode_row, load_k, load_v, scale, scale)


@dataclass(frozen=True)
class Case:
    kv_format: KVFormat
    head_dim: int
    group: int
    kv_heads: int
    rotary: int = 0  # dims of a key bias that rotate; 0: no bias
    page_size: int = 16
    paged: bool = True

    def __str__(self) -> str:
        return f"{self.kv_format.name}-d{self.head_dim}-g{self.group}"


def case(name: str, *geometry: int, **options: int) -> Case:
    return Case(KV_FORMATS[name], *geometry, **options)


CASES = [
    case("fp32", 16, 1, 3),
    case("fp16", 64, 7, 2, page_size=256),
    case("bf16", 256, 6, 1, paged=False),
    case("fp8", 128, 2, 2, rotary=128),
    case("int8_per_token_head", 96, 4, 2, rotary=48, page_size=64),
    case("turboquant_k8v4", 64, 3, 2, rotary=64),
    case("turboquant_k8v4", 48, 16, 1, paged=False, page_size=64),
    Case(PairsOfInt16(), 32, 5, 2),
]
assert {c.kv_format.name for c in CASES} >= set(KV_FORMATS)


@dataclass(frozen=True)
class World:
    """A layer's storage with four slots filled by `append`, and what was given to it."""

    case: Case
    kv: LayerKV
    k: list[Tensor]
    v: list[Tensor]

    @property
    def scale(self) -> float:
        return self.case.head_dim**-0.5

    def queries(self, *shape: int) -> Tensor:
        c = self.case
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(*shape, c.group * c.kv_heads, c.head_dim, generator=generator)

    def decode(self, q: Tensor, slots: list[int], lengths: list[int], mask: AttentionMask = MASKS[0]) -> Tensor:
        """q [n, Q, Hq, D]."""
        return attention.attend(self.kv, q, ints(slots), ints(lengths), self.scale, mask)

    def prefill(
        self, q: Tensor, bounds: list[int], slots: list[int], lengths: list[int], mask: AttentionMask
    ) -> Tensor:
        return attention.prefill(self.kv, q, ints(slots), ints(bounds), ints(lengths), self.scale, mask)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def empty_layer(c: Case) -> LayerKV:
    slots, pages = len(LENGTHS), -(-CAPACITY // c.page_size)
    count = slots * pages
    planes = []
    for plane in c.kv_format.planes(c.head_dim):
        raw = torch.full((count + 1, c.page_size, c.kv_heads, plane.nbytes), 0xFF, dtype=torch.uint8)
        planes.append(raw.view(plane.dtype))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)) if c.paged else torch.arange(count)
    table = torch.full((slots + 1, pages), count, dtype=torch.int32)
    table[:-1] = order.view(slots, pages)
    bias = None
    if c.rotary:
        angles = torch.outer(torch.arange(float(CAPACITY)), 100.0 ** -torch.linspace(0, 1, c.rotary // 2))
        values = torch.randn(c.kv_heads, c.head_dim, generator=torch.Generator().manual_seed(2))
        bias = KeyBias(values * 3, angles.cos(), angles.sin())
    return LayerKV(tuple(planes), table, c.kv_format, c.head_dim, bias)


@pytest.fixture(scope="module", params=CASES, ids=str)
def world(request: pytest.FixtureRequest) -> World:
    c: Case = request.param
    generator = torch.Generator().manual_seed(3)
    kv = empty_layer(c)
    k, v = ([torch.randn(n, c.kv_heads, c.head_dim, generator=generator) for n in LENGTHS] for _ in range(2))
    for slot, n in enumerate(LENGTHS):  # in two calls, from rows that are parts of wider ones
        both = torch.cat((k[slot], v[slot]), dim=1)
        for part in (slice(0, n // 3), slice(n // 3, n)):
            rows = both[part].split(c.kv_heads, dim=1)
            attention.append(kv, *rows, torch.full((n,), slot)[part], torch.arange(n)[part])
    return World(c, kv, k, v)


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = threads.pool().num_threads
    threads.set_num_threads(request.param)
    yield request.param
    threads.set_num_threads(before)


@pytest.mark.parametrize(("name", "value"), [("UNITS", 62), ("LONGER", 1.01)])
def test_an_edited_constant_finds_no_old_kernels(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that compiled code refers to in its module, and one that it has as a numpy scalar."""
    fmt = KV_FORMATS["turboquant_k8v4"]
    before = fmt.numba_pieces(64).key
    assert fmt.numba_pieces(64).key == before
    monkeypatch.setattr(grouped_v4, name, value)
    assert fmt.numba_pieces(64).key != before


def test_append_stores_what_the_format_defines(world: World) -> None:
    expected = empty_layer(world.case)
    for slot, n in enumerate(LENGTHS):
        reference.append(expected, world.k[slot], world.v[slot], torch.full((n,), slot), torch.arange(n))
    specs = world.case.kv_format.planes(world.case.head_dim)
    # The sums of a searched scale run in another order: it may differ in its last bits; where two scales fit alike, in all.
    searched = {"fp8": ("k", "v"), "turboquant_k8v4": ("v",)}.get(world.case.kv_format.name, ())
    found = {s.name: pair for s, *pair in zip(specs, world.kv.planes, expected.planes, strict=True)}
    for name, (got, want) in found.items():
        if name.removesuffix("_scale") not in searched:
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    for name in searched:
        got_scale, want_scale = found[f"{name}_scale"]
        alike = torch.isclose(got_scale, want_scale, rtol=1e-6, atol=0, equal_nan=True).squeeze(-1)
        if got_scale.dtype == torch.int32:  # a word of several scales
            alike = (got_scale == want_scale).squeeze(-1)
        assert (~alike).float().mean() < 2e-3
        got, want = (plane.view(torch.uint8)[alike].int() for plane in found[name])
        if world.case.kv_format.name == "fp8":
            assert torch.equal(got, want)
        else:
            steps = torch.stack([(got & 15) - (want & 15), (got >> 4) - (want >> 4)])
            assert steps.abs().max() <= 1
            assert (steps != 0).float().mean() < 1e-3


def test_dequantize_is_the_formats_decode(world: World) -> None:
    for slot in (0, 1):
        got = attention.dequantize(world.kv, slot, LENGTHS[slot])
        want = reference.dequantize(world.kv, slot, LENGTHS[slot])
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("mask", MASKS, ids=["all", "window"])
def test_decode_matches_the_reference(world: World, mask: AttentionMask) -> None:
    slots, lengths = [2, 0, 1, 3], [LENGTHS[2], LENGTHS[0], LENGTHS[1], LENGTHS[3]]
    q = world.queries(4, 1)
    got = world.decode(q, slots, lengths, mask)
    want = reference.attend(world.kv, q, ints(slots), ints(lengths), world.scale, mask)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 15, 17, 63, 65, 511, 512, 513, 1024, 1025])
def test_lengths_around_tiles_pages_and_splits(world: World, length: int) -> None:
    q = world.queries(1, 1)
    want = reference.attend(world.kv, q, ints([0]), ints([length]), world.scale, MASKS[0])
    torch.testing.assert_close(world.decode(q, [0], [length]), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mask", MASKS, ids=["all", "window"])
def test_verify_is_decode_bit_for_bit(world: World, mask: AttentionMask, num_threads: int) -> None:
    slots, lengths = [2, 0], [LENGTHS[2], LENGTHS[0]]
    q = world.queries(2, 5)
    together = world.decode(q, slots, lengths, mask)
    for j in range(5):
        alone = world.decode(q[:, j : j + 1], slots, [n - 4 + j for n in lengths], mask)
        assert torch.equal(together[:, j : j + 1], alone)


@pytest.mark.parametrize("mask", MASKS, ids=["all", "window"])
def test_prefill_is_decode_bit_for_bit_however_it_is_cut(world: World, mask: AttentionMask, num_threads: int) -> None:
    length, first = LENGTHS[2], LENGTHS[2] - 150
    q = world.queries(150)
    whole = world.prefill(q, [0, 150], [2], [length], mask)
    want = reference.prefill(world.kv, q, ints([2]), ints([0, 150]), ints([length]), world.scale, mask)
    torch.testing.assert_close(whole, want, atol=2e-5, rtol=1e-4)
    cut = [world.prefill(q[a:b], [0, b - a], [2], [first + b], mask) for a, b in ((0, 1), (1, 64), (64, 150))]
    assert torch.equal(torch.cat(cut), whole)
    for j in (0, 77, 149):
        assert torch.equal(world.decode(q[None, j : j + 1], [2], [first + j + 1], mask)[0], whole[j : j + 1])


def test_a_slot_gives_the_same_bits_alone_and_in_company(world: World, num_threads: int) -> None:
    slots, lengths = [3, 0, 1, 2], [LENGTHS[3], LENGTHS[0], LENGTHS[1], LENGTHS[2]]
    q = world.queries(4, 1)
    together = world.decode(q, slots, lengths)
    for i in range(4):
        assert torch.equal(world.decode(q[i : i + 1], slots[i : i + 1], lengths[i : i + 1])[0], together[i])
    packed = world.queries(16 + 40)
    both = world.prefill(packed, [0, 16, 56], [3, 0], [16, 1000], MASKS[0])
    assert torch.equal(world.prefill(packed[16:], [0, 40], [0], [1000], MASKS[0]), both[16:])


def test_what_other_slots_hold_changes_nothing(world: World) -> None:
    q = world.queries(1, 1)
    before = world.decode(q, [2], [LENGTHS[2]])
    other = world.kv.planes[0].shape[0]
    keep = set(world.kv.block_table[2].tolist())
    planes = [plane.clone() for plane in world.kv.planes]
    for plane in planes:
        raw = plane.view(torch.uint8)
        for page in range(other):
            raw[page] = raw[page] if page in keep else 0xFF
    disturbed = replace(world, kv=replace(world.kv, planes=tuple(planes)))
    assert torch.equal(disturbed.decode(q, [2], [LENGTHS[2]]), before)


def test_half_precision_queries_come_back_in_their_type(world: World) -> None:
    q = world.queries(1, 1).to(torch.bfloat16)
    out = world.decode(q, [2], [LENGTHS[2]])
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, world.decode(q.float(), [2], [LENGTHS[2]]).to(torch.bfloat16))


def test_a_head_dimension_that_cannot_be_read_is_refused() -> None:
    kv = replace(empty_layer(Case(KV_FORMATS["fp32"], 16, 1, 1)), head_dim=24)
    with pytest.raises(ValueError, match="multiple of 16"):
        attention.dequantize(kv, 0, 1)
