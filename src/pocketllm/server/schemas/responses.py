"""Body of /v1/responses: OpenAI's newer API, here without a store (a conversation is sent whole)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pocketllm.server.schemas import no_effect
from pocketllm.server.schemas.base import Body, Json, Part
from pocketllm.server.schemas.openai import Effort


class FunctionTool(Part):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class NamedFunction(Part):
    type: Literal["function"]
    name: str


class Reasoning(Part):
    effort: Effort | None = None
    summary: Literal["auto", "none"] | None = None  # reasoning is shown whole, there is nothing to sum up
    generate_summary: None = None


class TextFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Json | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Part):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseRequest(Body):
    no_effect = no_effect.RESPONSE

    input: str | list[dict[str, Any]] = Field(description="a text, or messages, function calls and their outputs")
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Literal[0] | None = None
    stream: bool | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = Field(None, description="sent back as it came")


class InputMessage(Part):
    """id and status come with items of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Json]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCall(Part):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionCallOutput(Part):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Json]
    id: str | None = None
    status: str | None = None


class ReasoningItem(Part):
    type: Literal["reasoning"]
    summary: list[Json] = Field(default_factory=list)
    content: list[Json] | None = None
    id: str | None = None
    status: str | None = None
    encrypted_content: str | None = None


INPUT_ITEMS: dict[str, type[Part]] = {
    "message": InputMessage,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningItem,
}
