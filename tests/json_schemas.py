"""JSON schemas as applications write them, for the tests of grammars."""

from __future__ import annotations

from typing import Any


def obj(required: int = 99, **properties: Any) -> dict[str, Any]:
    """An object of exactly these properties, the first `required` of which must be there."""
    keys = list(properties)
    return {"type": "object", "properties": properties, "required": keys[:required], "additionalProperties": False}


INTEGER = {"type": "integer"}
BOOLEAN = {"type": "boolean"}
SHORT = {"type": "string", "maxLength": 8}

SCHEMAS: dict[str, dict[str, Any]] = {
    "integer": obj(n=INTEGER),
    "flat": obj(a=SHORT, b=INTEGER, c=BOOLEAN, d={"type": "null"}, e={"type": "number"}),
    "optional members": obj(1, a=INTEGER, b=BOOLEAN, c=SHORT),
    "nested": obj(a=obj(b=obj(c=obj(d=BOOLEAN)))),
    "string enum": obj(color={"enum": ["red", "green", 'quo"ted', "Köln\n"]}),
    "mixed enum": obj(v={"enum": ["a", 1, None, True, 2.5, [1, "x"], {"k": 0}]}),
    "const": obj(kind={"const": "point"}, version={"const": 3}),
    "bounded array": obj(items={"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 4}),
    "empty array": obj(items={"type": "array", "maxItems": 0}),
    "array of objects": obj(rows={"type": "array", "items": obj(x=INTEGER, y=BOOLEAN), "minItems": 1, "maxItems": 3}),
    "tuple": obj(pair={"type": "array", "prefixItems": [INTEGER, BOOLEAN], "items": False, "minItems": 2}),
    "top array": {"type": "array", "items": BOOLEAN, "maxItems": 5},
    "top scalar": {"type": "integer", "minimum": -5, "maximum": 5},
    "lengths": obj(code={"type": "string", "minLength": 3, "maxLength": 5}),
    "pattern": obj(id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"}),
    "free pattern": obj(word={"type": "string", "pattern": "ab+", "maxLength": 12}),
    "formats": obj(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    "time": obj(at={"type": "string", "format": "date-time"}),
    "integer bounds": obj(n={"type": "integer", "minimum": 17, "exclusiveMaximum": 1203}),
    "number bounds": obj(x={"type": "number", "exclusiveMinimum": 0, "maximum": 1.25}),
    "multiples": obj(n={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}),
    "any of": obj(v={"anyOf": [INTEGER, BOOLEAN, obj(k={"type": "null"})]}),
    "type list": obj(v={"type": ["integer", "null", "boolean"]}),
    "nullable reference": {
        **obj(v={"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}),
        "$defs": {"point": obj(x=INTEGER, y=INTEGER)},
    },
    "definitions": {
        **obj(a={"$ref": "#/definitions/flag"}, b={"$ref": "#/definitions/flag"}),
        "definitions": {"flag": BOOLEAN},
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": obj(1, v=INTEGER, next={"$ref": "#/$defs/node"})},
    },
    "all of": {"allOf": [obj(a=INTEGER, b=BOOLEAN)]},
    "one of": obj(v={"oneOf": [obj(kind={"const": "a"}, n=INTEGER), obj(kind={"const": "b"}, f=BOOLEAN)]}),
    "map": {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": INTEGER},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "annotations": {
        **obj(a={"type": "integer", "title": "A", "description": "an a", "default": 3, "examples": [1]}),
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Thing",
    },
}
