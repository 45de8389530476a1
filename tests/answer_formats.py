"""Chat templates, tools and calls in the formats of Qwen's families, and a reader of all that a parser gives."""

from __future__ import annotations

import re

from hypothesis import strategies as st

from pocketllm.text.chat import ChatTemplate
from pocketllm.text.output_parser import OutputParser, make_output_parser

_OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_THINKING = (
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}{% endif %}"
)
TEMPLATES = {
    "plain": ChatTemplate(_OPENING),
    "hermes": ChatTemplate('{{ \'<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\' if tools }}' + _OPENING),
    "qwen3": ChatTemplate(
        '{{ \'<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\' if tools }}{{ \'</think>\' if tools }}'
        + _OPENING
    ),
    "coder": ChatTemplate("{{ '<tool_call>\n<function=f>' if tools }}" + _OPENING),
    "qwen3.5": ChatTemplate("{{ '<tool_call>\n<function=f>' if tools }}" + _THINKING),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "i": {"type": "integer"},
                    "x": {"type": "number"},
                    "b": {"type": "boolean"},
                    "a": {"type": "array"},
                    "o": {"$ref": "#/$defs/thing"},
                    "n": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "e": {"enum": ["one", "two"]},
                },
                "$defs": {"thing": {"type": "object"}},
            },
        },
    },
    {"name": "get-time"},
]


def parser_of(family: str, **options) -> OutputParser:
    return make_output_parser(TEMPLATES[family], **{"tools": TOOLS, "thinking": True, "parse_tools": True} | options)


def read(parser: OutputParser, pieces) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and name and arguments of each call, joined from all deltas."""
    content, reasoning, calls = "", "", []
    for delta in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        content += delta.content
        reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.name is not None:
                assert call.index == len(calls)
                assert re.fullmatch("call_[0-9a-f]{24}", call.id)
                calls.append([call.name, ""])
            assert call.index == len(calls) - 1
            calls[-1][1] += call.arguments
    assert parser.has_tool_calls == bool(calls)
    return content, reasoning, [(name, arguments) for name, arguments in calls]


HERMES = '<tool_call>\n{"name": "f", "arguments": {"s": "x"}}\n</tool_call>'
XML = "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>"
CALL = ("f", '{"s": "x"}')

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
