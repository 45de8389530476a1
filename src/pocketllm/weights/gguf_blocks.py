"""GGUF's block types as our weight formats.

A row is a sequence of blocks; those of 32 elements are repacked without touching a value:

    Q8_0   float16 d, 32 x int8 q                value d * q            -> W8
    Q4_0   float16 d, 16 bytes                   value d * (q - 8)      -> W4Shifted
    Q4_1   float16 d, float16 m, 16 bytes        value d * q + m        -> W4

Byte j of the 16 holds element j (low nibble) and 16 + j (high nibble), as in W4. F32, F16 and BF16 stay as they are;
any other type is decoded by the `gguf` package and re-encoded as W8.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from pocketllm.errors import ModelError
from pocketllm.weights.formats import W4, W8, Dense, StoredFormat, W4Shifted

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_DENSE = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_DECODE_ROWS = 2048  # rows decoded at a time when re-encoding


def format_of(kind: GGMLQuantizationType) -> StoredFormat:
    """The weight format that holds this block type. ModelError if nobody can decode it."""
    if kind in _DENSE:
        return Dense(_DENSE[kind])
    if kind == GGMLQuantizationType.Q4_1:
        return W4()
    if kind == GGMLQuantizationType.Q4_0:
        return W4Shifted()
    if not _can_decode(kind):
        raise ModelError(f"GGUF type {kind.name} is not supported: requantise the file, for example to Q8_0 or Q4_K")
    return W8()


def unpack(raw: Bytes, kind: GGMLQuantizationType) -> tuple[Tensor, ...]:
    """Rows of stored bytes [N, bytes per row] -> the tensors of `format_of(kind)`, in memory of their own."""
    if kind in _DENSE:
        return (torch.from_numpy(raw.copy()).view(_DENSE[kind]),)
    if kind == GGMLQuantizationType.Q8_0:
        scale, q = _fields(raw, 34, 2)
        return _plane(q, torch.int8), _plane(scale, torch.float16)
    if kind == GGMLQuantizationType.Q4_1:
        scale, minimum, q = _fields(raw, 20, 2, 4)
        return _plane(q, torch.uint8), _plane(scale, torch.float16), _plane(minimum, torch.float16)
    if kind == GGMLQuantizationType.Q4_0:
        scale, q = _fields(raw, 18, 2)
        return _plane(q, torch.uint8), _plane(scale, torch.float16)
    parts = [W8().encode(decode(raw[i : i + _DECODE_ROWS], kind)) for i in range(0, len(raw), _DECODE_ROWS)]
    return tuple(torch.cat(planes) for planes in zip(*parts, strict=True))


def decode(raw: Bytes, kind: GGMLQuantizationType) -> Tensor:
    """Rows of stored bytes [N, bytes per row] -> float32 [N, K]."""
    return torch.from_numpy(np.array(quants.dequantize(raw, kind), dtype=np.float32))


def _fields(raw: Bytes, block_bytes: int, *cuts: int) -> list[Bytes]:
    """The fields of every block, each [N, blocks, bytes of the field]."""
    return np.split(raw.reshape(len(raw), -1, block_bytes), cuts, axis=2)


def _plane(field: Bytes, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(field.reshape(len(field), -1).copy()).view(dtype)


@functools.cache
def _can_decode(kind: GGMLQuantizationType) -> bool:
    _, size = GGML_QUANT_SIZES[kind]
    try:
        quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
