"""`linear`, `gated_linear`, `embedding`, `pack_weight` of the GPU backend.

rows        product
1 to 64     `product_kernel`: weights decoded in registers, a row's sum independent of the others
more        16-bit weights in x's type: the library's. FP8 blocks, where the device multiplies FP8: `linear_fp8`.
            Everything else: `product_kernel` with tiles of many rows, weights decoded in registers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from pocketllm.kernels.triton.linear_fp8 import fp8_product
from pocketllm.kernels.triton.linear_kernels import embedding_kernel, product_kernel, sum_splits_kernel
from pocketllm.kernels.triton.linear_pieces import pieces_of, planes_of
from pocketllm.kernels.triton.linear_tuning import LinearTable, ProductConfig, TileConfig, linear_table, product_config
from pocketllm.kernels.triton.pairs import GROUP, weight_pairs
from pocketllm.kernels.triton.quantize import quantize, takes_codes
from pocketllm.kernels.triton.rowwise import silu_mul
from pocketllm.kernels.triton.tuning import multiprocessors
from pocketllm.kernels.types import Activations, LinearWeight, Paired, Quantized, Readers
from pocketllm.parallel import SMALL_BATCH

NARROW = 128  # outputs up to which a weight in 16 bits can be part of a bridge
BLOCK_ROWS = 8  # rows of one product of tensor cores there
Memory = Callable[[tuple[int, ...]], Tensor]  # shape -> a float32 tensor to write to
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def pack_weight(weight: LinearWeight) -> LinearWeight:
    """The weight itself, its tensors contiguous: tiles of the stored layouts are whole lines of 128 bytes already. Narrow
    ones get a second form, for `bridge`.

    ValueError for a format without a kernel.
    """
    pieces_of(weight)
    matrix = weight.tensors[0]
    if not all(t.is_contiguous() for t in weight.tensors):
        weight = replace(weight, tensors=tuple(t.contiguous() for t in weight.tensors))
    narrow = 1 < weight.shape[0] <= NARROW and weight.shape[1] % GROUP == 0 and matrix.dtype == torch.bfloat16
    if narrow and weight.bias is None and linear_table(matrix.device).bridge:
        weight = replace(weight, pairs=weight_pairs(matrix))
    return weight


def linear(x: Activations, weight: LinearWeight) -> Tensor:
    x = rows_of(x, weight)
    if isinstance(x, Quantized) or len(x) > SMALL_BATCH:
        return _many_rows(x, weight)
    return _few_rows(x, weight, gated=False)


def gated_linear(x: Activations, weight: LinearWeight, readers: Readers = ()) -> Activations:
    x = rows_of(x, weight)
    if isinstance(x, Quantized) or len(x) > SMALL_BATCH:
        return silu_mul(_many_rows(x, weight), readers)
    return _few_rows(x, weight, gated=True)


def embedding(token_ids: Tensor, weight: LinearWeight, dtype: object) -> Tensor:
    pieces, k = pieces_of(weight), weight.shape[1]
    block_k = pieces.block_k or 256
    out = torch.empty(len(token_ids), k, dtype=cast(torch.dtype, dtype), device=token_ids.device)
    if len(token_ids):
        embedding_kernel[(len(token_ids), -(-k // block_k))](
            token_ids, planes_of(weight), out, k,
            BLOCK_K=block_k, PARTS=pieces.parts, LOAD=pieces.load, SCALE=pieces.scale, num_warps=1,
        )  # fmt: skip
    return out


def rows_of(x: Activations, weight: LinearWeight) -> Tensor | Quantized:
    """x, checked. ValueError for another width than the weight's, and for pairs: `bridge` alone reads them."""
    if isinstance(x, Paired) or len(x.shape) != 2 or x.shape[1] != weight.shape[1]:
        kind = "pairs" if isinstance(x, Paired) else "shape"
        raise ValueError(f"x has {kind} {tuple(x.shape)}: the weight needs [M, {weight.shape[1]}]")
    return x if isinstance(x, Quantized) else x.contiguous()


def _few_rows(x: Tensor, weight: LinearWeight, gated: bool) -> Tensor:
    table, (n, k) = linear_table(x.device), weight.shape
    halves = 2 if gated else 1
    config = product_config(table, multiprocessors(x.device), weight.format.name, n, k, halves)
    return few_rows_with(config, table, x, weight, gated)


