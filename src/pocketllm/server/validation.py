"""pydantic's list of errors as one sentence that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_TYPE_TAGS = {"str", "int", "float", "bool", "constrained-str"}


def describe(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """(message, name of the field at fault). Of several errors those of the first field are told."""
    found = [(_path(error), _message(error)) for error in errors]
    path = found[0][0]
    messages = dict.fromkeys(message for where, message in found if where == path)
    text = " or: ".join(messages)
    return (f"{path}: {text}" if path else text), path or None


def _path(error: Mapping[str, Any]) -> str:
    """('body', 'messages', 0, 'content', 'str') -> 'messages[0].content'; what follows are the members of a union."""
    if error["type"] == "json_invalid":  # the location is a place in the text
        return ""
    path, loc = "", error["loc"]
    for i, step in enumerate(loc):
        if i == 0 and step == "body":
            continue
        if isinstance(step, int):
            path += f"[{step}]"
        elif step in _TYPE_TAGS or not re.fullmatch(r"[a-z_][a-z0-9_]*", step):
            break
        else:
            path += f".{step}" if path else step
    return path


def _message(error: Mapping[str, Any]) -> str:
    kind, text = str(error["type"]), str(error["msg"])
    if kind == "extra_forbidden":
        return "unknown field: this server does not support it"
    if kind == "missing":
        return "this field is missing"
    if kind == "json_invalid":
        return f"the body is no valid JSON: {error.get('ctx', {}).get('error', text)}"
    if kind == "model_attributes_type" and len(error["loc"]) <= 1:
        return "the body must be a JSON object, sent with content-type: application/json"
    return text.removeprefix("Value error, ").replace("Input should be", "must be")
