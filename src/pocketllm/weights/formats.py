"""The weight formats: how a matrix [N, K] is laid out in memory. `decode` of each class is its definition.

    name        tensors, in order                                              an element is
    fp32 ...    weight [N, K]                                                  weight
    fp8_block   weight float8_e4m3fn [N, K], scale float32 [N/128, K/128]      weight * scale of its 128 x 128 block
    w8          q int8 [N, K], scale float16 [N, K/32]                         q * scale of its group
    w4          q uint8 [N, K/2], scale, minimum float16 [N, K/32]             q * scale + minimum of its group
    w4_shifted  q uint8 [N, K/2], scale float16 [N, K/32]                      (q - 8) * scale of its group

A group is 32 neighbours along K. In w4 a group's 16 bytes hold element j in the low and element 16 + j in the high
nibble of byte j. W8 holds GGUF's Q8_0 exactly, W4 holds Q4_1, and w4_shifted Q4_0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from pocketllm.errors import ModelError
from pocketllm.kernels.types import LinearWeight, TensorSpec, WeightFormat

GROUP = 32  # elements along K that share a scale in w8 and w4
BLOCK = 128  # rows and columns that share a scale in fp8_block
_CHUNK_ROWS = 2048  # rows re-encoded at a time (a multiple of BLOCK): bounds the float32 working copy


class StoredFormat(WeightFormat, Protocol):
    """A `WeightFormat` whose rows can be cut, joined and reordered without decoding them."""

    @property
    def row_block(self) -> int:
        """Rows that can't be parted: 1, or 128 where they share scales."""

    @property
    def column_block(self) -> int:
        """Columns that can't be parted: 1, or those that share a scale."""

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """[N, K] of any float dtype -> the tensors of `specs(N, K)` nearest to it."""

    def slice_rows(self, tensors: Sequence[Tensor], start: int, stop: int) -> tuple[Tensor, ...]:
        """Rows start:stop as views; start is a multiple of `row_block`."""

    def take_rows(self, tensors: Sequence[Tensor], rows: Tensor) -> tuple[Tensor, ...]:
        """Rows `rows` [M] int64, in that order. ModelError if that would part a row block."""


