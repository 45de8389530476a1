"""The Triton matrix products against the reference: on a GPU as they are, elsewhere in Triton's interpreter."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from torch import Tensor

from pocketllm.kernels import reference
from pocketllm.kernels import triton as kernels
from pocketllm.kernels.triton.linear import few_rows_with, many_rows_with
from pocketllm.kernels.triton.linear_fp8 import library_multiplies, library_product, tile_product
from pocketllm.kernels.triton.linear_pieces import pieces_of
from pocketllm.kernels.triton.linear_tuning import (
    LinearTable,
    ProductConfig,
    linear_table,
    parse,
    product_config,
)
from pocketllm.kernels.triton.quantize import quantize, takes_codes
from pocketllm.kernels.types import Activations, LinearWeight, Quantized
from pocketllm.weights.formats import FORMATS, Fp8Block, encode
from poison import poison_empty

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
TABLE = linear_table(DEVICE)
# Of the interpreter, which turns float32 into 16 bits by cutting off, twice what rounding costs.
LIMITS = {torch.float32: 3e-6, torch.float16: 1.2e-3, torch.bfloat16: 1.2e-2}
# A dtype on the CPU costs time, not cover: there, what the types differ in is done by other code than on a GPU.
DTYPE = torch.bfloat16 if GPU else torch.float32

every_format = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote to is NaN. The same random numbers in every run."""
    torch.manual_seed(0)
    poison_empty(monkeypatch)


def make(name: str, n: int, k: int, *, bias: bool = False) -> LinearWeight:
    weight = encode(FORMATS[name], torch.randn(n, k) * k**-0.5)
    planes = tuple(t.to(DEVICE) for t in weight.tensors)
    return LinearWeight(weight.format, (n, k), planes, torch.randn(n, device=DEVICE) if bias else None)


def rows(m: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(m, k, device=DEVICE).to(dtype)


def error(got: Tensor, wanted: Tensor) -> float:
    """Relative; NaN counts as infinite."""
    off = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
    return off if off == off else float("inf")


def same(got: Tensor, wanted: Tensor) -> bool:
    """Bit for bit; but NumPy, which stands in for the tensor cores in the interpreter, sums in an order of its own."""
    return torch.equal(got, wanted) if GPU else error(got, wanted) < LIMITS[got.dtype]


@every_format
@pytest.mark.parametrize(("n", "k"), [(100, 96), (272, 640)] if GPU else [(72, 288)])
def test_linear_is_the_reference(name: str, n: int, k: int) -> None:
    weight = make(name, n, k, bias=True)
    for m in (3, 70):
        x = rows(m, k, DTYPE)
        got, limit = kernels.linear(x, weight), LIMITS[DTYPE]
        if takes_codes(weight, m, DTYPE, DEVICE):
            limit = 5e-2  # activations in e4m3
        assert got.dtype == DTYPE
        assert error(got, reference.linear(x.float(), weight)) < limit


@every_format
def test_gated_linear_is_the_reference(name: str) -> None:
    weight = make(name, 2 * 72, 160, bias=True)
    for m in (3, 66) if GPU else (9,):
        x = rows(m, 160, DTYPE)
        assert error(kernels.gated_linear(x, weight), reference.gated_linear(x.float(), weight)) < 2 * LIMITS[DTYPE]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["bf16", "fp8_block", "w4"])
