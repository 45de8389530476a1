"""The Triton attention kernels against the reference: on a GPU as they are, elsewhere in Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402

from pocketllm.cache.formats import KV_FORMATS, KVFormat  # noqa: E402
from pocketllm.cache.formats.rotation import rotate, signs  # noqa: E402
from pocketllm.kernels import reference  # noqa: E402
from pocketllm.kernels import triton as kernels  # noqa: E402
from pocketllm.kernels.triton import attention  # noqa: E402
from pocketllm.kernels.triton.attend_hopper_queries import pair_e4m3, pair_int8, query_pairs_kernel  # noqa: E402
from pocketllm.kernels.triton.attend_splits import piece_of, share_of  # noqa: E402
from pocketllm.kernels.triton.attention import attend_with  # noqa: E402
from pocketllm.kernels.triton.pieces import TritonPieces  # noqa: E402
from pocketllm.kernels.triton.storage import load_plane  # noqa: E402
from pocketllm.kernels.triton.tuning import AttendConfig, AttentionConfig, PrefillConfig  # noqa: E402
from pocketllm.kernels.types import AttentionMask, KeyBias, LayerKV  # noqa: E402
from toy_formats import Int16Fixed  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
EVERYTHING = AttentionMask()
LONG = 5000 if GPU else 550
DIMS = [64, 128, 256] if GPU else [64]  # from 128 on, Hopper has kernels of its own for most formats


# -- a fifth format, which no kernel has heard of ----------------------------------------------------------------------


@triton.jit
def store_row(planes, row, k, v, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    at = planes[0] + row * (2 * D) + d
    tl.store(
        at, tl.minimum(tl.maximum(v * 1024 + 0.5 * tl.where(v > 0, 1, -1), -32767), 32767).to(tl.int16), mask=d < D
    )
    tl.store(
        at + D, tl.minimum(tl.maximum(k * 1024 + 0.5 * tl.where(k > 0, 1, -1), -32767), 32767).to(tl.int16), mask=d < D
    )


@triton.jit
def load_k(planes, rows, D: tl.constexpr, DP: tl.constexpr):
    return load_plane(planes[0] + D, rows * 2, D, DP).to(tl.float32) / 1024, 1.0


@triton.jit
def load_v(planes, rows, D: tl.constexpr, DP: tl.constexpr):
    return load_plane(planes[0], rows * 2, D, DP).to(tl.float32) / 1024, 1.0


class Toy(Int16Fixed):
    def triton_pieces(self, head_dim: int) -> TritonPieces:
        return TritonPieces(None, torch.float32, False, store_row, load_k, load_v)


FORMATS = {**KV_FORMATS, "toy": Toy()}
LOSSY = ("fp8", "int8_per_token_head", "turboquant_k8v4")
every_format = pytest.mark.parametrize("kv_format", FORMATS.values(), ids=FORMATS)
lossy_formats = pytest.mark.parametrize("kv_format", [FORMATS[n] for n in LOSSY], ids=LOSSY)


def make_kv(
    kv_format: KVFormat, lens: list[int], *, dim: int = 64, heads: int = 2, page: int = 64, layout: str = "paged",
    bias: bool = False,
) -> LayerKV:  # fmt: skip
    """Slots of given lengths, filled by the reference; every byte that no token owns is poison."""
    slots, max_pages = len(lens), -(-max(max(lens), 1) // page)
    pages = slots * max_pages
    planes = tuple(
        torch.full((pages + 1, page, heads, p.width * p.dtype.itemsize), 0xFF, dtype=torch.uint8, device=DEVICE).view(
            p.dtype
        )
        for p in kv_format.planes(dim)
    )
    order = torch.randperm(pages) if layout == "paged" else torch.arange(pages)
    table = torch.cat((order.view(slots, max_pages), torch.full((1, max_pages), pages))).int().to(DEVICE)
    key_bias = None
    if bias:
        angles = torch.arange(max_pages * page)[:, None] * 1e4 ** -(torch.arange(dim // 4) / (dim // 4))
        key_bias = KeyBias((torch.randn(heads, dim) * 30).to(DEVICE), angles.cos().to(DEVICE), angles.sin().to(DEVICE))
    kv = LayerKV(planes, table, kv_format, dim, key_bias)
    token_slots = torch.cat([torch.full((n,), i) for i, n in enumerate(lens)]).int().to(DEVICE)
    positions = torch.cat([torch.arange(n) for n in lens]).to(DEVICE)
    k, v = (
        torch.randn(2, len(positions), heads, dim, device=DEVICE)
        * torch.rand(2, len(positions), 1, 1, device=DEVICE).exp()
    )
    reference.append(kv, k, v, token_slots, positions)
    return kv


def same(got: Tensor, wanted: Tensor, kv_format: KVFormat) -> bool:
    """Bit for bit; but NumPy, which stands in for the tensor cores in the interpreter, sums in an order of its own."""
    return torch.equal(got, wanted) if GPU else error(got, wanted) < limit(kv_format)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def error(got: Tensor, wanted: Tensor) -> float:
    """Relative; NaN counts as infinite."""
    off = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
    return off if off == off else float("inf")


def limit(kv_format: KVFormat) -> float:
    """Of rounding: products run in the stored type or in fp16.

    Three times the most that a dozen runs on fresh random data showed: rounding is a share of the terms of a sum, and
    how far they cancel is the data's business.
    """
    return {"fp32": 4e-6, "toy": 4e-6, "bf16": 2e-2}.get(
        kv_format.name if kv_format is not FORMATS["toy"] else "toy", 2.5e-3
    )


@every_format
@pytest.mark.parametrize(
    ("dim", "heads", "group"),
    [(64, 2, 4), (128, 1, 8), (128, 2, 3), (256, 1, 6), (256, 2, 1), (96, 2, 1)] if GPU else [(64, 2, 6), (96, 1, 1)],
)
def test_attend_is_the_reference(kv_format: KVFormat, dim: int, heads: int, group: int) -> None:
    lens = [1, 64, LONG, 65, 130]
    kv = make_kv(kv_format, lens, dim=dim, heads=heads)
    q = torch.randn(len(lens), 1, heads * group, dim, device=DEVICE)
    order, sizes = ints(3, 0, 2, 4, 1), ints(65, 1, LONG, 130, 64)
    wanted = reference.attend(kv, q, order, sizes, dim**-0.5, EVERYTHING)
    assert error(kernels.attend(kv, q, order, sizes, dim**-0.5, EVERYTHING), wanted) < limit(kv_format)


@every_format
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (256, 6)] if GPU else [(64, 3)])
def test_prefill_is_the_reference(kv_format: KVFormat, dim: int, group: int) -> None:
    kv = make_kv(kv_format, [200, 3, 150], dim=dim, heads=1)
    q = torch.randn(50, group, dim, device=DEVICE)
    arguments = (ints(2, 0, 1), ints(0, 7, 47, 50), ints(150, 200, 3), dim**-0.5, EVERYTHING)
    assert error(kernels.prefill(kv, q, *arguments), reference.prefill(kv, q, *arguments)) < limit(kv_format)


@every_format
@pytest.mark.parametrize("dim", [64, 96, 256] if GPU else [96])
def test_append_stores_what_the_format_says(kv_format: KVFormat, dim: int) -> None:
    kv = make_kv(kv_format, [3, 70], dim=dim)
    before = [p.clone() for p in kv.planes]
    k, v = torch.randn(2, 3, 4, dim, device=DEVICE)[:, :, ::2]  # heads not next to each other
    slots, positions = ints(1, 0, 2), torch.tensor([63, 2, 5], device=DEVICE)  # slot 2 is the spare one
    kernels.append(kv, k, v, slots, positions)
    got_k, got_v = kernels.dequantize(kv, 1, 64)
    wanted_k, wanted_v = reference.dequantize(kv, 1, 64)
    assert error(got_k, wanted_k) < 1e-5
    assert error(got_v, wanted_v) < 1e-3
    clean = 3 * kv_format.tolerance  # of one row; the interpreter cuts floats off where a GPU rounds them
    assert error(got_k[63], k[0]) < clean
    assert error(got_v[63], v[0]) < clean
    if kv_format.name == "turboquant_k8v4" and dim > 64:  # one scale a row, the unbiased one
        torch.testing.assert_close((got_v[63] * v[0]).sum(-1), v[0].square().sum(-1), rtol=2e-3, atol=0)
    rows = reference.attention.storage_rows(kv, slots, positions)
    for plane, old in zip(kv.planes, before, strict=True):
        changed = (plane.view(torch.uint8) != old.view(torch.uint8)).flatten(0, 1).flatten(1).any(1)
        assert set(changed.nonzero().flatten().tolist()) == set(rows.tolist())


@every_format
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("q_len", [2, 4, 9] if GPU else [4])
def test_a_verified_token_is_a_decoded_one(kv_format: KVFormat, dim: int, q_len: int) -> None:
    lens, group = ([LONG, 70], 6) if GPU else ([70, 20], 3)
    kv = make_kv(kv_format, lens, dim=dim, heads=2)
    q = torch.randn(2, q_len, 2 * group, dim, device=DEVICE)
    verified = kernels.attend(kv, q, ints(0, 1), ints(*lens), dim**-0.5, EVERYTHING)
    assert error(verified, reference.attend(kv, q, ints(0, 1), ints(*lens), dim**-0.5, EVERYTHING)) < limit(kv_format)
    for j in range(q_len):
        past = ints(*(n - q_len + 1 + j for n in lens))
        decoded = kernels.attend(kv, q[:, j : j + 1], ints(0, 1), past, dim**-0.5, EVERYTHING)
        assert same(decoded, verified[:, j : j + 1], kv_format)


@pytest.mark.parametrize("kv_format", [FORMATS[n] for n in ("fp16", "fp8", "turboquant_k8v4")], ids=lambda f: f.name)
@pytest.mark.parametrize(("halves", "most_blocks"), [(False, 4), (False, 2), (True, 4)])
def test_other_sizes(kv_format: KVFormat, halves: bool, most_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MOST_BLOCKS", most_blocks)
    dim, group, lens = 128, 6, [270, 3, 130]
    kv = make_kv(kv_format, lens, dim=dim, heads=1, page=128)
    attend = AttendConfig(128, 64, 2, 4, 3, halves)
    config = AttentionConfig(dim, 0, attend, attend, PrefillConfig(64, 32, 4, 2))
    q = torch.randn(3, 3, group, dim, device=DEVICE)
    arguments = (ints(0, 1, 2), ints(270, 3, 130), dim**-0.5, EVERYTHING)
    wanted = reference.attend(kv, q, *arguments)
    got = attend_with(config, kv, q, *arguments)
    assert error(got, wanted) < limit(kv_format)
    first = attend_with(config, kv, q[:, :1], ints(0, 1, 2), ints(268, 1, 128), dim**-0.5, EVERYTHING)
    assert same(first, got[:, :1], kv_format)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((128, 64, 96), "whole splits of 64"),
        ((128, 96, 96), "whole tiles"),
        ((96, 64, 64), "whole tiles"),
        ((128, 256, 256), "must not be longer"),
    ],
)
def test_splits_that_would_count_tokens_twice_are_refused(sizes: tuple[int, int, int], why: str) -> None:
    split, first_split, first_tokens = sizes
    with pytest.raises(ValueError, match=why):
        AttendConfig(split, 64, 2, 4, 2, first_split=first_split, first_tokens=first_tokens)


@pytest.mark.parametrize("kv_format", [FORMATS[n] for n in ("bf16", "int8_per_token_head")], ids=lambda f: f.name)
@pytest.mark.parametrize("first_tokens", [64, 192])
def test_a_slots_first_tokens_in_shorter_splits(kv_format: KVFormat, first_tokens: int) -> None:
    dim, group, lens = 64, 6, [64, 191, 193, 330, 449, 450]
    kv = make_kv(kv_format, lens, heads=1)
    attend = AttendConfig(128, 64, 2, 4, 2, first_split=64, first_tokens=first_tokens)
    config = AttentionConfig(dim, 0, attend, attend, PrefillConfig(64, 32, 4, 2))
    q = torch.randn(len(lens), 1, group, dim, device=DEVICE)
    arguments = (ints(*range(len(lens))), ints(*lens), dim**-0.5, EVERYTHING)
    got = attend_with(config, kv, q, *arguments)
    assert error(got, reference.attend(kv, q, *arguments)) < limit(kv_format)
    assert [attend.num_splits(n) for n in (1, first_tokens, first_tokens + 1, first_tokens + 129)] == [
        1, first_tokens // 64, first_tokens // 64 + 1, first_tokens // 64 + 2,
    ]  # fmt: skip


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("pair", "dtype", "high", "close"), [
    (pair_int8, torch.int8, 128, 1 / 16256), (pair_e4m3, torch.float8_e4m3fn, 1, 2**-9)])  # fmt: skip
def test_queries_as_pairs(rotated: bool, pair: Any, dtype: torch.dtype, high: float, close: float) -> None:
    n, q_len, group, kv_heads, dim, rows, pieces = 2, 3, 6, 2, 64, 8, 3
    q = torch.randn(n, q_len, group * kv_heads, dim, device=DEVICE) * 3
    q[0, 0, 0] = 0
    if rotated and pair is pair_int8:
        q[1, 2, 3] = float("nan")
    codes = torch.zeros(n, kv_heads, pieces, 2, rows, dim, dtype=dtype, device=DEVICE)
    factors = torch.zeros(n, kv_heads, pieces, rows, device=DEVICE)
    query_pairs_kernel[(n * q_len, group * kv_heads)](
        q, signs(dim).to(DEVICE) if rotated else None, codes, factors, Q=q_len, HQ=group * kv_heads, HK=kv_heads, D=dim,
        PIECES=pieces, N=rows, PAIR=pair, EARLY=0,
    )  # fmt: skip
    parts = codes.float()
    got = (parts[:, :, :, 0] * high + parts[:, :, :, 1] * (high / 128 if high > 1 else 1 / 16)) * factors[..., None]
    got = got.view(n, kv_heads, pieces * rows, dim)[:, :, : q_len * group]
    wanted = (rotate(q) if rotated else q).view(n, q_len, kv_heads, group, dim).transpose(1, 2).flatten(2, 3)
    no_number = wanted.isnan().any(-1)
    assert torch.equal(got.isnan().any(-1), no_number)
    got, wanted = got[~no_number], wanted[~no_number]
    assert ((got - wanted).abs() <= wanted.abs().amax(-1, keepdim=True) * close).all()


@triton.jit
def list_pieces(out, longs, shorts, programs, SPLITS: tl.constexpr):
    """out[p, t] = 2 piece + 1 for a long one, of program p's turn t."""
    program = tl.program_id(0)
    share = share_of(program, programs, longs, shorts, SPLITS)
    for turn in range(share[0] + share[1] + share[2]):
        is_long, piece = piece_of(turn, share, program, programs)
        tl.store(out + program * 64 + turn, piece * 2 + tl.where(is_long, 1, 0))


