"""Weights repacked, once at load, for the inner loops of `linear_tiles`: the same bytes in another order.

A packed matrix is one uint8 tensor [N/32, K/step, bytes of a step]; rows and columns are padded with zeros to whole
blocks and steps. `PackedFormat` still answers as the format it holds: it decodes all of it, or rows for an embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pocketllm.kernels.numba.linear_tiles import COLUMNS, Scheme
from pocketllm.kernels.numba.simd import Target
from pocketllm.kernels.types import LinearWeight, TensorSpec, WeightFormat

_CHUNK_BLOCKS = 64  # blocks packed at a time: bounds the working copy
_WORDS = {2: torch.int16, 4: torch.int32}


def pack_weight(weight: LinearWeight, target: Target) -> LinearWeight:
    """`weight` in the layout the kernels read. It may be dropped afterwards: the result shares nothing with it.

    ValueError for a format that has no kernel.
    """
    name = weight.format.name
    if name not in _LAYOUTS:
        raise ValueError(f"no packed layout for weight format {name!r}: use one of {', '.join(_LAYOUTS)}")
    n, k = weight.shape
    packed_format = PackedFormat(weight.format, Scheme(name, target), weight.shape)
    (spec,) = packed_format.specs(n, k)
    if weight.tensors[0].is_meta:
        return LinearWeight(
            packed_format, weight.shape, (torch.empty(spec.shape, dtype=spec.dtype, device="meta"),), weight.bias
        )
    packed = torch.zeros(spec.shape, dtype=spec.dtype)
    layout = _LAYOUTS[name]
    for start in range(0, spec.shape[0], _CHUNK_BLOCKS):
        layout.pack(weight.tensors, start, packed[start : start + _CHUNK_BLOCKS])
    return LinearWeight(packed_format, weight.shape, (packed,), weight.bias)


@dataclass(frozen=True)
class PackedFormat:
    """What `pack_weight` made of a matrix of `shape` in format `source`."""

    source: WeightFormat
    scheme: Scheme
    shape: tuple[int, int]  # (N, K)

    @property
    def name(self) -> str:
        return self.source.name

    def specs(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        size = (-(-n // COLUMNS), -(-k // self.scheme.step), self.scheme.step_bytes)
        return (TensorSpec("packed", size, torch.uint8),)

    def decode(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.decode_rows(tensors, torch.arange(self.shape[0]))

    def decode_rows(self, tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
        return _LAYOUTS[self.scheme.name].rows(tensors[0], rows // COLUMNS, rows % COLUMNS)[:, : self.shape[1]]


class _Layout(ABC):
    @abstractmethod
    def pack(self, tensors: Sequence[Tensor], start: int, out: Tensor) -> None:
        """Fills `out` [blocks, steps, bytes] (zeros so far) with the blocks from `start` on."""

    @abstractmethod
    def rows(self, packed: Tensor, blocks: Tensor, columns: Tensor) -> Tensor:
        """Decodes column columns[i] of block blocks[i], each [M]: [M, padded K]."""


@dataclass(frozen=True)
class _Plain(_Layout):
    """[block, step, word, column]: a word is one element, or two neighbours along K."""

    dtype: torch.dtype
    word_bytes: int

    def pack(self, tensors: Sequence[Tensor], start: int, out: Tensor) -> None:
        words = _words(_cut(tensors[0], start, out, out.shape[2] // COLUMNS // self.dtype.itemsize), self.word_bytes)
        _put(out, words)

    def rows(self, packed: Tensor, blocks: Tensor, columns: Tensor) -> Tensor:
        return _take(packed, self.word_bytes, blocks, columns).view(self.dtype)


@dataclass(frozen=True)
class _Grouped(_Layout):
    """[block, step] of codes [word, column] and, per column, scale (and minimum). Codes are stored xor `flip`."""

    code_bytes: int  # of a group
    flip: int
    planes: int  # float16 numbers a group

    def pack(self, tensors: Sequence[Tensor], start: int, out: Tensor) -> None:
        end = self.code_bytes * COLUMNS
        _put(out[..., :end], _words(_cut(tensors[0].view(torch.uint8), start, out, self.code_bytes), 4))
        out[..., :end] ^= self.flip
        for i in range(self.planes):
            at = end + 2 * COLUMNS * i
            _put(out[..., at : at + 2 * COLUMNS], _cut(tensors[1 + i], start, out, 1))

    def rows(self, packed: Tensor, blocks: Tensor, columns: Tensor) -> Tensor:
        end = self.code_bytes * COLUMNS
        codes = _take(packed[..., :end], 4, blocks, columns).view(torch.uint8) ^ self.flip  # [M, groups * code_bytes]
        numbers = [
            _take(packed[..., at : at + 2 * COLUMNS], 2, blocks, columns).view(torch.float16).float()
            for at in range(end, packed.shape[2], 2 * COLUMNS)
        ]
        return self.decode(codes.view(len(codes), -1, self.code_bytes), [x[..., None] for x in numbers]).flatten(1)

    def decode(self, codes: Tensor, numbers: list[Tensor]) -> Tensor:
        """codes [M, groups, code_bytes] uint8, numbers [M, groups, 1] float32 each -> [M, groups, 32]."""
        if self.flip:
            return codes.view(torch.int8).float() * numbers[0]
        nibbles = torch.cat([codes & 15, codes >> 4], dim=2).float()
        return nibbles * numbers[0] + (numbers[1] if self.planes == 2 else -8 * numbers[0])


class _Fp8(_Layout):
    """[block, step] of codes in the order in which `e4m3_to_bf16` leaves pairs in their columns' lanes, and one scale.

    Codes: [quad along K, 16-column vector, group of 4 columns, pair of the quad, column of the group, element].
    """

    def pack(self, tensors: Sequence[Tensor], start: int, out: Tensor) -> None:
        weight, scale = tensors
        pairs = _words(_cut(weight.view(torch.uint8), start, out, 128), 2)  # [blocks, 32, steps * 64]
        shaped = pairs.view(len(out), 2, 4, 4, -1, 32, 2)  # block, vector, group, column, step, quad, pair
        out[..., :4096] = shaped.permute(0, 4, 5, 1, 2, 6, 3).contiguous().view(torch.uint8).flatten(2)
        blocks = torch.arange(start, start + len(out))
        out[..., 4096:4100] = scale[blocks * COLUMNS // 128].view(torch.uint8).view(len(out), -1, 4)

    def rows(self, packed: Tensor, blocks: Tensor, columns: Tensor) -> Tensor:
        codes = packed[..., :4096].view(torch.int16).view(*packed.shape[:2], 32, 2, 4, 2, 4)
        pairs = codes[blocks, :, :, columns // 16, columns // 4 % 4, :, columns % 4]  # [M, steps, quads, pair]
        values = pairs.contiguous().flatten(1).view(torch.float8_e4m3fn).float().view(len(blocks), -1, 128)
        scales = packed[..., 4096:4100].view(torch.float32)[blocks]  # [M, steps, 1]
        return (values * scales).flatten(1)


def _cut(matrix: Tensor, start: int, out: Tensor, per_step: int) -> Tensor:
    """Rows of the blocks that `out` holds, padded: [blocks, 32, steps * per_step]."""
    blocks, steps, _ = out.shape
    part = matrix[start * COLUMNS : (start + blocks) * COLUMNS]
    pad = (0, steps * per_step - part.shape[1], 0, blocks * COLUMNS - part.shape[0])
    padded = F.pad(part, pad) if any(pad) else part
    return padded.reshape(blocks, COLUMNS, -1)


def _words(rows: Tensor, word_bytes: int) -> Tensor:
    """The last dimension as whole words of that many bytes."""
    return rows.contiguous().view(rows.dtype if word_bytes == rows.dtype.itemsize else _WORDS[word_bytes])


def _put(out: Tensor, words: Tensor) -> None:
    """Writes words [blocks, 32, steps * n] to out [blocks, steps, n * 32 * word bytes] with the columns innermost."""
    blocks, steps, _ = out.shape
    out.view(words.dtype).view(blocks, steps, -1, COLUMNS).copy_(
        words.view(blocks, COLUMNS, steps, -1).permute(0, 2, 3, 1)
    )


def _take(packed: Tensor, word_bytes: int, blocks: Tensor, columns: Tensor) -> Tensor:
    """The words of column columns[i] of block blocks[i]: [M, steps * n]."""
    words = packed.view(_WORDS[word_bytes]).view(*packed.shape[:2], -1, COLUMNS)
    return words[blocks, :, :, columns].flatten(1)


_LAYOUTS: dict[str, _Layout] = {
    "fp32": _Plain(torch.float32, 4),
    "fp16": _Plain(torch.float16, 2),
    "bf16": _Plain(torch.bfloat16, 4),
    "fp8_block": _Fp8(),
    "w8": _Grouped(code_bytes=32, flip=128, planes=1),
    "w4": _Grouped(code_bytes=16, flip=0, planes=2),
    "w4_shifted": _Grouped(code_bytes=16, flip=0, planes=1),
}