def test_16_bit_activations(name: str, dtype: torch.dtype) -> None:
    weight, x = make(name, 40, 192), rows(5, 192, dtype)
    assert error(kernels.linear(x, weight), reference.linear(x.float(), weight)) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_e4m3_number_is_read_exactly(dtype: torch.dtype) -> None:
    """A product with the identity gives the weights back. Scale 1/2, as its 256-fold must not change them in fp16."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)[torch.randperm(512)].view(4, 128)
    codes[codes & 0x7F == 0x7F] = 0  # NaN
    planes = codes.view(torch.float8_e4m3fn).to(DEVICE), torch.tensor([[0.5]]).to(DEVICE)
    weight = LinearWeight(Fp8Block(), (4, 128), planes)
    identity = torch.eye(128, dtype=dtype, device=DEVICE)
    wanted = (codes.view(torch.float8_e4m3fn).float() / 2).to(DEVICE)
    for first in range(0, 128, 8):
        part = slice(first, first + 8)
        assert torch.equal(kernels.linear(identity[part], weight).float(), wanted[:, part].T)


@pytest.mark.parametrize("name", ["w8", "w4", "w4_shifted"])
def test_every_code_of_the_group_formats_is_read_exactly(name: str) -> None:
    """Scales and minimums are small powers of two, so that every weight is a number of bf16."""
    weight = make(name, 16, 512)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(weight.tensors[0].numel() // 256)
    weight.tensors[0].view(torch.uint8).copy_(codes.view(weight.tensors[0].shape))
    for numbers in weight.tensors[1:]:
        numbers.copy_(torch.randint(1, 3, numbers.shape) ** 2)
    for columns in torch.randperm(512)[:64].split(8):
        x = torch.eye(512, dtype=torch.bfloat16, device=DEVICE)[columns.to(DEVICE)]
        assert torch.equal(kernels.linear(x, weight).float(), reference.linear(x.float(), weight))


@pytest.mark.parametrize(("name", "splits"), [*((name, 3) for name in FORMATS), ("bf16", 1), ("fp8_block", 1)])
def test_a_row_does_not_depend_on_the_others(name: str, splits: int) -> None:
    """Alone, or among 1, 7, 32, 63 others, at any place."""
    k = 2048 if GPU else 288
    weight, x = make(name, 80, k), rows(64 if GPU else 20, k, DTYPE)
    config = replace(product_config(TABLE, 1, name, 80, k, 1), splits=splits)
    whole = few_rows_with(config, TABLE, x, weight, False)
    for m in (1, 2, 8, 33) if GPU else (1, 9):
        first = len(x) - m if m % 2 else 0
        assert same(few_rows_with(config, TABLE, x[first : first + m], weight, False), whole[first : first + m])


@every_format
def test_sizes_that_depend_on_the_number_of_rows(name: str) -> None:
    k = 640 if GPU else 384
    weight, x = make(name, 200, k, bias=True), rows(64 if GPU else 20, k, DTYPE)
    config = ProductConfig(32, 128, warps=2, stages=3, more=((32, 32, 4, 2), (64, 128, 8, 2)))
    whole = few_rows_with(config, TABLE, x, weight, False)
    assert error(whole, reference.linear(x.float(), weight)) < LIMITS[DTYPE]
    for m in (1, 8, 17, 33) if GPU else (1, 9):
        assert same(few_rows_with(config, TABLE, x[-m:], weight, False), whole[-m:])


@pytest.mark.parametrize("splits", [1, 2])
def test_a_gated_row_does_not_depend_on_the_others(splits: int) -> None:
    k = 1024 if GPU else 256
    weight, x = make("fp8_block", 256, k, bias=True), rows(40, k, DTYPE)
    config = replace(product_config(TABLE, 1, "fp8_block", 256, k, 2), splits=splits)
    whole = few_rows_with(config, TABLE, x, weight, True)
    assert error(whole, reference.gated_linear(x.float(), weight)) < 2 * LIMITS[DTYPE]
    assert same(few_rows_with(config, TABLE, x[39:], weight, True), whole[39:])


@pytest.mark.parametrize("name", ["fp8_block", "w8", "w4"])
def test_tiles_of_many_rows_decode_exactly(name: str) -> None:
    weight, x = make(name, 130, 192, bias=True), rows(70, 192, torch.bfloat16)
    got = many_rows_with(TABLE.tiles[name], TABLE, x, weight)
    assert error(got, reference.linear(x.float(), weight)) < LIMITS[torch.bfloat16]


def decoded(x: Activations) -> Tensor:
    """Activations in FP8 as float32."""
    assert isinstance(x, Quantized)
    scales = x.scales.T.repeat_interleave(128, dim=1)
    return (x.codes.float() * scales)[: len(x)]


def test_activations_are_rounded_to_e4m3_by_groups() -> None:
    x = rows(9, 256) * torch.logspace(-8, 8, 9, device=DEVICE)[:, None]
    x[3, :128] = 0
    quantized = quantize(x)
    back, scales = decoded(quantized), quantized.scales.T
    assert quantized.codes.shape == (12, 256)
    assert quantized.shape == back.shape == (9, 256)
    assert back[3, :128].eq(0).all()
    # The interpreter cuts off instead of rounding, and 124 becomes 64 where the carry should reach the exponent.
    relative, absolute = (2**-4, 2**-10) if GPU else (0.52, 2**-6)
    for i in range(9):
        assert ((back[i] - x[i]).abs() <= (x[i].abs() * relative + scales[i].amax() * absolute) * 1.001).all()


def test_products_in_fp8_are_those_of_the_rounded_activations() -> None:
    """Two tiles of rows and of outputs, neither whole; three groups along K."""
    x = rows(150, 384, torch.bfloat16)
    quantized = quantize(x)
    rounded = decoded(quantized)
    assert error(rounded, x) < (4e-2 if GPU else 8e-2)
    weight = make("fp8_block", 208, 384, bias=True)
    sizes = TABLE.fp8_tile if GPU else replace(TABLE.fp8_tile, block_n=64)
    assert error(tile_product(quantized, weight, sizes), reference.linear(rounded, weight)) < LIMITS[torch.bfloat16]
    if library_multiplies(DEVICE):
        whole = make("fp8_block", 256, 384, bias=True)
        assert error(library_product(quantized, whole), reference.linear(rounded, whole)) < LIMITS[torch.bfloat16]


@every_format
def test_embedding_is_the_reference(name: str) -> None:
    table, ids = make(name, 60, 160), torch.tensor([3, 59, 0, 3], device=DEVICE)
    for dtype in (torch.float32, torch.bfloat16):
        got = kernels.embedding(ids, table, dtype)
        assert got.dtype == dtype
        assert error(got, reference.embedding(ids, table, torch.float32)) < LIMITS[dtype]
    assert kernels.embedding(ids[:0], table, torch.float32).shape == (0, 160)


def mixture(name: str, m: int, dtype: torch.dtype, inner: int = 64) -> tuple[Any, ...]:
    """Six experts, two a row; nobody chooses expert 4."""
    gate_up = [make(name, 2 * inner, 96) for _ in range(6)]
    down = [make(name, 96, inner) for _ in range(6)]
    scores = torch.randn(m, 6, device=DEVICE)
    scores[:, 4] = -100
    chosen = scores.softmax(-1).topk(2)
    return rows(m, 96, dtype), chosen.indices, chosen.values, gate_up, down


@pytest.mark.parametrize("name", ["bf16", "fp8_block", "w4"])
def test_moe_is_the_reference(name: str) -> None:
    for m in (5, 66):
        x, *rest = mixture(name, m, DTYPE)
        assert error(kernels.moe(x, *rest), reference.moe(x.float(), *rest)) < 2 * LIMITS[DTYPE]


def test_a_row_of_a_mixture_does_not_depend_on_the_others() -> None:
    x, ids, weights, gate_up, down = mixture("fp8_block", 40 if GPU else 12, DTYPE)
    whole = kernels.moe(x, ids, weights, gate_up, down)
    for part in (slice(0, 1), slice(7, 10)):
        assert same(kernels.moe(x[part], ids[part], weights[part], gate_up, down), whole[part])


def test_experts_that_differ_are_refused() -> None:
    x, ids, weights, gate_up, down = mixture("bf16", 2, torch.float32)
    with pytest.raises(ValueError, match="must share a format and a shape"):
        kernels.moe(x, ids, weights, gate_up, [*down[:5], make("bf16", 96, 32)])


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("early", range(3))
@pytest.mark.parametrize("what", ["linear", "gated_linear", "moe"])
def test_a_recorded_product_follows_its_input(what: str, early: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What starts early must still wait for its input: each product here reads what the one before has written."""
    table = replace(TABLE, early=early)
    for name in ("linear", "moe"):  # modules, of which the package's functions have the names
        module = importlib.import_module(f"pocketllm.kernels.triton.{name}")
        monkeypatch.setattr(module, "linear_table", lambda device: table)
    run: Callable[[], Tensor]
    x, ids, weights, gate_up, down = mixture("bf16", 4, torch.bfloat16, inner=96)
    weight, square = make("fp8_block", 2 * 512, 512), rows(4, 512, torch.bfloat16)
    if what == "moe":
        source, run = x, lambda: kernels.moe(kernels.moe(x, ids, weights, gate_up, down), ids, weights, gate_up, down)
    elif what == "linear":
        source, run = square, lambda: kernels.linear(kernels.linear(square, weight)[:, :512], weight)
    else:
        source, run = square, lambda: kernels.gated_linear(kernels.gated_linear(square, weight), weight)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(20):
        source.normal_()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, run())
        assert out.isfinite().all()