def few_rows_with(
    config: ProductConfig,
    table: LinearTable,
    x: Tensor,
    weight: LinearWeight,
    gated: bool,
    memory: Memory | None = None,
) -> Tensor:
    """A product of up to 64 rows (in float32 of any number) with given sizes, as the tuner calls it.

    With `memory`, of at least one row, not added up and without the bias: [splits, M, N] float32 that it gave.
    """
    if memory is not None:
        return _partial_sums(config, table, x, weight, memory)
    n = weight.shape[0]
    out = torch.empty(len(x), n // 2 if gated else n, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    if config.splits == 1:
        _launch_few(x, weight, weight.bias, out, config, gated, table)
        return out
    part = _partial_sums(config, table, x, weight, partial(torch.empty, dtype=torch.float32, device=x.device))
    return merge(part, weight.bias, out, gated, table.early_for_product(len(x)))


def _partial_sums(config: ProductConfig, table: LinearTable, x: Tensor, weight: LinearWeight, memory: Memory) -> Tensor:
    """[splits, M, N] float32, to be added in order."""
    part = memory((config.splits, len(x), weight.shape[0]))
    _launch_few(x, weight, None, part, config, False, table)
    return part


def _launch_few(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    out: Tensor,
    config: ProductConfig,
    gated: bool,
    table: LinearTable,
) -> None:
    blocks = _blocks(min(len(x), SMALL_BATCH))
    config = config.for_rows(blocks, 2 if gated else 1, pieces_of(weight).bits, x.element_size())
    _launch(x, weight, bias, out, config, BLOCK_ROWS, blocks, gated, table)


def _blocks(num_rows: int) -> int:
    """Of 8 rows, a power of two."""
    return 1 << (-(-num_rows // BLOCK_ROWS) - 1).bit_length()


def merge(part: Tensor, bias: Tensor | None, out: Tensor, gated: bool, early: int) -> Tensor:
    """part [splits, M, N], any float type -> out [M, N]: their sum in order plus bias; [M, N / 2] if gated."""
    splits, num_rows, n = part.shape
    block, warps = (256, 2) if num_rows <= SMALL_BATCH else (1024, 4)
    sum_splits_kernel[(-(-out.shape[1] // block), num_rows)](
        part, bias, out, num_rows, n, SPLITS=splits, GATED=gated, BLOCK=block, EARLY=early, num_warps=warps,
        launch_pdl=early > 0,
    )  # fmt: skip
    return out


def _many_rows(x: Tensor | Quantized, weight: LinearWeight) -> Tensor:
    if takes_codes(weight, len(x), x.dtype, weight.tensors[0].device):
        return fp8_product(x if isinstance(x, Quantized) else quantize(x), weight)
    if isinstance(x, Quantized):
        if x.plain is None:
            raise ValueError("activations in FP8 alone: a weight that reads them in 16 bits was not among the readers")
        x = x.plain
    name, table = weight.format.name, linear_table(x.device)
    if weight.tensors[0].dtype == x.dtype:
        return F.linear(x, weight.tensors[0], None if weight.bias is None else weight.bias.to(x.dtype))
    if x.dtype == torch.float32:  # no tensor cores for it: the kernel of few rows, as often as need be
        return _few_rows(x, weight, gated=False)
    return many_rows_with(table.tiles[name], table, x, weight)


def many_rows_with(config: TileConfig, table: LinearTable, x: Tensor, weight: LinearWeight) -> Tensor:
    """A product of many rows with given sizes, weights decoded in registers."""
    out = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.device)
    sizes = ProductConfig(config.block_n, config.block_k, config.warps, config.stages)
    _launch(x, weight, weight.bias, out, sizes, config.rows, 1, False, table)
    return out


def _launch(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    out: Tensor,
    config: ProductConfig,
    rows: int,
    blocks: int,
    gated: bool,
    table: LinearTable,
) -> None:
    pieces, (n, k) = pieces_of(weight), weight.shape
    columns, early = -(-n // (2 if gated else 1) // config.block_n), table.early_for_product(len(x))
    one_scale = 128 % config.block_n == 0 and (not gated or n % 256 == 0)  # a half starts where a scale does
    product_kernel[(-(-len(x) // (rows * blocks)), columns, config.splits)](
        x, planes_of(weight), bias, out, len(x), n, k,
        PARTIAL=out.dim() == 3, GATED=gated, ROWS=rows, BLOCKS=blocks, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        EVEN_K=k % config.block_k == 0, PARTS=pieces.parts, DTYPE=TYPES[x.dtype], LOAD=pieces.load,
        SCALE=pieces.scale, ONE_SCALE=one_scale, EARLY=early, num_warps=config.warps, num_stages=config.stages,
        launch_pdl=early > 0,
    )  # fmt: skip
