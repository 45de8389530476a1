"""Grammars: the answer must be JSON, follow a schema, a regular expression or rules, or be calls of tools.

An answer's form is an object that writes itself as a grammar of llguidance; `build_constraint` makes it a
`TokenConstraint` for one request. In a model that thinks, the form is that of the text after `</think>`: text before it is
free, so a grammar never cuts reasoning short (`text/thinking.py` limits it).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from pocketllm.engine.constraint import TokenConstraint
from pocketllm.errors import RequestError
from pocketllm.text.lark import GAP, json_rule, literal, regex
from pocketllm.text.markup import THINK_BEGIN
from pocketllm.text.thinking import ThinkingBudget
from pocketllm.text.tokenizer import Tokenizer
from pocketllm.text.tool_calls import ToolSyntax
from pocketllm.text.tools import ToolTable

if TYPE_CHECKING:
    from llguidance import LLMatcher


_NO_TOOLS = "a call is required, but the request has no tools"


class AnswerForm(Protocol):
    def alternatives(self) -> tuple[str, ...]:
        """Grammars in llguidance's Lark, each with a rule `start`; the answer follows one of them."""


@dataclass(frozen=True)
class JsonSchema:
    """JSON that validates against the schema. A keyword that grammars can't express is refused, never left out."""

    schema: Mapping[str, Any]

    def alternatives(self) -> tuple[str, ...]:
        if not isinstance(self.schema, Mapping):
            raise RequestError(f"a JSON schema must be an object, not {type(self.schema).__name__}")
        return (json_rule("start", self.schema),)


@dataclass(frozen=True)
class JsonObject:
    """Any JSON object."""

    def alternatives(self) -> tuple[str, ...]:
        return (json_rule("start", {"type": "object"}),)


@dataclass(frozen=True)
class Regex:
    """Text that the regular expression matches as a whole (Rust's syntax, without look-around)."""

    pattern: str

    def alternatives(self) -> tuple[str, ...]:
        return (f"start: /{regex(self.pattern)}/\n",)


@dataclass(frozen=True)
class LarkGrammar:
    """Rules in Lark's syntax as llguidance reads it; the first to apply is `start`."""

    rules: str

    def alternatives(self) -> tuple[str, ...]:
        return (self.rules,)


@dataclass(frozen=True)
class ToolCalls:
    """At least one call, and nothing else, in the model's own syntax.

    syntax    `markup_of(template).tools`; None: RequestError
    tools     in OpenAI's form
    name      only this function; None: any of them
    parallel  several calls may follow each other

    Arguments follow their schemas: only declared ones, unless a schema speaks of others. Keywords that grammars can't
    express are left to the tool.
    """

    syntax: ToolSyntax | None
    tools: Sequence[Mapping[str, Any]]
    name: str | None = None
    parallel: bool = True

    def alternatives(self) -> tuple[str, ...]:
        if self.syntax is None:
            raise RequestError("this model's chat template shows no syntax for tool calls, so none can be required")
        table = ToolTable(self.tools)
        names = [name for name in table if self.name is None or name == self.name]
        if not names:
            raise RequestError(f"a call is required, and no tool is called {self.name!r}" if self.name else _NO_TOOLS)
        start = 'start: call ("\\n" call)*' if self.parallel else "start: call"
        choice = "call: " + " | ".join(f"call_{i}" for i in range(len(names)))
        calls = (self.syntax.rules(f"call_{i}", name, _closed(table.parameters(name))) for i, name in enumerate(names))
        return ("\n".join((start, choice, *calls)),)


@dataclass(frozen=True)
class OneOf:
    """An answer of one of several forms, such as calls of tools or else JSON."""

    forms: Sequence[AnswerForm]

    def alternatives(self) -> tuple[str, ...]:
        return tuple(grammar for form in self.forms for grammar in form.alternatives())


def build_constraint(
    tokenizer: Tokenizer,
    form: AnswerForm | None,
    *,
    starts_after: str | None = None,
    opened: bool = True,
    thinking_budget: int | None = None,
) -> TokenConstraint:
    """The constraint of one request.

    form             of the answer; None: only the reasoning is limited
    starts_after     text that ends the reasoning (`</think>`); None: the answer is the whole text
    opened           the prompt has opened `<think>` (`markup.opens_thinking`); False: the model may open it, or not think
    thinking_budget  most tokens of reasoning, after which its end is written for the model

    RequestError: the form is invalid or not expressible, with the reason. The first call for a tokenizer takes up to a
    second, others milliseconds: not for an event loop.
    """
    if form is None and thinking_budget is None:
        raise RequestError("nothing to constrain: give a form of the answer or a budget for reasoning")
    if thinking_budget is not None and starts_after is None:
        raise RequestError("a budget for reasoning needs a model that thinks")
    answer = None if form is None else _compiled(tokenizer, _grammar(form.alternatives(), starts_after, opened))
    if thinking_budget is None or starts_after is None:
        assert answer is not None
        return answer
    return ThinkingBudget(tokenizer, thinking_budget, begin=THINK_BEGIN, end=starts_after, opened=opened, then=answer)


def _closed(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema of arguments that says nothing of undeclared ones, saying that there are none."""
    elsewhere = {
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "$ref",
    }
    return parameters if elsewhere & parameters.keys() else {**parameters, "additionalProperties": False}


def _grammar(alternatives: Sequence[str], starts_after: str | None, opened: bool) -> str:
    """Reasoning, if any, then one of the alternatives, each a grammar of its own: llguidance's JSON form."""
    answer = " | ".join(f"@answer_{i}" for i in range(len(alternatives)))
    rules = f"start: answer\nanswer: {answer}\n"
    if starts_after is not None:
        reasoning = "reasoning gap" if opened else f"({literal(THINK_BEGIN)} reasoning gap)?"
        rules = f"start: {reasoning} answer\nanswer: {answer}\n"
        rules += f"reasoning[lazy]: /(?s:.*)/ {literal(starts_after)}\ngap: {GAP}\n"
    named = [{"name": f"answer_{i}", "lark_grammar": text} for i, text in enumerate(alternatives)]
    return json.dumps({"grammars": [{"lark_grammar": rules}, *named]})


def _compiled(tokenizer: Tokenizer, grammar: str) -> GrammarConstraint:
    vocabulary = tokenizer.for_grammars
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first is much work for some grammars: better here than between two steps
    if matcher.is_error():
        raise RequestError(f"the form of the answer can't be used: {_reason(matcher)}")
    return GrammarConstraint(matcher)


def _reason(matcher: LLMatcher) -> str:
    """llguidance's message without what it quotes of the grammar, which is ours and would say nothing to a user."""
    message = matcher.get_error().partition("\n   1 |")[0].partition("<non-verbose/>")[0].strip()
    return re.sub(r"^at \d+\(\d+\): (failed to compile )?(?=JSON schema|invalid regex)", "", message)


class GrammarConstraint:
    """A `TokenConstraint` by a grammar that has been read as far as the answer has come."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> Tensor:
        mask = bytearray(self._matcher.compute_bitmask())
        self._check()
        return torch.frombuffer(mask, dtype=torch.int32)

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"the grammar of the answer can't go on: {_reason(self._matcher)}")
