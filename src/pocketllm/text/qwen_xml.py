"""Calls of Qwen3-Coder and of Qwen3.5 and later, in tags:

    <tool_call>
    <function=f>
    <parameter=city>
    Köln
    </parameter>
    </function>
    </tool_call>

A value is bare text between one line break and the next; its type is the tool's schema's (`typed_values`). A text can't
hold `</parameter>`. The outer tags may be missing, as these models sometimes leave them out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pocketllm.text.json_scanner import WHITESPACE
from pocketllm.text.qwen_xml_grammar import call_rules
from pocketllm.text.tool_calls import CALL_BEGIN, CallReader, CallState, ClosingTag
from pocketllm.text.tools import ToolTable
from pocketllm.text.typed_values import json_of, types_of

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_FUNCTION_END, _PARAMETER_END = "</function>", "</parameter>"


class QwenXmlSyntax:
    openings: Mapping[str, int] = {CALL_BEGIN: len(CALL_BEGIN), _FUNCTION: 0}

    def begin(self, tools: ToolTable) -> CallReader:
        return QwenXmlReader(tools)

    def rules(self, rule: str, name: str, parameters: Mapping[str, Any]) -> str:
        return call_rules(rule, name, parameters)


class QwenXmlReader:
    """Certain when the function is known and its first parameter, or its end, begins.

    Texts are passed on as they come, values of other types when they are complete.
    """

    def __init__(self, tools: ToolTable) -> None:
        self.name: str | None = None
        self.state = CallState.OPEN
        self.unread = ""
        self._tools = tools
        self._expect: Callable[[str], str] = self._function_tag
        self._text = ""  # taken since the last tag, or since what was passed on
        self._function = ""
        self._keys: set[str] = set()
        self._head = ""  # of the member being read: comma and key
        self._types: tuple[str, ...] = ()
        self._at_start = False  # of a value: a line break here is not part of it
        self._closing = ClosingTag()

    def take(self, c: str) -> str:
        self.unread = ""
        return self._expect(c)

    def finish(self) -> None:
        complete = self._expect == self._after
        self.state, self.unread = (CallState.DONE, self._closing.text) if complete else (CallState.BROKEN, "")

    def _function_tag(self, c: str) -> str:
        if self._tag(c, _FUNCTION):
            self._expect = self._function_name
        return ""

    def _function_name(self, c: str) -> str:
        if self._word(c):
            self._function = self._text
            self._text, self._expect = "", self._member
            if not self._tools.knows(self._function):
                return self._break()
        return ""

    def _member(self, c: str) -> str:
        """`<parameter=` or `</function>`."""
        tag = self._tag(c, _PARAMETER, _FUNCTION_END)
        if tag is None:
            return ""
        begin = "{" if self.name is None else ""
        self.name = self._function
        if tag == _FUNCTION_END:
            self._expect = self._after
            return begin + "}"
        self._expect, self.unread = self._parameter_name, tag
        return begin

    def _parameter_name(self, c: str) -> str:
        if not self._word(c):
            return ""
        key, self._text = self._text, ""
        if key in self._keys:
            return self._break()
        head = (", " if self._keys else "") + json.dumps(key, ensure_ascii=False) + ": "
        self._keys.add(key)
        self._types = types_of(self._tools.parameter(self._function, key), self._tools.parameters(self._function))
        self._at_start = True
        if self._types == ("string",):
            self._expect = self._string_value
            return head + '"'
        self._head, self._expect = head, self._typed_value
        return ""

    def _string_value(self, c: str) -> str:
        if self._skip_first_break(c):
            return ""
        self._text += c
        if self._text.endswith(_PARAMETER_END):
            text, end = self._value(), '"'
        else:
            cut, end = len(self._text) - _end_begun(self._text), ""
            text, self._text = self._text[:cut], self._text[cut:]
        self.unread = self._text
        return json.dumps(text, ensure_ascii=False)[1:-1] + end

    def _typed_value(self, c: str) -> str:
        if self._skip_first_break(c):
            return ""
        self._text += c
        return self._head + json_of(self._value(), self._types) if self._text.endswith(_PARAMETER_END) else ""

    def _after(self, c: str) -> str:
        self.state = self._closing.take(c)
        self.unread = self._closing.text
        return ""

    # ----------------------------------------------------------------------------------------------------------------

    def _skip_first_break(self, c: str) -> bool:
        first, self._at_start = self._at_start, False
        return first and c == "\n"

    def _value(self) -> str:
        """The text before the closing tag, without one line break."""
        text = self._text.removesuffix(_PARAMETER_END).removesuffix("\n")
        self._text, self._expect = "", self._member
        return text

    def _tag(self, c: str, *tags: str) -> str | None:
        """The tag that `c` completes, whitespace before it allowed; broken if none can come any more."""
        if c in WHITESPACE and not self._text:
            return None
        self._text += c
        if self._text in tags:
            tag, self._text = self._text, ""
            return tag
        if not any(tag.startswith(self._text) for tag in tags):
            self._break()
        return None

    def _word(self, c: str) -> bool:
        """True when `c` is the `>` after a name, which is then in `_text`."""
        if c == ">" and self._text:
            return True
        if c in "<>\n":
            self._break()
        self._text += c
        return False

    def _break(self) -> str:
        self.state = CallState.BROKEN
        return ""


def _end_begun(text: str) -> int:
    """Length of the longest end of `text` that may begin a value's end: a line break and the closing tag, or the tag."""
    ends = "\n" + _PARAMETER_END, _PARAMETER_END
    longest = min(len(text), len(ends[0]) - 1)
    return next((n for n in range(longest, 0, -1) if any(end.startswith(text[-n:]) for end in ends)), 0)