@pytest.mark.parametrize(("longs", "shorts"), [(0, 0), (0, 5), (3, 50), (14, 9), (7, 8), (10, 100), (9, 1)])
def test_programs_share_the_work(longs: int, shorts: int) -> None:
    programs, ratio = 7, 4
    out = torch.full((programs, 64), -1, dtype=torch.int32, device=DEVICE)
    list_pieces[(programs,)](out, longs, shorts, programs, SPLITS=(64, 128, 64 * ratio))
    taken = out[out >= 0]
    assert sorted(taken.tolist()) == sorted([2 * i + 1 for i in range(longs)] + [2 * i for i in range(shorts)])
    loads = torch.where(out < 0, 0, torch.where(out % 2 == 1, ratio, 1)).sum(1)
    if shorts >= programs * ratio:
        assert loads.max() - loads.min() <= 1
    assert loads.max() <= max(-(-longs // programs) * ratio, -(-(longs * ratio + shorts) // programs))


@every_format
@pytest.mark.parametrize("dim", DIMS)
def test_neighbours_padding_and_layout_change_no_bit(kv_format: KVFormat, dim: int) -> None:
    lens = [LONG, 33, 100]
    torch.manual_seed(seed := torch.seed() % 2**31)
    kv = make_kv(kv_format, lens, dim=dim)
    torch.manual_seed(seed)
    flat = make_kv(kv_format, lens, dim=dim, layout="slots")
    for slot, n in enumerate(lens):  # the same bytes in other pages
        every = torch.arange(n, device=DEVICE)
        at, to = (reference.attention.storage_rows(x, torch.full_like(every, slot), every) for x in (kv, flat))
        for a, b in zip(kv.planes, flat.planes, strict=True):
            b.flatten(0, 1).view(torch.uint8)[to] = a.flatten(0, 1).view(torch.uint8)[at]
    for plane in kv.planes:  # what padding rows left behind
        plane[-1].view(torch.uint8).fill_(7)
    q = torch.randn(5, 1, 8, dim, device=DEVICE)
    batch = kernels.attend(kv, q, ints(2, 0, 1, 3, 3), ints(100, LONG, 33, 1, 1), 0.125, EVERYTHING)
    for i, slot in enumerate((2, 0, 1)):
        alone = kernels.attend(flat, q[i : i + 1], ints(slot), ints(lens[slot]), 0.125, EVERYTHING)
        assert same(alone, batch[i : i + 1], kv_format)


@lossy_formats
@pytest.mark.parametrize("dim", [64, 96, 128] if GPU else [96])
def test_the_key_bias_comes_back(kv_format: KVFormat, dim: int) -> None:
    kv = make_kv(kv_format, [150, 40], dim=dim, bias=True)
    q = torch.randn(2, 3, 2, dim, device=DEVICE)
    arguments = (ints(0, 1), ints(150, 40), dim**-0.5, EVERYTHING)
    assert error(kernels.attend(kv, q, *arguments), reference.attend(kv, q, *arguments)) < 2.5e-3
    packed = (ints(0, 1), ints(0, 3, 6), ints(150, 40), dim**-0.5, EVERYTHING)
    assert (
        error(kernels.prefill(kv, q.flatten(0, 1), *packed), reference.prefill(kv, q.flatten(0, 1), *packed)) < 2.5e-3
    )
    assert error(kernels.dequantize(kv, 1, 40)[0], reference.dequantize(kv, 1, 40)[0]) < 1e-5


@every_format
@pytest.mark.parametrize(
    "mask", [AttentionMask(40, 4), AttentionMask(70, 0), AttentionMask(1000, 2)] if GPU else [AttentionMask(40, 4)]
)
def test_window_and_sinks(kv_format: KVFormat, mask: AttentionMask) -> None:
    kv = make_kv(kv_format, [LONG, 90])
    q = torch.randn(2, 3, 4, 64, device=DEVICE)
    arguments = (ints(0, 1), ints(LONG, 90), 0.125, mask)
    assert error(kernels.attend(kv, q, *arguments), reference.attend(kv, q, *arguments)) < limit(kv_format)
    packed = (ints(0, 1), ints(0, 3, 6), ints(LONG, 90), 0.125, mask)
    got, wanted = (k.prefill(kv, q.flatten(0, 1), *packed) for k in (kernels, reference))
    assert error(got, wanted) < limit(kv_format)


@every_format
def test_chunks_are_the_whole(kv_format: KVFormat) -> None:
    kv = make_kv(kv_format, [100], heads=1)
    q = torch.randn(100, 1, 64, device=DEVICE)
    whole = kernels.prefill(kv, q, ints(0), ints(0, 100), ints(100), 0.125, EVERYTHING)
    for first, last in ((0, 64), (64, 100)):
        part = kernels.prefill(kv, q[first:last], ints(0), ints(0, last - first), ints(last), 0.125, EVERYTHING)
        assert same(part, whole[first:last], kv_format)


def test_small_scales_of_v_and_large_ones_keep_their_digits() -> None:
    """V of one row 1e-4, of the next 1e4: their scales as they are would leave the range of fp16."""
    kv = make_kv(FORMATS["int8_per_token_head"], [64], heads=1)
    k, v = torch.randn(2, 64, 1, 64, device=DEVICE)
    every = torch.arange(64, device=DEVICE)
    for size in (1e-4, 1e4):
        reference.append(kv, k, v * size, torch.zeros_like(every).int(), every)
        q = torch.randn(1, 1, 4, 64, device=DEVICE)
        arguments = (ints(0), ints(64), 0.125, EVERYTHING)
        assert error(kernels.attend(kv, q, *arguments), reference.attend(kv, q, *arguments)) < 1.5e-3


def test_a_slot_without_tokens_gives_zeros() -> None:
    kv = make_kv(FORMATS["fp16"], [5, 5])
    out = kernels.attend(kv, torch.randn(2, 1, 4, 64, device=DEVICE), ints(0, 1), ints(0, 5), 0.125, EVERYTHING)
    assert out[0].eq(0).all()
    assert out[1].isfinite().all()


def test_many_slots_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make_kv(FORMATS["fp16"], [70, 30, 64])
    q, arguments = torch.randn(3, 1, 4, 64, device=DEVICE), (ints(0, 1, 2), ints(70, 30, 64), 0.125, EVERYTHING)
    whole = kernels.attend(kv, q, *arguments)
    monkeypatch.setattr(kernels.attention, "PARTIALS", 1)
    assert torch.equal(kernels.attend(kv, q, *arguments), whole)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@every_format
@pytest.mark.parametrize("dim", [128, 256])
def test_a_graph_follows_the_lengths_on_the_device(kv_format: KVFormat, dim: int) -> None:
    kv = make_kv(kv_format, [3000, 900], dim=dim)
    q, slots, lens = torch.randn(2, 1, 8, dim, device=DEVICE), ints(0, 1), ints(1, 1)
    run = lambda: kernels.attend(kv, q, slots, lens, 0.09, EVERYTHING)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for sizes in ((3000, 900), (17, 1)):
        lens.copy_(ints(*sizes))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, run())
        assert out.isfinite().all()


def test_a_format_without_pieces_says_so() -> None:
    kv = replace(make_kv(FORMATS["fp16"], [4]), codec=Int16Fixed())
    with pytest.raises(ValueError, match=r"int16_fixed.*no Triton pieces"):
        kernels.append(kv, *torch.randn(2, 1, 2, 64), ints(0), ints(0))