class _FreeRows:
    """Row operations of the formats in which a row is independent of its neighbours."""

    @property
    def row_block(self) -> int:
        return 1

    @property
    def column_block(self) -> int:
        return GROUP

    def slice_rows(self, tensors: Sequence[Tensor], start: int, stop: int) -> tuple[Tensor, ...]:
        return tuple(t[start:stop] for t in tensors)

    def take_rows(self, tensors: Sequence[Tensor], rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(t[rows.to(t.device)] for t in tensors)


@dataclass(frozen=True)
class Dense(_FreeRows):
    """Plain storage in float32, bfloat16 or float16."""

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in _DENSE_NAMES:
            raise ValueError(f"Dense({self.dtype}): use float32, bfloat16 or float16")

    @property
    def name(self) -> str:
        return _DENSE_NAMES[self.dtype]

    @property
    def column_block(self) -> int:
        return 1

    def specs(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec("weight", (n, k), self.dtype),)

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        return (matrix.to(self.dtype),)

    def decode(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def decode_rows(self, tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
        return tensors[0][rows]


@dataclass(frozen=True)
class Fp8Block:
    """float8_e4m3fn with one float32 scale per 128 x 128 block: the storage of the Qwen FP8 checkpoints."""

    @property
    def name(self) -> str:
        return "fp8_block"

    @property
    def row_block(self) -> int:
        return BLOCK

    @property
    def column_block(self) -> int:
        return BLOCK

    def specs(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("weight", (n, k), torch.float8_e4m3fn),
            TensorSpec("scale", (-(-n // BLOCK), -(-k // BLOCK)), torch.float32),
        )

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        n, k = matrix.shape
        weight, scale = (torch.zeros(s.shape, dtype=torch.float32, device=matrix.device) for s in self.specs(n, k))
        for i in range(scale.shape[0]):  # one row of blocks at a time
            rows = matrix[i * BLOCK : (i + 1) * BLOCK].float()
            blocks = torch.nn.functional.pad(rows, (0, -k % BLOCK)).view(len(rows), -1, BLOCK)  # [rows, K/128, 128]
            scale[i] = blocks.abs().amax(dim=(0, 2)) / 448.0  # 448: the largest e4m3fn number
            weight[i * BLOCK : (i + 1) * BLOCK] = rows / _nonzero(scale[i]).repeat_interleave(BLOCK)[:k]
        return weight.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn), scale

    def decode(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.decode_rows(tensors, torch.arange(tensors[0].shape[0], device=tensors[0].device))

    def decode_rows(self, tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
        weight, scale = tensors
        k = weight.shape[1]
        values = _bytes(weight)[rows].view(torch.float8_e4m3fn).float()  # [M, K]
        return values * scale[rows // BLOCK].repeat_interleave(BLOCK, dim=1)[:, :k]

    def slice_rows(self, tensors: Sequence[Tensor], start: int, stop: int) -> tuple[Tensor, ...]:
        weight, scale = tensors
        return weight[start:stop], scale[start // BLOCK : -(-stop // BLOCK)]

    def take_rows(self, tensors: Sequence[Tensor], rows: Tensor) -> tuple[Tensor, ...]:
        weight, scale = tensors
        n, rows = weight.shape[0], rows.cpu()
        blocks = rows[::BLOCK] // BLOCK
        whole = blocks[:, None] * BLOCK + torch.arange(BLOCK)
        if not torch.equal(whole.flatten()[: len(rows)], rows) or (len(rows) % BLOCK and int(rows[-1]) != n - 1):
            raise ModelError("fp8_block rows move by whole blocks of 128 only: use quantization none, bf16, w8 or w4")
        return _bytes(weight)[rows.to(weight.device)].view(weight.dtype), scale[blocks.to(scale.device)]


@dataclass(frozen=True)
class W8(_FreeRows):
    """int8 with one float16 scale per group of 32 along K."""

    @property
    def name(self) -> str:
        return "w8"

    def specs(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        groups = _groups(self.name, k)
        return (TensorSpec("q", (n, k), torch.int8), TensorSpec("scale", (n, groups), torch.float16))

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        n, k = matrix.shape
        x = matrix.float().view(n, _groups(self.name, k), GROUP)
        scale = _float16(x.abs().amax(dim=2) / 127.0)
        q = torch.round(x / _nonzero(scale.float())[..., None]).clamp_(-127, 127)
        return q.to(torch.int8).view(n, k), scale

    def decode(self, tensors: Sequence[Tensor]) -> Tensor:
        q, scale = tensors
        n, k = q.shape
        return (q.view(n, -1, GROUP).float() * scale.float()[..., None]).view(n, k)

    def decode_rows(self, tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
        return self.decode([t[rows] for t in tensors])


@dataclass(frozen=True)
class W4(_FreeRows):
    """4 bits with one float16 scale and minimum per group of 32 along K."""

    @property
    def name(self) -> str:
        return "w4"

    def specs(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        groups = _groups(self.name, k)
        return (
            TensorSpec("q", (n, k // 2), torch.uint8),
            TensorSpec("scale", (n, groups), torch.float16),
            TensorSpec("minimum", (n, groups), torch.float16),
        )

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        n, k = matrix.shape
        x = matrix.float().view(n, _groups(self.name, k), GROUP)
        minimum = _float16(x.amin(dim=2))
        scale = _float16((x.amax(dim=2) - minimum.float()) / 15.0)
        q = torch.round((x - minimum.float()[..., None]) / _nonzero(scale.float())[..., None]).clamp_(0, 15)
        low, high = q.to(torch.uint8).chunk(2, dim=2)
        return (low | high << 4).view(n, k // 2), scale, minimum

    def decode(self, tensors: Sequence[Tensor]) -> Tensor:
        q, scale, minimum = tensors
        return (_nibbles(q) * scale.float()[..., None] + minimum.float()[..., None]).flatten(1)

    def decode_rows(self, tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
        return self.decode([t[rows] for t in tensors])


@dataclass(frozen=True)
class W4Shifted(_FreeRows):
    """4 bits with one float16 scale per group of 32 along K; codes 0 to 15 stand for -8 to 7 scales."""

    @property
    def name(self) -> str:
        return "w4_shifted"

    def specs(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        groups = _groups(self.name, k)
        return (TensorSpec("q", (n, k // 2), torch.uint8), TensorSpec("scale", (n, groups), torch.float16))

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """The value of largest magnitude gets code 0, as in GGUF's Q4_0: the negative side has one code more."""
        n, k = matrix.shape
        x = matrix.float().view(n, _groups(self.name, k), GROUP)
        extreme = x.gather(2, x.abs().argmax(dim=2, keepdim=True))[..., 0]
        scale = _float16(extreme / -8.0)
        q = (torch.round(x / _nonzero(scale.float())[..., None]) + 8).clamp_(0, 15)
        low, high = q.to(torch.uint8).chunk(2, dim=2)
        return (low | high << 4).view(n, k // 2), scale

    def decode(self, tensors: Sequence[Tensor]) -> Tensor:
        q, scale = tensors
        return ((_nibbles(q) - 8) * scale.float()[..., None]).flatten(1)

    def decode_rows(self, tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
        return self.decode([t[rows] for t in tensors])


def _nibbles(q: Tensor) -> Tensor:
    """Codes [N, K/2] uint8, two to a byte -> [N, K/32, 32] float32."""
    grouped = q.view(len(q), -1, GROUP // 2)
    return torch.cat([grouped & 15, grouped >> 4], dim=2).float()


_DENSE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

_ALL: tuple[StoredFormat, ...] = (*(Dense(dtype) for dtype in _DENSE_NAMES), Fp8Block(), W8(), W4(), W4Shifted())
FORMATS: dict[str, StoredFormat] = {f.name: f for f in _ALL}


def stored_format(weight: LinearWeight) -> StoredFormat:
    """The weight's format with its row operations (every format a source hands out is one of `FORMATS`)."""
    return cast(StoredFormat, weight.format)


def encode(target: WeightFormat, matrix: Tensor) -> LinearWeight:
    """A float matrix [N, K] as `target` (any of `FORMATS`). ModelError if K or the values do not fit the format."""
    n, k = matrix.shape
    return LinearWeight(target, (n, k), cast(StoredFormat, target).encode(matrix))


def convert(weight: LinearWeight, target: StoredFormat, device: torch.device) -> LinearWeight:
    """The weight as `target` on `device`: as it is where the formats agree, else decoded and encoded slice by slice."""
    source = stored_format(weight)
    bias = weight.bias.to(device) if weight.bias is not None else None
    if source == target:
        return LinearWeight(target, weight.shape, tuple(t.to(device) for t in weight.tensors), bias)
    n, k = weight.shape
    result = tuple(torch.empty(s.shape, dtype=s.dtype, device=device) for s in target.specs(n, k))
    for start in range(0, n, _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, n)
        part = [t.to(device) for t in source.slice_rows(weight.tensors, start, stop)]
        encoded = target.encode(source.decode(part))
        for into, values in zip(target.slice_rows(result, start, stop), encoded, strict=True):
            into.copy_(values)
    return LinearWeight(target, weight.shape, result, bias)


def merge(weights: Sequence[LinearWeight]) -> list[LinearWeight]:
    """Stacks neighbours of one format and width along N, in order.

    Nothing can follow an fp8_block matrix whose rows do not fill whole blocks (N % 128); such neighbours stay apart.
    """
    runs: list[list[LinearWeight]] = []
    for weight in weights:
        last = runs[-1][-1] if runs else None
        joins = (
            last is not None
            and last.format == weight.format
            and last.shape[1] == weight.shape[1]
            and last.shape[0] % stored_format(last).row_block == 0
        )
        if joins:
            runs[-1].append(weight)
        else:
            runs.append([weight])
    return [_stack(run) for run in runs]


def reorder_rows(weight: LinearWeight, rows: Tensor) -> LinearWeight:
    """Row i of the result is row rows[i]. ModelError if the format can't be reordered so (fp8_block: whole blocks)."""
    tensors = stored_format(weight).take_rows(weight.tensors, rows)
    bias = weight.bias[rows.to(weight.bias.device)] if weight.bias is not None else None
    return LinearWeight(weight.format, (len(rows), weight.shape[1]), tensors, bias)


def reorder_columns(weight: LinearWeight, columns: Tensor) -> LinearWeight:
    """Column i of the result is column columns[i]. ModelError if that would part columns that share a scale."""
    unit = stored_format(weight).column_block
    groups = columns.view(-1, unit)
    if bool((groups[:, :1] // unit * unit + torch.arange(unit) != groups).any()):
        raise ModelError(f"{weight.format.name} columns move by whole groups of {unit} only")
    order = groups[:, 0] // unit
    planes = tuple(t.view(len(t), len(order), -1)[:, order].reshape(t.shape) for t in weight.tensors)
    return LinearWeight(weight.format, weight.shape, planes, weight.bias)


def _stack(run: Sequence[LinearWeight]) -> LinearWeight:
    if len(run) == 1:
        return run[0]
    planes = tuple(_cat(parts) for parts in zip(*(w.tensors for w in run), strict=True))
    bias = None
    if any(w.bias is not None for w in run):
        zero = [torch.zeros(w.shape[0], device=w.tensors[0].device) for w in run]
        bias = torch.cat([z if w.bias is None else w.bias for w, z in zip(run, zero, strict=True)])
    return LinearWeight(run[0].format, (sum(w.shape[0] for w in run), run[0].shape[1]), planes, bias)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    if parts[0].is_meta:  # of a plan; joining meta tensors makes torch import its compiler, which takes a second
        return parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    if parts[0].dtype == torch.float8_e4m3fn:
        return torch.cat([_bytes(p) for p in parts]).view(torch.float8_e4m3fn)
    return torch.cat(list(parts))


def _bytes(t: Tensor) -> Tensor:
    """float8 as uint8: torch can't index or join float8 on every device."""
    return t.view(torch.uint8)


def _groups(name: str, k: int) -> int:
    if k % GROUP:
        raise ModelError(f"{name} needs a width that is a multiple of {GROUP}, not {k}: use quantization none or bf16")
    return k // GROUP


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


def _float16(values: Tensor) -> Tensor:
    result = values.to(torch.float16)
    if not bool(torch.isfinite(result).all()):
        raise ModelError("a weight is not finite, or too large for a float16 scale: use quantization none or bf16")
    return result
