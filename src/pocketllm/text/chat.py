"""`ChatTemplate`: a conversation as the text its model was trained on.

Templates come from model files, so they run in Jinja's sandbox. What they may use (whitespace rules, `raise_exception`,
`strftime_now`, `tojson`, loop controls, generation blocks) is what transformers' `apply_chat_template` gives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pocketllm.errors import ModelError, RequestError
from pocketllm.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

# A template is a program: one that joins strings fails, for example, on a message without content.
_PROGRAM_ERRORS = (
    jinja2.UndefinedError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own protocol)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template and its `source`. `special_tokens` ("eos_token" -> text, ...) are variables of every rendering."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not valid Jinja, line {error.lineno}: {error.message}") from error
        self.source = source
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The template of a tokenizer's files; ModelError if there is none."""
        if tokenizer.chat_template is None:
            raise ModelError("this model has no chat template: use plain completion, or give a chat template")
        return cls(tokenizer.chat_template, tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as text, ready for `Tokenizer.encode(..., add_special=False)`.

        messages               OpenAI's form: role, content (text, or a list of text parts), tool_calls ...
        tools                  JSON schemas of the functions the model may call
        add_generation_prompt  end with the opening of the assistant's turn
        variables              further variables of the template, e.g. enable_thinking

        RequestError: a message has the wrong form, or the template refuses the conversation.
        """
        if not messages:
            raise RequestError("messages is empty: a conversation needs at least one message")
        variables = {
            **self._special_tokens,
            "documents": None,
            **variables,
            "messages": [_checked(message, i) for i, message in enumerate(messages)],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except _PROGRAM_ERRORS as error:
            raise RequestError(f"the chat template fails on this conversation: {error}") from error
        except jinja2.TemplateError as error:  # raise_exception, or a breach of the sandbox
            raise RequestError(f"the chat template refuses this conversation: {error}") from error


def _checked(message: Message, index: int) -> dict[str, Any]:
    """The message as templates expect it: content as one text, arguments of tool calls as mappings."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with 'role' and 'content', not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where} needs a 'role' such as 'system', 'user', 'assistant' or 'tool'")
    checked = dict(message)
    calls = message.get("tool_calls")
    if message.get("content") is not None:
        checked["content"] = _text(message["content"], where)
    elif not calls:
        raise RequestError(f"{where} (role {role!r}) needs 'content': a text, or a list of text parts")
    if calls:
        checked["tool_calls"] = [_checked_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return checked


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{where}.content must be a text or a list of text parts, not {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise RequestError(
                f"{where}.content[{i}] is of type {kind!r}: only {{'type': 'text', 'text': ...}} is read"
            )
        texts.append(text)
    return "".join(texts)


def _checked_call(call: Any, where: str) -> dict[str, Any]:
    """Clients send a call's arguments as a JSON text; templates iterate over them or write them as JSON themselves."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} needs a 'function' with a 'name'")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise RequestError(f"{where}: 'arguments' is not valid JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}: 'arguments' must be a JSON object")
    checked = {**function, "arguments": dict(arguments)}
    return {**call, "function": checked} if "function" in call else checked
