"""The CPU backend's matrix products and thread pool, against float64 products of the decoded weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from pocketllm.kernels.numba.linear import Linear
from pocketllm.kernels.numba.rowwise import silu_mul
from pocketllm.kernels.numba.runtime import ThreadPool, kernel, parallel_for
from pocketllm.kernels.numba.simd import Target, load_f32, store_f32
from pocketllm.kernels.types import LinearWeight
from pocketllm.weights.formats import FORMATS, encode

HOST, PORTABLE = Target.host(), Target()
# Formats whose products have instructions of their own; the others compile to the same code for every target.
NATIVE = ("bf16", "fp8_block", "w8", "w4", "w4_shifted")
CASES = [(name, HOST) for name in FORMATS] + [(name, PORTABLE) for name in NATIVE]
SHAPES = [(33, 32), (31, 64), (100, 96), (64, 896), (40, 4864)]  # N not a multiple of 32; K not one of 128


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[ThreadPool, ThreadPool]]:
    one, two = ThreadPool(1), ThreadPool(2)
    yield one, two
    two.close()


def make_weight(name: str, n: int, k: int, bias: bool = True) -> LinearWeight:
    generator = torch.Generator().manual_seed(n * k)
    matrix = torch.randn(n, k, generator=generator) * torch.rand(n, 1, generator=generator).add(0.1)
    weight = encode(FORMATS[name], matrix)
    return LinearWeight(
        weight.format, weight.shape, weight.tensors, torch.randn(n, generator=generator) if bias else None
    )


def as_multiplied(name: str, x: Tensor) -> Tensor:
    """x as a product with this format takes it: rounded to bfloat16, or to int8 in groups of 32."""
    if name in ("bf16", "fp8_block"):
        return x.bfloat16().double()
    if name in ("w8", "w4", "w4_shifted"):
        groups = x.unflatten(1, (-1, 32))
        amax = groups.abs().amax(dim=2, keepdim=True)
        codes = torch.round(groups * (torch.full_like(amax, 127) / amax))  # 127 / amax would be 127 * reciprocal
        return (codes.double() * (amax / 127).double()).flatten(1)
    return x.double()


def exact(x: Tensor, weight: LinearWeight) -> Tensor:
    product = x.double() @ weight.format.decode(weight.tensors).double().T
    return product + weight.bias.double() if weight.bias is not None else product


def relative_error(y: Tensor, reference: Tensor) -> float:
    return float((y.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize(("name", "target"), CASES, ids=lambda c: c if isinstance(c, str) else f"{len(c.features)}")
def test_linear_is_the_product_of_the_decoded_weight(
    name: str, target: Target, pools: tuple[ThreadPool, ThreadPool]
) -> None:
    backend = Linear(pools[1], target)
    loss = {"bf16": 0.003, "fp8_block": 0.003, "w8": 0.008, "w4": 0.008, "w4_shifted": 0.008}.get(name, 3e-6)
    for n, k in SHAPES:
        for rows, bias in ((0, True), (1, True), (7, False), (19, True)):
            weight = make_weight(name, n, k, bias)
            x = torch.randn(rows, k)
            y = backend.linear(x, backend.pack_weight(weight))
            assert y.shape == (rows, n)
            if rows == 0:
                continue
            assert relative_error(y, exact(as_multiplied(name, x), weight)) < 3e-6, (n, k, rows)
            assert relative_error(y, exact(x, weight)) < loss, (n, k, rows)


@pytest.mark.parametrize(("name", "target"), CASES, ids=lambda c: c if isinstance(c, str) else f"{len(c.features)}")
def test_a_row_is_the_same_in_any_company(name: str, target: Target, pools: tuple[ThreadPool, ThreadPool]) -> None:
    one, two = (Linear(pool, target) for pool in pools)
    for n, k in ((100, 96), (40, 4864)):
        packed = one.pack_weight(make_weight(name, n, k))
        x = torch.randn(300, k)
        alone = torch.cat([one.linear(x[i : i + 1], packed) for i in range(len(x))])
        for rows in (2, 3, 4, 5, 8, 13, 17, 33, 64, 300):
            assert torch.equal(two.linear(x[:rows], packed), alone[:rows]), rows
        assert torch.equal(two.linear(x[3:10], packed), alone[3:10])
        assert torch.equal(one.linear(x.flip(0), packed).flip(0), alone)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_decode_to_what_was_stored(name: str, pools: tuple[ThreadPool, ThreadPool]) -> None:
    backend = Linear(pools[0], HOST)
    for n, k in ((33, 32), (320, 256)):
        weight = make_weight(name, n, k)
        packed = backend.pack_weight(weight)
        assert torch.equal(packed.format.decode(packed.tensors), weight.format.decode(weight.tensors))
        ids = torch.tensor([n - 1, 0, 7, 7])
        expected = weight.format.decode_rows(weight.tensors, ids).to(torch.bfloat16)
        assert torch.equal(backend.embedding(ids, packed, torch.bfloat16), expected)
    assert packed.nbytes <= weight.nbytes * 1.03  # fp8_block's scales are repeated for each block of 32 rows


@pytest.mark.parametrize("name", FORMATS)
def test_gated_linear_is_linear_then_gate(name: str, pools: tuple[ThreadPool, ThreadPool]) -> None:
    """To the last bit, for whole blocks of outputs (64, 96) and others (40), with and without bias, any number of rows."""
    backend = Linear(pools[1], HOST)
    for inner, bias in ((64, True), (96, False), (40, True)):
        packed = backend.pack_weight(make_weight(name, 2 * inner, 96, bias=bias))
        for rows in (1, 2, 3, 8, 21):
            x = torch.randn(rows, 96)
            assert torch.equal(backend.gated_linear(x, packed), silu_mul(backend.linear(x, packed)))


@pytest.mark.parametrize("target", [HOST, PORTABLE], ids=["host", "portable"])
def test_every_float8_number_is_multiplied_exactly(target: Target, pools: tuple[ThreadPool, ThreadPool]) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]  # without the two NaNs
    column = codes.view(torch.float8_e4m3fn)
    matrix = torch.zeros(len(codes), 128, dtype=torch.uint8)
    matrix[:, 77] = codes
    weight = LinearWeight(FORMATS["fp8_block"], (254, 128), (matrix.view(torch.float8_e4m3fn), torch.full((2, 1), 0.5)))
    backend = Linear(pools[0], target)
    x = torch.zeros(1, 128)
    x[0, 77] = 2.0
    assert torch.equal(backend.linear(x, backend.pack_weight(weight))[0], column.float())


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_nans_stay_in_their_row(name: str, pools: tuple[ThreadPool, ThreadPool]) -> None:
    backend = Linear(pools[1], HOST)
    weight = make_weight(name, 50, 96)
    packed = backend.pack_weight(weight)
    x = torch.randn(6, 96)
    x[2] = 0.0
    x[4, 50] = torch.nan
    y = backend.linear(x, packed)
    assert weight.bias is not None
    assert torch.equal(y[2], weight.bias)
    assert y[4].isnan().all()
    assert y[[0, 1, 2, 3, 5]].isfinite().all()


def test_bad_input_is_named(pools: tuple[ThreadPool, ThreadPool]) -> None:
    backend = Linear(pools[0], HOST)
    weight = make_weight("bf16", 32, 64)
    with pytest.raises(TypeError, match="pack_weight"):
        backend.linear(torch.zeros(1, 64), weight)
    with pytest.raises(ValueError, match=r"\[M, 64\]"):
        backend.linear(torch.zeros(1, 32), backend.pack_weight(weight))
    with pytest.raises(ValueError, match="at least 1"):
        ThreadPool(0)


# -- the pool --------------------------------------------------------------------------------------------------------


@kernel
def _count(begin, end, x):  # type: ignore[no-untyped-def]
    for i in range(begin, end):
        store_f32(x + 4 * i, load_f32(x + 4 * i) + np.float32(1))


@kernel
def _count_nested(begin, end, pool, x, width):  # type: ignore[no-untyped-def]
    for i in range(begin, end):
        parallel_for(pool, _count, width, 1, (x + 4 * i * width,))


@kernel
def count(pool, items, grain, x):  # type: ignore[no-untyped-def]
    parallel_for(pool, _count, items, grain, (x,))


@kernel
def count_nested(pool, items, width, x):  # type: ignore[no-untyped-def]
    parallel_for(pool, _count_nested, items, 1, (pool, x, width))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_item_runs_once(num_threads: int) -> None:
    pool = ThreadPool(num_threads)
    x = torch.zeros(1000)
    for items in (0, 1, 2, 7, 1000):
        for grain in (1, 3, 64, 5000):
            count(pool.handle, items, grain, x.data_ptr())
            assert torch.equal(x, (torch.arange(1000) < items).float()), (items, grain)
            x.zero_()
    for _ in range(3000):
        count(pool.handle, 37, 2, x.data_ptr())
    assert x[:37].eq(3000).all()
    x.zero_()
    count_nested(pool.handle, 10, 100, x.data_ptr())
    assert x.eq(1).all()
    pool.close()


def test_callers_of_two_threads_do_not_mix(pools: tuple[ThreadPool, ThreadPool]) -> None:
    buffers = [torch.zeros(64) for _ in range(3)]

    def work(x: Tensor) -> None:
        for _ in range(2000):
            count(pools[1].handle, 64, 4, x.data_ptr())

    threads = [threading.Thread(target=work, args=(x,)) for x in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(x.eq(2000).all() for x in buffers)


def test_idle_workers_sleep_wake_and_end() -> None:
    pool = ThreadPool(3)
    x = torch.zeros(64)
    count(pool.handle, 64, 1, x.data_ptr())
    time.sleep(0.01)  # a worker spins for well under a millisecond
    before = time.process_time()
    time.sleep(0.1)
    assert time.process_time() - before < 0.02
    for _ in range(20):
        time.sleep(0.001)
        count(pool.handle, 64, 1, x.data_ptr())
    assert x.eq(21).all()
    running = threading.active_count()
    pool.close()
    assert threading.active_count() == running - 2
    assert pool.handle == 0
