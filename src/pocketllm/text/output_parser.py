"""`OutputParser`: the text a model writes, parted into reasoning, content and tool calls, as it comes.

What comes out does not depend on how the text is cut into pieces. The rules:

Reasoning. `<think>...</think>` before any content, or text up to `</think>` where the prompt has opened it already.
Whitespace at both ends is left out, also that before the content; so are a second `<think>` at its beginning and a
`</think>` before any content that closes nothing. Tags further on are content.

Calls. Whitespace that touches a call is left out, except between two pieces of content. A call inside reasoning ends
it. A call counts from where its function is known, to this request, and its arguments begin; then they are passed on as
they come, and together are valid JSON. A call that breaks before is text, exactly as the model wrote it: so are calls of
unknown functions. One that breaks later (the tokens run out, or what follows is not its syntax) stays begun, its
arguments stay an incomplete JSON text that no client can run by mistake, and what follows is content.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pocketllm.text.chat import ChatTemplate
from pocketllm.text.markup import THINK_BEGIN, THINK_END, Markup, generation_prompt, markup_of, opens_thinking
from pocketllm.text.tool_calls import CallReader, CallState
from pocketllm.text.tools import ToolTable
from pocketllm.text.trimmed import TrimmedText, tag_begun


@dataclass(frozen=True)
class ToolCallDelta:
    """News of one call. Its first delta has id and name; `arguments` of all its deltas join to a JSON object."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class OutputDelta:
    """What one piece of text added."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class _State(Enum):
    BEFORE = "no content yet"
    REASONING_BEGINS = "behind <think>"
    REASONING = "reasoning"
    CONTENT = "content"


class _Call:
    """What may be a call: its reader, how it opened, and the text taken that its deltas do not hold."""

    def __init__(self, reader: CallReader, opening: str) -> None:
        self.reader = reader
        self.opening = opening
        self.raw = ""
        self.index: int | None = None  # once it is certain


def make_output_parser(
    template: ChatTemplate | None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    thinking: bool,
    parse_tools: bool,
    prompt: str | None = None,
    seed: int | None = None,
) -> OutputParser:
    """A parser for one answer, in the syntax that the chat template shows (`markup_of`); None: everything is content.

    tools        the request's tools; calls of others are text. Empty: every name counts
    thinking     the template's enable_thinking: tells, where `prompt` is not given, whether the prompt opens `<think>`
    parse_tools  False: calls stay content (tool_choice "none", or no tools)
    prompt       the rendered prompt
    seed         of the calls' ids; None: different each time

    RequestError if a tool has no name or no usable schema.
    """
    markup = markup_of(template)
    if template is None or not markup.thinks:
        in_reasoning = False
    else:
        in_reasoning = opens_thinking(generation_prompt(template, thinking=thinking) if prompt is None else prompt)
    if not parse_tools:
        markup = Markup(markup.thinks)
    return OutputParser(markup, ToolTable(tools), in_reasoning=in_reasoning, ids=random.Random(seed))


class OutputParser:
    """`push` the text in any pieces, then `finish` once; each gives what is new."""

    def __init__(self, markup: Markup, tools: ToolTable, *, in_reasoning: bool, ids: random.Random) -> None:
        """in_reasoning: the text begins inside `<think>`. ids: source of the calls' ids."""
        self.markup = markup
        self._tools = tools
        self._ids = ids
        self._openings = dict(markup.tools.openings) if markup.tools is not None else {}
        self._text = ""  # not decided yet
        self._content, self._reasoning = TrimmedText(), TrimmedText()
        self._reasoning.cut()
        self._state = _State.REASONING_BEGINS if in_reasoning else self._outside()
        self._calls: list[ToolCallDelta] = []  # new
        self._num_calls = 0
        self._call: _Call | None = None  # being read; where it came from is still in `_state`

    @property
    def in_reasoning(self) -> bool:
        """Whether text now counts as reasoning, as far as is known."""
        return self._state in (_State.REASONING, _State.REASONING_BEGINS)

    @property
    def has_tool_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str) -> OutputDelta:
        """The next piece of the model's text."""
        self._text += text
        while self._step():
            pass
        return self._delta()

    def finish(self) -> OutputDelta:
        """No more text comes: what was held back."""
        while self._call is not None:
            self._call.reader.finish()
            self._leave_call(self._call)
            while self._step():
                pass
        self._channel().push(self._text)
        self._text = ""
        self._reasoning.finish()
        self._content.finish()
        return self._delta()

    def _delta(self) -> OutputDelta:
        calls, self._calls = tuple(self._calls), []
        return OutputDelta(self._content.take(), self._reasoning.take(), calls)

    # -- one step each: False if the rest of the text can't be decided without more -----------------------------------

    def _step(self) -> bool:
        if not self._text:
            return False
        if self._call is not None:
            return self._in_call(self._call)
        if self._state in (_State.BEFORE, _State.REASONING_BEGINS):
            return self._at_beginning()
        return self._in_text()

    def _at_beginning(self) -> bool:
        """Tags that may stand before any content, or before any reasoning."""
        body = self._text.lstrip()
        tags = (THINK_BEGIN, THINK_END) if self._state is _State.BEFORE else (THINK_BEGIN,)
        tag = next((tag for tag in tags if body.startswith(tag)), None)
        if tag is not None:
            self._text = body[len(tag) :]
            self._content.cut()
            self._state = _State.REASONING_BEGINS if tag == THINK_BEGIN else _State.BEFORE
            return True
        if any(tag.startswith(body) for tag in tags):  # also: only whitespace so far
            return False
        self._state = _State.CONTENT if self._state is _State.BEFORE else _State.REASONING
        return True

    def _in_text(self) -> bool:
        """Content or reasoning, up to the next tag."""
        tags = [*self._openings, THINK_END] if self._state is _State.REASONING else list(self._openings)
        found = [(at, tag) for tag in tags if (at := self._text.find(tag)) >= 0]
        if not found:
            held = max((tag_begun(self._text, tag) for tag in tags), default=0)
            cut = len(self._text) - held
            self._channel().push(self._text[:cut])
            self._text = self._text[cut:]
            return False
        at, tag = min(found)
        self._channel().push(self._text[:at])
        self._text = self._text[at + len(tag) :]
        if tag == THINK_END:
            self._end_reasoning()
        else:
            self._begin_call(tag)
        return True

    def _begin_call(self, opening: str) -> None:
        assert self.markup.tools is not None
        reader = self.markup.tools.begin(self._tools)
        for c in opening[self._openings[opening] :]:
            reader.take(c)
        self._call = _Call(reader, opening)

    def _in_call(self, call: _Call) -> bool:
        reader = call.reader
        arguments = []
        used = 0
        for c in self._text:
            used += 1
            call.raw += c
            given = reader.take(c)
            if call.index is None and reader.name is not None:
                self._make_certain(call, reader.name)
            if given:
                arguments.append(given)
                call.raw = c if reader.state is CallState.BROKEN else reader.unread
            if reader.state is not CallState.OPEN:
                break
        self._text = self._text[used:]
        if call.index is not None and arguments:
            self._calls.append(ToolCallDelta(call.index, None, None, "".join(arguments)))
        if reader.state is CallState.OPEN:
            return False
        self._leave_call(call)
        return True

    def _make_certain(self, call: _Call, name: str) -> None:
        call.index = self._num_calls
        self._num_calls += 1
        self._calls.append(ToolCallDelta(call.index, f"call_{self._ids.getrandbits(96):024x}", name, ""))
        if self.in_reasoning:
            self._end_reasoning()
        self._content.cut()
        self._state = self._outside()

    def _leave_call(self, call: _Call) -> None:
        """It is complete or broken: what is no part of it is read again, as text."""
        self._call = None
        if call.reader.state is CallState.DONE:
            self._text = call.reader.unread + self._text
            return
        if call.index is None:
            self._channel().push(call.opening)
        self._text = call.raw + self._text

    def _end_reasoning(self) -> None:
        self._reasoning.cut()
        self._content.cut()
        self._state = self._outside()

    def _channel(self) -> TrimmedText:
        return self._reasoning if self.in_reasoning else self._content

    def _outside(self) -> _State:
        """The state of text that is neither reasoning nor a call."""
        return _State.BEFORE if self.markup.thinks and self._content.empty else _State.CONTENT
