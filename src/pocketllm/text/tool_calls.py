"""What the syntaxes of tool calls have in common: one is read character by character, and can be written as a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol

from pocketllm.text.json_scanner import WHITESPACE
from pocketllm.text.tools import ToolTable

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"


class CallState(Enum):
    OPEN = "open"  # more text can belong to the call
    DONE = "done"  # complete
    BROKEN = "broken"  # the text is no call, or no longer


class CallReader(Protocol):
    """Reads one call. A call is *certain* once `name` is set: then its function exists, and its arguments have begun.

    The texts that `take` returns are the arguments, as JSON, as far as they are certain. `unread` is the end of the text
    taken that is not in them: when `take` has just returned something what it holds back, when DONE what follows the call.
    """

    name: str | None
    state: CallState
    unread: str

    def take(self, c: str) -> str:
        """The next character while `state` is OPEN. One that breaks the call is not used."""

    def finish(self) -> None:
        """No more text comes: OPEN becomes DONE if only closing tags are missing, else BROKEN."""


class ToolSyntax(Protocol):
    """How a model family writes calls.

    openings      texts that may begin a call, by the number of their characters that the reader is not to see
    begin(tools)  a reader for one call
    rules         Lark rules named `rule` (and `rule_...`) for a call of function `name`, in llguidance's dialect
    """

    openings: Mapping[str, int]

    def begin(self, tools: ToolTable) -> CallReader: ...

    def rules(self, rule: str, name: str, parameters: Mapping[str, Any]) -> str: ...


class ClosingTag:
    """Reads whitespace and then `</tool_call>`, which models forget: anything else ends the call as well."""

    def __init__(self) -> None:
        self.text = ""

    def take(self, c: str) -> CallState:
        self.text += c
        tag = self.text.lstrip(WHITESPACE)
        if tag == CALL_END:
            self.text = ""
            return CallState.DONE
        return CallState.OPEN if CALL_END.startswith(tag) else CallState.DONE
