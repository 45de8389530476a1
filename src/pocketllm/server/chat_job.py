"""`ChatJob`: what every chat API asks for, in one form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pocketllm.errors import RequestError
from pocketllm.options import SamplingParams
from pocketllm.text.grammar import AnswerForm

ToolMode = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True)
class ToolChoice:
    """name: of the tool, for `named`."""

    mode: ToolMode = "auto"
    name: str | None = None

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")


@dataclass(frozen=True)
class Thinking:
    """enabled None: as the template does by itself; effort: a variable of the template; budget: most reasoning tokens."""

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None

    @classmethod
    def of(cls, enabled: bool | None, effort: str | None, budget: int | None) -> Thinking:
        """From the fields of a request: an effort switches thinking on or, if none, off."""
        by_effort = None if effort is None else effort != "none"
        if None not in (enabled, by_effort) and enabled != by_effort:
            raise RequestError(f"enable_thinking = {enabled} contradicts reasoning_effort = {effort!r}")
        enabled = by_effort if enabled is None else enabled
        if enabled is False and budget is not None:
            raise RequestError("a budget for thinking was given, but thinking is off")
        return cls(enabled, effort if effort != "none" else None, budget)

    def variables(self) -> dict[str, Any]:
        """For the chat template."""
        values = {"enable_thinking": self.enabled, "reasoning_effort": self.effort}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class ChatJob:
    """messages and tools in OpenAI's form; variables: more of them for the template, which win over those of thinking."""

    messages: tuple[Mapping[str, Any], ...]
    params: SamplingParams
    n: int = 1
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_calls: bool = True
    form: AnswerForm | None = None
    thinking: Thinking = Thinking()
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        names = [tool["function"]["name"] for tool in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise RequestError(f"two tools are called {name!r}: names must differ")
        if self.tool_choice.forced and not self.tools:
            raise RequestError(f"tool_choice {self.tool_choice.mode} needs tools, and none were given")
        if self.tool_choice.name is not None and self.tool_choice.name not in names:
            raise RequestError(f"tool_choice names {self.tool_choice.name!r}; the tools are: {', '.join(names)}")
        if self.form is not None and self.tool_choice.forced:
            raise RequestError(f"tool_choice {self.tool_choice.mode} and a format of the answer exclude each other")
        if self.continue_final_message and self.messages[-1].get("role") != "assistant":
            raise RequestError("continue_final_message needs a last message of role assistant")
        for name in ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"):
            if name in self.variables:
                raise RequestError(
                    f"chat_template_kwargs: {name!r} is set by the server, from the request's own fields"
                )

    @property
    def visible_tools(self) -> tuple[Mapping[str, Any], ...]:
        """Those the model is told of."""
        return () if self.tool_choice.mode == "none" else self.tools

    @property
    def template_variables(self) -> dict[str, Any]:
        return {**self.thinking.variables(), **self.variables}
