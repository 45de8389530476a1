"""Hermes calls (Qwen2.5, Qwen3): `<tool_call>` {"name": "f", "arguments": {...}} `</tool_call>`.

Read with the tolerance that models need: members in any order, unknown members ignored, arguments left out (none), null,
or written as a JSON text of an object; a missing `</tool_call>`; raw line breaks inside strings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pocketllm.text.json_scanner import WHITESPACE, JsonScanner, as_json
from pocketllm.text.lark import json_rule, literal
from pocketllm.text.tool_calls import CALL_BEGIN, CALL_END, CallReader, CallState, ClosingTag
from pocketllm.text.tools import ToolTable


class HermesSyntax:
    openings: Mapping[str, int] = {CALL_BEGIN: len(CALL_BEGIN)}

    def begin(self, tools: ToolTable) -> CallReader:
        return HermesReader(tools)

    def rules(self, rule: str, name: str, parameters: Mapping[str, Any]) -> str:
        head = literal(f'{CALL_BEGIN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
        tail = literal("}\n" + CALL_END)
        return f"{rule}: {head} {rule}_arguments {tail}\n" + json_rule(
            f"{rule}_arguments", {"type": "object", **parameters}, lenient=True
        )


class HermesReader:
    """Certain when the name is known and its arguments begin: from there on their text is passed on as it comes."""

    def __init__(self, tools: ToolTable) -> None:
        self.name: str | None = None
        self.state = CallState.OPEN
        self.unread = ""
        self._tools = tools
        self._expect: Callable[[str], str] = self._object
        self._value = JsonScanner()
        self._text = ""  # of the value being read, where it is not passed on at once
        self._key = ""
        self._function: str | None = None
        self._arguments: str | None = None  # complete, and not given yet
        self._given = False  # arguments have begun to be passed on
        self._closing = ClosingTag()

    def take(self, c: str) -> str:
        return self._expect(c)

    def finish(self) -> None:
        complete = self._expect == self._after
        self.state, self.unread = (CallState.DONE, self._closing.text) if complete else (CallState.BROKEN, "")

    # -- what may come next: each takes one character and returns certain text of the arguments ----------------------

    def _object(self, c: str) -> str:
        return self._next(c, "{", self._first_key)

    def _first_key(self, c: str) -> str:
        return self._break() if c == "}" else self._next_key(c)

    def _next_key(self, c: str) -> str:
        if c in WHITESPACE:
            return ""
        return self._start(c, self._in_key) if c == '"' else self._break()

    def _in_key(self, c: str) -> str:
        if self._scan(c) and self._value.done:
            self._key = json.loads(self._text)
            self._expect = self._colon
        return ""

    def _colon(self, c: str) -> str:
        return self._next(c, ":", self._any_value)

    def _any_value(self, c: str) -> str:
        if c in WHITESPACE:
            return ""
        if self._key == "name":
            return self._start(c, self._in_name) if c == '"' and self._function is None else self._break()
        if self._key != "arguments":
            return self._start(c, self._in_other)
        if self._given or self._arguments is not None:
            return self._break()  # a second time
        if c == "{" and self._function is not None:
            self.name, self._given = self._function, True
            return self._start(c, self._in_given)
        return self._start(c, self._in_arguments)

    def _in_name(self, c: str) -> str:
        if self._scan(c) and self._value.done:
            self._function = json.loads(self._text)
            self._expect = self._comma
            if not self._tools.knows(self._function):
                return self._break()
            if self._arguments is not None:
                return self._give(self._arguments)
        return ""

    def _in_given(self, c: str) -> str:
        self._value.take(c)
        if self._value.failed:
            self._break()
        elif self._value.done:
            self._expect = self._comma
        return self._value.drain()

    def _in_arguments(self, c: str) -> str:
        """An object before the name, a JSON text, or null."""
        used = self._scan(c)
        if not self._value.done:
            return ""
        text = json.loads(self._text) if self._text.startswith('"') else self._text
        self._arguments = "{}" if text == "null" else as_json(text, "{")
        if self._arguments is None or not _is_unicode(self._arguments):
            return self._break()
        self._expect = self._comma
        given = self._give(self._arguments) if self._function is not None else ""
        return given if used else given + self.take(c)

    def _in_other(self, c: str) -> str:
        used = self._scan(c)
        if self._value.done:
            self._expect = self._comma
            return "" if used else self.take(c)
        return ""

    def _comma(self, c: str) -> str:
        if c != "}":
            return self._next(c, ",", self._next_key)
        if self._function is None:
            return self._break()
        self._expect = self._after
        return "" if self._given else self._give("{}")

    def _after(self, c: str) -> str:
        self.state = self._closing.take(c)
        self.unread = self._closing.text
        return ""

    # ----------------------------------------------------------------------------------------------------------------

    def _next(self, c: str, expected: str, then: Callable[[str], str]) -> str:
        if c == expected:
            self._expect = then
        elif c not in WHITESPACE:
            return self._break()
        return ""

    def _start(self, c: str, then: Callable[[str], str]) -> str:
        """A value begins with `c`."""
        self._value, self._text, self._expect = JsonScanner(), "", then
        return then(c)

    def _scan(self, c: str) -> bool:
        """Give `c` to the value; False if it is no part of it."""
        used = self._value.take(c)
        if self._value.failed:
            self._break()
        self._text += self._value.drain()
        return used

    def _give(self, arguments: str) -> str:
        self.name, self._given = self._function, True
        return arguments

    def _break(self) -> str:
        self.state = CallState.BROKEN
        return ""


def _is_unicode(text: str) -> bool:
    """An escape in a JSON text can be half a surrogate pair."""
    return not any("\ud800" <= c <= "\udfff" for c in text)
