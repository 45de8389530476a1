# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""Many rows times FP8 weights in FP8, as checkpoints with `activation_scheme: dynamic` are meant to be used.

Each row of x is rounded to e4m3 in groups of 128 columns, with a scale a group (`quantize`); the products are summed in
float32 over a group, then scaled. It doubles the rate of the tensor cores against 16 bits, and costs a relative error of
about 2.6% (3 bits of fraction), as large as the one the weights had when the checkpoint was made.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pocketllm.kernels.triton.linear_tuning import TileConfig, linear_table
from pocketllm.kernels.triton.quantize import GROUP, fp8_units
from pocketllm.kernels.types import LinearWeight, Quantized


@triton.jit(do_not_specialize=["num_rows", "padded_rows"])
def fp8_product_kernel(
    codes, scales, weight, weight_scales, bias, out, num_rows, padded_rows, N, K,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    """Descriptors codes [padded_rows, K] and weight [N, K] with blocks [ROWS, 128] and [BLOCK_N, 128] -> out [num_rows, N].

    One program per tile. Tiles are visited GROUP_ROWS blocks of rows at a time, so that the weights that run on the device
    together are few. BLOCK_N divides 128: a tile's weights share their scale.
    """
    row_blocks, column_blocks = tl.cdiv(num_rows, ROWS), tl.cdiv(N, BLOCK_N)
    in_group = GROUP_ROWS * column_blocks
    first = tl.program_id(0) // in_group * GROUP_ROWS
    height = tl.minimum(row_blocks - first, GROUP_ROWS)
    row_start = (first + tl.program_id(0) % in_group % height) * ROWS
    n_start = tl.program_id(0) % in_group // height * BLOCK_N
    row, n = row_start + tl.arange(0, ROWS), n_start + tl.arange(0, BLOCK_N)
    groups = K // 128
    row_scales = scales + tl.minimum(row, num_rows - 1)
    block_scales = weight_scales + n_start // 128 * groups
    row_scale, block_scale = tl.load(row_scales), tl.load(block_scales)
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for group in range(groups):
        following = tl.minimum(group + 1, groups - 1)  # scales are asked for one group ahead
        next_row_scale = tl.load(row_scales + following * padded_rows)
        next_block_scale = tl.load(block_scales + following)
        product = tl.dot(codes.load([row_start, group * 128]), weight.load([n_start, group * 128]).T)
        total += product * (row_scale * block_scale)[:, None]
        row_scale, block_scale = next_row_scale, next_block_scale
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    at = out + (row.to(tl.int64) * N)[:, None] + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < num_rows)[:, None] & (n < N)[None, :])


@cache
def library_multiplies(device: torch.device) -> bool:
    """Whether the library knows scales by 1 x 128 and 128 x 128 here: asked once, with a small product.

    (cuBLAS does on Hopper, from CUDA 12.9 on.)
    """
    if not fp8_units(device):
        return False
    codes = torch.zeros(128, 4 * GROUP, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    try:
        _scaled_product(codes, torch.ones(4, 128, device=device).T, codes, torch.ones(1, 4, device=device))
    except (RuntimeError, ValueError):
        return False
    return True


def _scaled_product(codes: Tensor, scales: Tensor, matrix: Tensor, blocks: Tensor) -> Tensor:
    """codes [M, K] with scales [M, K / 128], times matrix [N, K] with blocks [N / 128, K / 128]: [M, N] in bf16, which is
    what cuBLAS is sure to give."""
    return F.scaled_mm(
        codes,
        matrix.T,
        scales,
        F.ScalingType.BlockWise1x128,
        blocks.T,
        F.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )


def fp8_product(x: Quantized, weight: LinearWeight) -> Tensor:
    """x [M, K] times fp8_block weights -> [M, N] in x's dtype, with bias."""
    device = x.codes.device
    table = linear_table(device)
    if table.library and weight.shape[0] % GROUP == 0 and library_multiplies(device):
        return library_product(x, weight)
    return tile_product(x, weight, table.fp8_tile)


def library_product(x: Quantized, weight: LinearWeight) -> Tensor:
    """By the library, for whole blocks of outputs. It wants the weights' scales in fours along K, as most models' are."""
    matrix, blocks = weight.tensors
    blocks = F.pad(blocks, (0, -blocks.shape[1] % 4)) if blocks.shape[1] % 4 else blocks
    y = _scaled_product(x.codes, x.scales.T, matrix, blocks)[: len(x)].to(x.dtype)
    return y if weight.bias is None else y + weight.bias.to(x.dtype)


def tile_product(x: Quantized, weight: LinearWeight, config: TileConfig) -> Tensor:
    """`fp8_product_kernel` with given tile sizes."""
    (n, k), num_rows = weight.shape, len(x)
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.codes.device)
    fp8_product_kernel[(-(-num_rows // config.rows) * -(-n // config.block_n),)](
        TensorDescriptor.from_tensor(x.codes, [config.rows, GROUP]), x.scales,
        TensorDescriptor.from_tensor(weight.tensors[0], [config.block_n, GROUP]), weight.tensors[1],
        weight.bias, out, num_rows, len(x.codes), n, k,
        ROWS=config.rows, BLOCK_N=config.block_n, GROUP_ROWS=8, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out
