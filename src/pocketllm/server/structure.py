"""The form an answer must have, from the fields in which clients ask for one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pocketllm.errors import RequestError
from pocketllm.server.schemas.openai import ResponseFormat, StructuredOutputs
from pocketllm.text.grammar import AnswerForm, JsonObject, JsonSchema, LarkGrammar, Regex


def form_of(format: ResponseFormat | None, outputs: StructuredOutputs | None) -> AnswerForm | None:
    """From OpenAI's response_format or vLLM's structured_outputs; RequestError if both, or several, are given."""
    found = [*_of_format(format), *_of_outputs(outputs)]
    if len(found) > 1:
        raise RequestError("one form of the answer can be asked for: response_format, or one of structured_outputs")
    return found[0] if found else None


def _of_format(format: ResponseFormat | None) -> Sequence[AnswerForm]:
    if format is None or format.type == "text":
        return ()
    if format.type == "json_object":
        return (JsonObject(),)
    if format.json_schema is None:
        raise RequestError("response_format of type json_schema needs json_schema, with name and schema")
    return (JsonSchema(format.json_schema.schema_),)


def _of_outputs(outputs: StructuredOutputs | None) -> Sequence[AnswerForm]:
    if outputs is None:
        return ()
    found: list[AnswerForm] = []
    if outputs.json_ is not None:
        found.append(JsonSchema(_schema(outputs.json_)))
    if outputs.json_object:
        found.append(JsonObject())
    if outputs.regex is not None:
        found.append(Regex(outputs.regex))
    if outputs.choice is not None:
        found.append(LarkGrammar("start: " + " | ".join(json.dumps(text) for text in outputs.choice)))
    if outputs.grammar is not None:
        found.append(LarkGrammar(outputs.grammar))
    return found


def _schema(schema: dict[str, Any] | str) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except ValueError as error:
        raise RequestError(f"structured_outputs.json is no JSON: {error}") from error
