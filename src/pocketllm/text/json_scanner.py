"""`JsonScanner`: reads one JSON value character by character and says at once where it ends or breaks (RFC 8259)."""

from __future__ import annotations

import json
import re
from enum import Enum

WHITESPACE = " \t\n\r"
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_CHARACTERS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_HEX = frozenset("0123456789abcdefABCDEF")


class _Expect(Enum):
    VALUE = "a value"
    FIRST_VALUE = "a value or ]"
    KEY = "a key"
    FIRST_KEY = "a key or }"
    COLON = ":"
    COMMA = ", or the end of the object or array"
    STRING = "the rest of a string"
    ESCAPE = "the character after a backslash"
    SCALAR = "the rest of a number or literal"
    NOTHING = "nothing: the value is complete"


class JsonScanner:
    """`take` characters until `done` or `failed`; `drain` gives the value's text as far as it is certain.

    All text that `drain` has given is the beginning of some valid value: numbers and literals are held until they end.
    Control characters inside a string, which JSON forbids and models write, come out escaped. Anything else is unchanged.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._expect = _Expect.VALUE
        self._open: list[str] = []  # closing brackets that must come
        self._in_key = False
        self._hex_left = 0
        self._scalar = ""
        self._certain: list[str] = []

    def drain(self) -> str:
        """The certain text since the last call."""
        text = "".join(self._certain)
        self._certain.clear()
        return text

    def take(self, c: str) -> bool:
        """False: `c` is no part of the value, which either is `done` (a number ends only here) or has `failed`."""
        if self._expect is _Expect.SCALAR:
            if c in _SCALAR_CHARACTERS:
                self._scalar += c
                return True
            if not self._end_scalar() or self.done:
                return False
        if self._expect is _Expect.STRING:
            return self._string(c)
        if self._expect is _Expect.ESCAPE:
            return self._escape(c)
        if c in WHITESPACE and not self.done:
            self._certain.append(c)
            return True
        return self._token(c)

    def _token(self, c: str) -> bool:
        """A character outside strings and scalars."""
        expect = self._expect
        if expect in (_Expect.VALUE, _Expect.FIRST_VALUE):
            if expect is _Expect.FIRST_VALUE and c == "]":
                return self._close(c)
            return self._begin(c)
        if expect in (_Expect.KEY, _Expect.FIRST_KEY):
            if expect is _Expect.FIRST_KEY and c == "}":
                return self._close(c)
            self._in_key = True
            return self._move(c, _Expect.STRING) if c == '"' else self._fail()
        if expect is _Expect.COLON:
            return self._move(c, _Expect.VALUE) if c == ":" else self._fail()
        if expect is _Expect.COMMA:
            if c == ",":
                return self._move(c, _Expect.KEY if self._open[-1] == "}" else _Expect.VALUE)
            return self._close(c) if c == self._open[-1] else self._fail()
        return self._fail()

    def _begin(self, c: str) -> bool:
        if c in "{[":
            self._open.append("}" if c == "{" else "]")
            return self._move(c, _Expect.FIRST_KEY if c == "{" else _Expect.FIRST_VALUE)
        if c == '"':
            self._in_key = False
            return self._move(c, _Expect.STRING)
        if c in _SCALAR_CHARACTERS:
            self._scalar, self._expect = c, _Expect.SCALAR
            return True
        return self._fail()

    def _string(self, c: str) -> bool:
        if c == '"':
            return self._move(c, _Expect.COLON) if self._in_key else self._end(c)
        if c == "\\":
            return self._move(c, _Expect.ESCAPE)
        return self._move(c if c >= " " else json.dumps(c)[1:-1], _Expect.STRING)

    def _escape(self, c: str) -> bool:
        if self._hex_left:
            self._hex_left -= 1
            after = _Expect.ESCAPE if self._hex_left else _Expect.STRING
            return self._move(c, after) if c in _HEX else self._fail()
        if c == "u":
            self._hex_left = 4
            return self._move(c, _Expect.ESCAPE)
        return self._move(c, _Expect.STRING) if c in '"\\/bfnrt' else self._fail()

    def _end_scalar(self) -> bool:
        if not _SCALAR.fullmatch(self._scalar):
            return self._fail()
        return self._end(self._scalar)

    def _close(self, c: str) -> bool:
        self._open.pop()
        return self._end(c)

    def _end(self, text: str) -> bool:
        """A value ends with `text`: the whole one, or one inside an object or array."""
        self.done = not self._open
        return self._move(text, _Expect.NOTHING if self.done else _Expect.COMMA)

    def _move(self, text: str, expect: _Expect) -> bool:
        self._certain.append(text)
        self._expect = expect
        return True

    def _fail(self) -> bool:
        self.failed = not self.done
        return False


def as_json(text: str, kinds: str = "") -> str | None:
    """`text`, which may have whitespace around it, as one JSON value; None if it is none.

    kinds: the first characters the value may have, such as "{[".
    """
    body = text.strip(WHITESPACE)
    if not body or (kinds and body[0] not in kinds):
        return None
    scanner = JsonScanner()
    if not all(scanner.take(c) for c in body):
        return None
    if not scanner.done:
        scanner.take(" ")  # ends a number or literal
    return scanner.drain() if scanner.done else None