def test_many_rows_at_once_and_none() -> None:
    weight = make("w8", 24, 64)
    assert kernels.linear(rows(0, 64), weight).shape == (0, 24)
    assert kernels.gated_linear(rows(0, 64), weight).shape == (0, 12)
    x = rows(130, 64)
    assert error(kernels.linear(x, weight), reference.linear(x, weight)) < LIMITS[torch.float32]


def test_packing_keeps_the_weight() -> None:
    for name in FORMATS:
        weight = make(name, 32, 64)
        assert kernels.pack_weight(weight) is weight
    strided = replace(weight, tensors=tuple(t.T.contiguous().T for t in weight.tensors))
    assert all(t.is_contiguous() for t in kernels.pack_weight(strided).tensors)

    class Unknown(Fp8Block):
        name = "w3"

    with pytest.raises(ValueError, match="no Triton pieces for weight format 'w3'"):
        kernels.pack_weight(replace(make("bf16", 4, 4), format=Unknown()))


def test_a_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x has shape \(1, 32\): the weight needs \[M, 64\]"):
        kernels.linear(rows(1, 32), make("bf16", 8, 64))


def tables() -> dict[str, LinearTable]:
    folder = resources.files("pocketllm.kernels.triton") / "tuned"
    entries = [json.loads(f.read_text()) for f in folder.iterdir() if f.name.endswith(".json")]
    return {entry["device"]: parse(entry["linear"]) for entry in entries}


