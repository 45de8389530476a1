"""Arguments that a model wrote as bare text, as JSON of the type their schema asks for.

Qwen's XML calls have no quotes: whether `5` is a number or a text is known from the tool's schema only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pocketllm.text.json_scanner import WHITESPACE, as_json
from pocketllm.text.tools import Schema

_ANY = ("null", "boolean", "number", "object", "array", "string")
_PYTHON_WORDS = {
    "None": "null",
    "True": "true",
    "False": "false",
}  # templates write past calls' values with Python's str
_WORDS = {"null": ("null",), "boolean": ("true", "false")}
_TYPE_OF = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def types_of(schema: Schema | None, root: Mapping[str, Any]) -> tuple[str, ...]:
    """The JSON types a schema allows, in its own order; "string" for an argument nobody declared (None).

    root: the schema that local references (`#/$defs/...`) point into.
    """
    if schema is None:
        return ("string",)
    found = tuple(dict.fromkeys(_types(schema, root, depth=0)))
    return found or _ANY


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth > 16:  # true: anything; a reference that leads to itself
        return
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (t for t in declared if isinstance(t, str))
    elif isinstance(schema.get("enum"), list):
        yield from (_type_of(value) for value in schema["enum"])
    elif "const" in schema:
        yield _type_of(schema["const"])
    elif isinstance(schema.get("$ref"), str):
        yield from _types(resolve(schema["$ref"], root), root, depth + 1)
    else:
        for word in ("anyOf", "oneOf", "allOf"):
            for option in schema[word] if isinstance(schema.get(word), list) else ():
                yield from _types(option, root, depth + 1)


def _type_of(value: Any) -> str:
    return _TYPE_OF.get(type(value), "null")


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """What a local reference (a JSON pointer after `#`) points to; None if it is not there."""
    target: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        target = target.get(step) if isinstance(target, Mapping) else None
    return target if reference.startswith("#") else None


def json_of(text: str, types: tuple[str, ...]) -> str:
    """`text` as JSON text of the first of `types` that it can be; a text that fits none of them becomes a string.

    "string" fits everything, so it comes last; but where a schema names it beside numbers, `5` stays a text.
    """
    bare = text.strip(WHITESPACE)
    for name in types:
        if name in ("integer", "number") and "string" in types and types != _ANY:
            continue
        value = _as(name, bare)
        if value is not None:
            return value
    return json.dumps(text, ensure_ascii=False)


def _as(name: str, bare: str) -> str | None:
    if name in ("object", "array"):
        return as_json(bare, "{" if name == "object" else "[")
    if name in ("integer", "number"):
        number = as_json(bare, "-0123456789")
        return number if number is None or name == "number" else _integer(number)
    word = _PYTHON_WORDS.get(bare, bare)
    return word if word in _WORDS.get(name, ()) else None


def _integer(number: str) -> str | None:
    """`number` if it is whole. JSON Schema counts 5.0 as an integer; clients that want an int get 5."""
    whole, _, fraction = number.partition(".")
    return whole if not fraction.strip("0") and "e" not in whole.lower() else None
