"""Arguments of tool calls: which texts are JSON, and what type a schema makes of a text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answer_formats import json_values
from pocketllm.text.json_scanner import as_json
from pocketllm.text.typed_values import json_of, types_of

json_pieces = st.sampled_from(
    [
        '{"a": 1}',
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        ",",
        "1",
        "0",
        "-",
        ".5",
        "e+1",
        "true",
        "null",
        " ",
        "\n",
        "\\",
        "u00e9",
        "n",
    ]
)


def refuse(word):
    raise ValueError(word)


@settings(max_examples=600, deadline=None)
@given(st.one_of(st.lists(json_pieces, max_size=10).map("".join), json_values.map(json.dumps)))
def test_json_is_what_python_takes_for_json(text):
    try:
        value = json.loads(text, strict=False, parse_constant=refuse)
    except ValueError:
        assert as_json(text) is None
    else:
        assert json.loads(as_json(text)) == value


def test_json_of_a_kind():
    assert as_json(" {} ", "{[") == "{}"
    assert as_json("1", "{[") is None
    assert as_json("[" * 100_000 + "]" * 100_000) is not None  # no recursion
    assert as_json("9" * 10_000) is not None


ROOT = {"$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}, "a/b": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        (None, ("string",)),
        ({"type": "string"}, ("string",)),
        ({"type": ["integer", "null"]}, ("integer", "null")),
        ({"enum": ["a", 1, None, True, 2.5]}, ("string", "integer", "null", "boolean", "number")),
        ({"const": [1]}, ("array",)),
        ({"$ref": "#/$defs/n"}, ("integer",)),
        ({"$ref": "#/$defs/a~1b"}, ("null",)),
        ({"anyOf": [{"$ref": "#/$defs/n"}, {"oneOf": [{"type": "object"}]}]}, ("integer", "object")),
        ({"$ref": "#/$defs/loop"}, ("null", "boolean", "number", "object", "array", "string")),
        ({"$ref": "#/$defs/missing"}, ("null", "boolean", "number", "object", "array", "string")),
        (True, ("null", "boolean", "number", "object", "array", "string")),
    ],
)
def test_types_of_a_schema(schema, types):
    assert types_of(schema, ROOT) == types


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("5", {"type": "string"}, '"5"'),
        ("5", {"type": "integer"}, "5"),
        ("5.0", {"type": "integer"}, "5"),
        ("5.5", {"type": "integer"}, '"5.5"'),
        ("1e400", {"type": "number"}, "1e400"),
        ("NaN", {"type": "number"}, '"NaN"'),
        ("Infinity", True, '"Infinity"'),
        ("007", {"type": "integer"}, '"007"'),
        ("False", {"type": "boolean"}, "false"),
        ("yes", {"type": "boolean"}, '"yes"'),
        ("null", {"type": ["string", "null"]}, "null"),
        ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, '"5"'),
        ('{"a": 1}', {"type": ["string", "object"]}, '{"a": 1}'),
        ('{"a": "x\ny"}', {"type": "object"}, '{"a": "x\\ny"}'),
        ("{'a': 1}", {"type": "object"}, "\"{'a': 1}\""),
        ("[1]", {"type": "object"}, '"[1]"'),
        ("5", {}, "5"),
        (" a ", {}, '" a "'),
    ],
)
def test_texts_become_the_type_their_schema_asks_for(text, schema, expected):
    assert json_of(text, types_of(schema, {})) == expected
