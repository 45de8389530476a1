"""Pieces of grammar text in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# JSON on one line, with or without a space behind commas and colons. More whitespace would be valid JSON too, but it costs
# tokens, and a model that is kept from ending where it wants to writes whitespace until its tokens run out.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}  # regular expressions

# Between `</think>` and the answer.
GAP = r"/[ \t\r\n]{0,4}/"


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_rule(rule: str, schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """A rule for JSON on one line that `schema` allows. lenient: leave out keywords that grammars can't express."""
    options = {**_JSON_STYLE, "lenient": lenient}
    return f"{rule}: %json {json.dumps({**schema, 'x-guidance': options})}\n"


def regex(pattern: str) -> str:
    """`pattern` as it stands between slashes: Lark ends a regular expression at a bare slash and at a line's end."""
    escaped: list[str] = []
    after_backslash = False
    for c in pattern:
        special = {"/": "\\/", "\n": "\\n", "\r": "\\r"}.get(c)
        if after_backslash and special:
            escaped[-1] = ""  # the pattern had escaped it itself
        escaped.append(special or c)
        after_backslash = c == "\\" and not after_backslash
    return "".join(escaped)
