"""Bodies of Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pocketllm.server.schemas import no_effect
from pocketllm.server.schemas.base import Body, Json, Part


class Block(Part):
    cache_control: Json | None = None  # reuse needs no marks


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = Field(None, max_length=0)


class ThinkingBlock(Part):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Part):
    """Nothing that this server made; it can't be read and is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json
    caller: Json | None = None


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


AnyBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class InputMessage(Part):
    role: Literal["user", "assistant"]
    content: str | list[AnyBlock]


class ClientTool(Block):
    name: str = Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    input_schema: Json
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # input is always streamed as it comes


class ToolChoice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Part):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0)
    display: Literal["summarized"] | None = None


class OutputFormat(Part):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Part):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountRequest(Body):
    no_effect = no_effect.MESSAGE

    model: str
    messages: list[InputMessage] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessageRequest(CountRequest):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
