"""The key-value section of a GGUF file, read in one pass.

The `gguf` package keeps an array view for every string of every list: 6 seconds for a vocabulary of 150,000 tokens. The
section is a plain sequence of typed values, and decoding just those takes a fifth of a second.

Layout (GGUF 2 and 3, little-endian): magic, version u32, number of tensors u64, number of pairs u64, then per pair: key
string, type u32, value. A string is a u64 length and its UTF-8 bytes; an array is an element type u32, a length u64 and
the elements.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from pocketllm.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Cursor:
    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.offset = 0

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self.buffer, self.offset)
        self.offset += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (length,) = self.scalars("Q", 1)
        start, self.offset = self.offset, self.offset + length
        if self.offset > len(self.buffer):
            raise struct.error("string runs past the end of the file")
        return self.buffer[start : self.offset].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, length = self.scalars("I", 1)[0], self.scalars("Q", 1)[0]
            if element in _SCALARS:
                return self.scalars(_SCALARS[element], length)
            return [self.value(element) for _ in range(length)]
        return self.scalars(_SCALARS[kind], 1)[0]


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs of the file; arrays of numbers come as tuples, arrays of strings as lists."""
    with path.open("rb") as file:
        try:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # an empty file can't be mapped
            raise ModelError(f"{path.name} is empty: expected a GGUF file") from error
        with buffer:
            if buffer[:4] != b"GGUF":
                raise ModelError(f"{path.name} does not begin with 'GGUF': it is no GGUF file, or it is corrupt")
            cursor = _Cursor(buffer)
            try:
                cursor.offset = 4
                (version,) = cursor.scalars("I", 1)
                if version not in (2, 3):
                    raise ModelError(f"{path.name}: GGUF version {version}; known: 2 and 3, little-endian")
                _, num_pairs = cursor.scalars("Q", 2)
                return {cursor.string(): cursor.value(cursor.scalars("I", 1)[0]) for _ in range(num_pairs)}
            except (struct.error, KeyError, MemoryError, OverflowError) as error:
                raise ModelError(
                    f"{path.name} is cut off or corrupt: its metadata end at byte {cursor.offset}"
                ) from error