def test_every_table_knows_every_format() -> None:
    assert {"default", "NVIDIA H200"} <= set(tables())
    for table in tables().values():
        assert set(table.defaults) == set(table.tiles) == set(FORMATS)
        for config in (*table.defaults.values(), *table.tiles.values(), *table.shapes.values()):
            assert config.block_k % 32 == 0
            assert config.block_n % 16 == 0
        for config in (*table.defaults.values(), *table.shapes.values()):
            assert [entry[0] for entry in config.more] == sorted({entry[0] for entry in config.more} & {16, 32, 64})
            assert all(entry[1] % 16 == 0 for entry in config.more)
        for name, config in (*table.defaults.items(), *((key[0], c) for key, c in table.shapes.items())):
            assert (config.block_k == 128) >= (name == "fp8_block")  # a tile has one scale a row


def test_what_is_in_flight_fits_the_shared_memory() -> None:
    """227 KiB of a multiprocessor of Hopper, for every number of blocks of 8 rows. (Triton keeps a stage less in memory.)"""
    for table in tables().values():
        configs = [*table.defaults.items(), *((key[0], config) for key, config in table.shapes.items())]
        for (name, config), blocks, halves in itertools.product(configs, (1, 2, 4, 8), (1, 2)):
            bits, item = pieces_of(make(name, 32, 128)).bits, 4 if name == "fp32" else 2
            sized = config.for_rows(blocks, halves, bits, item)
            stage = sized.block_k * (sized.block_n * halves * bits // 8 + blocks * 8 * item)
            assert (sized.stages - 1) * stage <= 227 * 1024


def test_narrow_weights_are_split_and_wide_ones_are_not() -> None:
    table = replace(tables()["NVIDIA H200"], shapes={})
    for n, k, split in ((5120, 6144, True), (5120, 17408, True), (151936, 5120, False)):
        config = product_config(table, 132, "fp8_block", n, k, 1)
        assert (config.splits > 1) == split
        assert config.splits * config.block_k * 4 <= k  # four tiles a split at least


def test_kernels_start_early_up_to_a_number_of_rows() -> None:
    table = replace(TABLE, early=2, early_rows=32, early_product_rows=8)
    assert [table.early_for(rows) for rows in (1, 8, 9, 32, 33)] == [2, 2, 2, 2, 0]
    assert [table.early_for_product(rows) for rows in (1, 8, 9, 64)] == [2, 2, 0, 0]
