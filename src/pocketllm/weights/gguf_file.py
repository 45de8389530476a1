"""`GgufFile`: the header of a GGUF file and memory-mapped access to its tensors.

The header is read here and not by the `gguf` package, whose reader makes several numpy views of every vocabulary
entry: 7 s for 150,000 tokens against 0.2 s. Layout (little endian), from the specification (ggml, docs/gguf.md):

    "GGUF" · version u32 · number of tensors u64 · number of keys u64
    a key: name · type u32 · value     a string: length u64 · UTF-8 bytes     an array: type u32 · length u64 · values
    a tensor: name · number of dims u32 · dims u64, fastest first · type u32 · offset u64 from the start of the data
    padding to `general.alignment`, then the data
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pocketllm.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies. `shape` is in row-major order (slowest dimension first), in elements."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int  # bytes from the start of the file

    @property
    def row_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return int(self.shape[-1] // block * size)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


class GgufFile:
    """`metadata` (key -> int, float, bool, str or list) and `tensors` (name -> where it lies) of one file.

    ModelError if the file is not GGUF (version 2 or 3), is damaged, or ends before its last tensor does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: can't be read as a GGUF file ({error})") from None
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read_header()
        except (struct.error, KeyError, ValueError, MemoryError, OverflowError) as error:
            raise ModelError(
                f"{path}: the GGUF header is damaged or cut short near byte {self._at} ({error}): download it again"
            ) from None
        self._check_extents()

    def rows(self, tensor: GgufTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The stored bytes as [rows, bytes per row] (all leading dimensions flattened), read-only and memory-mapped."""
        flat = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)
        return flat.reshape(-1, tensor.row_bytes)

    def _read_header(self) -> None:
        if self._map[:4] != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file (it does not start with 'GGUF')")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported: 2 and 3 are (little endian)")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        found = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        data = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in found:
            self.tensors[name] = GgufTensor(name, shape, kind, data + offset)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        dims = [self._scalar("Q") for _ in range(min(self._scalar("I"), 8))]
        kind = GGMLQuantizationType(self._scalar("I"))
        return name, tuple(reversed(dims)), kind, self._scalar("Q")

    def _check_extents(self) -> None:
        size = len(self._map)
        for tensor in self.tensors.values():
            block, _ = GGML_QUANT_SIZES[tensor.type]
            if not tensor.shape or tensor.shape[-1] % block:
                shape = list(tensor.shape)
                raise ModelError(f"{self.path}: {tensor.name} {shape} can't be cut into blocks of {tensor.type.name}")
            if tensor.offset + tensor.nbytes > size:
                raise ModelError(
                    f"{self.path}: the file ends at byte {size}, inside tensor {tensor.name} (which ends at "
                    f"{tensor.offset + tensor.nbytes}): it is cut short, download it again"
                )

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._map, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """A vocabulary has some hundred thousand of them: one loop without calls, a good part of a start's time."""
        data, at, read_length = self._map, self._at, _LENGTH.unpack_from
        strings = []
        for _ in range(count):
            (length,) = read_length(data, at)
            raw = data[at + 8 : at + 8 + length]
            if len(raw) != length:
                raise ValueError(f"a string of {length} bytes runs past the end")
            strings.append(raw.decode("utf-8"))
            at += 8 + length
        self._at = at
        return strings

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item, count = self._scalar("I"), self._scalar("Q")
        if item == _STRING:
            return self._strings(count)
        if item == _ARRAY:
            return [self._value(item) for _ in range(count)]
        layout = struct.Struct(f"<{count}{_SCALARS[item]}") if count <= len(self._map) else None
        if layout is None:
            raise ValueError(f"an array of {count} values runs past the end")
        values = list(layout.unpack_from(self._map, self._at))
        self._at += layout.size
        return values
