"""Qwen's XML calls as a grammar: parameters in the order they are declared, the required ones always.

Values follow their schema as far as bare text can: enums, lengths and patterns of texts, JSON for all other types. The
whole text of a parameter stays below `</parameter>`, which the syntax has no way to write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pocketllm.text.lark import json_rule, literal, regex
from pocketllm.text.typed_values import resolve, types_of

_END = "</parameter>"
_CLOSE, _CLOSE_LINE = literal(f"\n{_END}"), literal(f"\n{_END}\n")
_NO_END = rf"~/(?s:.*){regex(_END)}(?s:.*)/"


def call_rules(rule: str, name: str, parameters: Mapping[str, Any]) -> str:
    """Lark rules for one call; the first is called `rule`."""
    properties = parameters.get("properties") or {}
    required = parameters.get("required") or []
    keys = dict.fromkeys((*properties, *required))
    uses, definitions = "", ""
    for i, key in enumerate(keys):
        parameter = f"{rule}_p{i}"
        uses += f" {parameter}" + ("" if key in required else "?")
        definitions += f"{parameter}: {literal(f'<parameter={key}>')} {parameter}_value\n"
        definitions += _value(f"{parameter}_value", properties.get(key), parameters)
    head = literal(f"<tool_call>\n<function={name}>\n")
    tail = literal("</function>\n</tool_call>")
    return f"{rule}: {head}{uses} {tail}\n{definitions}"


def _value(rule: str, schema: Any, root: Mapping[str, Any]) -> str:
    """A rule for a line break, the value, and the parameter's end."""
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        schema = resolve(schema["$ref"], root)
    types = types_of(schema, root)
    values = _enumerated(schema)
    if values:
        options = " | ".join(literal(v if isinstance(v, str) else json.dumps(v)) for v in values)
        return f'{rule}: "\\n" ({options}) {_CLOSE_LINE}\n'
    if types == ("string",) and isinstance(schema, Mapping):
        limits = _text_limits(schema)
        if limits:
            terminal = rule.upper()
            return f'{rule}: "\\n" {terminal} "\\n"\n{terminal}: ({" & ".join([*limits, _NO_END])}) {_CLOSE}\n'
    if "string" in types:
        return f'{rule}: "\\n" {rule}_text "\\n"\n{rule}_text[lazy]: /(?s:.*)/ {literal(_END)}\n'
    shared = {word: root[word] for word in ("$defs", "definitions") if word in root}
    return f'{rule}: "\\n" {rule}_json {_CLOSE_LINE}\n' + json_rule(f"{rule}_json", {**shared, **schema}, lenient=True)


def _enumerated(schema: Any) -> list[Any]:
    if not isinstance(schema, Mapping):
        return []
    return [schema["const"]] if "const" in schema else list(schema.get("enum") or [])


def _text_limits(schema: Mapping[str, Any]) -> list[str]:
    """Regular expressions that a text must match as a whole."""
    limits = []
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    if shortest or longest is not None:
        limits.append(f"/(?s:.{{{shortest},{'' if longest is None else longest}}})/")
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and not _has_alternatives(pattern):
        # A schema's pattern may match anywhere in the text unless it is anchored.
        begin, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        inner = pattern[begin : len(pattern) - end]
        limits.append(f"/{'' if begin else '(?s:.*)'}({regex(inner)}){'' if end else '(?s:.*)'}/")
    return limits


def _has_alternatives(pattern: str) -> bool:
    """Whether `|` stands outside all groups, where anchors belong to one alternative each."""
    depth, escaped = 0, False
    for c in pattern:
        if not escaped:
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(c, 0)
            if c == "|" and depth == 0:
                return True
        escaped = c == "\\" and not escaped
    return False
