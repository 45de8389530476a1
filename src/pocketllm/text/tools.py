"""`ToolTable`: the functions a request offers to the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pocketllm.errors import RequestError

Schema = Mapping[str, Any] | bool
_PLAUSIBLE_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")


class ToolTable:
    """Tools in OpenAI's form, {"type": "function", "function": {"name", "parameters"}}, or the inner object alone.

    RequestError if one has no name or its parameters are no JSON schema of an object.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for i, tool in enumerate(tools):
            function = tool.get("function", tool)
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str) or not name:
                raise RequestError(f"tools[{i}] needs a 'function' with a 'name'")
            parameters = function.get("parameters")
            if not isinstance(parameters, Mapping | None):
                raise RequestError(f"tools[{i}] ({name}): 'parameters' must be a JSON schema, an object")
            self._parameters[name] = parameters or {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def knows(self, name: str) -> bool:
        """Whether a call to `name` is a call. Without any tools every plausible name is."""
        if self._parameters:
            return name in self._parameters
        return _PLAUSIBLE_NAME.fullmatch(name) is not None

    def parameters(self, name: str) -> Mapping[str, Any]:
        """The JSON schema of a function's arguments; {} for an unknown one."""
        return self._parameters.get(name, {})

    def parameter(self, name: str, key: str) -> Schema | None:
        """The JSON schema of one argument, None if the function declares no such argument."""
        properties = self.parameters(name).get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping | bool) else None
