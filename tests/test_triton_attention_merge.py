"""Splits merged on Hopper, where several warps share a row, and queries turned into pairs several rows at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from pocketllm.cache.formats import KVFormat
from pocketllm.cache.formats.rotation import rotate_back, signs
from pocketllm.kernels import reference
from pocketllm.kernels import triton as kernels
from pocketllm.kernels.triton import attend_hopper
from pocketllm.kernels.triton.attend_hopper_queries import pair_e4m3, pair_int8
from pocketllm.kernels.triton.tuning import AttendConfig, is_hopper
from test_triton_attention import DEVICE, EVERYTHING, error, ints, lossy_formats, make_kv

HOPPER = is_hopper(DEVICE)
SPLIT, ROWS = 64, 6
COUNTS = (0, 1, 7, 8, 9, 131, 300)  # of splits: some lanes have none, some several, and sums are read several times


def merged(parts: Tensor, sums: Tensor, sign: Tensor | None) -> Tensor:
    n, head_dim = len(COUNTS), parts.shape[-1]
    out = torch.full((n, 1, ROWS, head_dim), float("nan"), device=DEVICE)
    lens, config = ints(*(c * SPLIT for c in COUNTS)), AttendConfig(SPLIT, SPLIT, 1, 4, 2)
    attend_hopper.merge(sign, lens, parts.flatten(0, 1), sums.flatten(0, 1), out, config, 0)
    return out[:, 0]


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [128, 256])
def test_splits_are_merged_alike_by_any_number_of_warps(
    rotated: bool, dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    n, most = len(COUNTS), max(COUNTS) + 3
    parts = torch.randn(n, ROWS, most, dim, device=DEVICE).to(dtype)
    sums = torch.stack((torch.randn(n, ROWS, most) * 20, torch.rand(n, ROWS, most) * SPLIT), -1).to(DEVICE)
    sums[:, 1, 5:] = torch.tensor((float("-inf"), 0.0), device=DEVICE)  # splits in which a row sees nothing
    exists = torch.arange(most, device=DEVICE) < ints(*COUNTS)[:, None]
    parts[~exists[:, None].expand(n, ROWS, most)] = float("nan")  # what no split has written
    sums[~exists[:, None].expand(n, ROWS, most)] = float("nan")
    sign = signs(dim).to(DEVICE) if rotated else None

    got = merged(parts, sums, sign)
    for sizes in (attend_hopper.MERGE_MANY, (2, 1, 3), (1, 1, 1)):
        monkeypatch.setattr(attend_hopper, "MERGE_FEW", sizes)
        assert torch.equal(merged(parts, sums, sign), got)

    largest = torch.where(exists[:, None], sums[..., 0], float("-inf")).double()
    weights = torch.exp2(largest - largest.amax(-1, keepdim=True)).nan_to_num()
    totals = (weights * torch.where(exists[:, None], sums[..., 1], 0.0)).sum(-1, keepdim=True)
    values = torch.where(exists[:, None, :, None], parts, 0.0).double()
    wanted = SPLIT * (weights[..., None] * values).sum(2) / totals.clamp_min(1e-30)
    if rotated:
        wanted = rotate_back(wanted.float())
    assert got[0].eq(0).all()
    assert error(got, wanted) < 1e-5


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@lossy_formats
@pytest.mark.parametrize(("dim", "group"), [(256, 5), (256, 6), (128, 4), (128, 8)])
def test_queries_are_the_same_whoever_makes_pairs_of_them(
    kv_format: KVFormat, dim: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lens = [700, 9000]
    kv = make_kv(kv_format, lens, dim=dim, heads=2)
    q = torch.randn(2, 1, 2 * group, dim, dtype=torch.bfloat16, device=DEVICE)
    found = []
    for most in (0, 2):
        monkeypatch.setattr(attend_hopper, "OWN_SLOTS", most)
        found.append(kernels.attend(kv, q, ints(0, 1), ints(*lens), dim**-0.5, EVERYTHING))
    assert torch.equal(*found)
    assert error(found[0], reference.attend(kv, q.float(), ints(0, 1), ints(*lens), dim**-0.5, EVERYTHING)) < 5e-3


@triton.jit
def pairs_of_rows(q, codes, factors, N: tl.constexpr, D: tl.constexpr, PAIR: tl.constexpr, TOGETHER: tl.constexpr):
    """q [N, D] -> codes [2, N, D], factors [N]: all rows at once, or one by one."""
    d = tl.arange(0, D)
    if TOGETHER:
        row = tl.arange(0, N)
        at = row[:, None] * D + d[None, :]
        high, low, factor = PAIR(tl.load(q + at))
        tl.store(codes + at, high)
        tl.store(codes + N * D + at, low)
        tl.store(factors + row, factor)
    else:
        for i in range(N):
            high, low, factor = PAIR(tl.load(q + i * D + d))
            tl.store(codes + i * D + d, high)
            tl.store(codes + (N + i) * D + d, low)
            tl.store(factors + i, factor)


@pytest.mark.parametrize(("pair", "dtype"), [(pair_int8, torch.int8), (pair_e4m3, torch.float8_e4m3fn)])
def test_rows_become_the_same_pairs_together_and_alone(pair: Any, dtype: torch.dtype) -> None:
    q, found = torch.randn(4, 128, device=DEVICE) * torch.tensor([[1.0], [30.0], [0.0], [1e-4]], device=DEVICE), []
    for together in (True, False):
        codes = torch.zeros(2, 4, 128, dtype=dtype, device=DEVICE)
        factors = torch.zeros(4, device=DEVICE)
        pairs_of_rows[(1,)](q, codes, factors, N=4, D=128, PAIR=pair, TOGETHER=together)
        found.append((codes.view(torch.uint8), factors))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][0].any()


@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dim", attend_hopper.HEAD_DIMS)
@lossy_formats
def test_rings_fit_shared_memory(kv_format: KVFormat, dim: int, own: bool, rows: int) -> None:
    width = sum(plane.width * plane.dtype.itemsize for plane in kv_format.planes(dim)) - 8  # but for two scales
    places = attend_hopper.places(rows, dim, width, own)
    ring = places * attend_hopper.TILE * (width + 8)
    queries = (4 if own else 2) * rows * (2 * dim + 4)
    weights, gift, rooms = 2 * rows * attend_hopper.TILE * 2, rows * (dim + 2) * 4, 2 * 2 * 4 * (rows + 32) * 4
    assert places % 2 == 0
    assert places >= (4 if rows == 8 or not own else 2)  # of 8 rows at most, groups make pairs themselves
    assert ring + queries + weights + gift + rooms + 512 <= attend_hopper.ROOM


@pytest.mark.parametrize(
    ("split", "first_split", "first_tokens", "wanted"),
    [
        (512, 128, 2048, (256, 2048, 1024)),
        (512, 128, 384, (128, 384, 1024)),  # three whole splits of 128, not of 256
        (256, 0, 256, (256, 256, 512)),
        (512, 0, 0, (1024, 0, 1024)),
    ],
)
def test_a_split_of_both_groups(split: int, first_split: int, first_tokens: int, wanted: tuple[int, int, int]) -> None:
    config = AttendConfig(split, 64, 2, 4, 2, first_split=first_split, first_tokens=first_tokens)
    assert attend_hopper.of_both_groups(config).splits == wanted
