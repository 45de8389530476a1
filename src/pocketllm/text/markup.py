"""What a model's chat template says about its answers: whether it thinks in `<think>` tags, and how it writes calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pocketllm.errors import RequestError
from pocketllm.text.chat import ChatTemplate
from pocketllm.text.hermes import HermesSyntax
from pocketllm.text.qwen_xml import QwenXmlSyntax
from pocketllm.text.tool_calls import CALL_BEGIN, CALL_END, ToolSyntax

THINK_BEGIN, THINK_END = "<think>", "</think>"
_TURN = "<|im_start|>"


@dataclass(frozen=True)
class Markup:
    """The defaults are a model that writes plain text."""

    thinks: bool = False
    tools: ToolSyntax | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that must reach the parser even where a tokenizer counts them among its control tokens."""
        return (THINK_BEGIN, THINK_END) * self.thinks + (CALL_BEGIN, CALL_END) * (self.tools is not None)


def markup_of(template: ChatTemplate | None) -> Markup:
    """Read from the text of the template: it shows the model its own format, in the instructions or in past turns."""
    source = template.source if template is not None else ""
    tools: ToolSyntax | None = None
    if CALL_BEGIN in source:
        if "<function=" in source:
            tools = QwenXmlSyntax()
        elif '"arguments' in source or '\\"arguments' in source:
            tools = HermesSyntax()
    return Markup(THINK_END in source, tools)


def opens_thinking(prompt: str) -> bool:
    """Whether the answer continues a `<think>` that the prompt has opened (Qwen3.5 and later; continued messages)."""
    turn = prompt.rfind(_TURN)
    if turn < 0:
        return prompt.rstrip().endswith(THINK_BEGIN)
    return prompt.rfind(THINK_BEGIN, turn) > prompt.rfind(THINK_END, turn)


def generation_prompt(template: ChatTemplate, *, thinking: bool) -> str:
    """How the template opens an answer; "" if it refuses a conversation of one word."""
    try:
        messages: Sequence[dict[str, str]] = [{"role": "user", "content": "Hello"}]
        return template.render(messages, enable_thinking=thinking)
    except RequestError:
        return ""
