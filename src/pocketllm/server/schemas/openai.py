"""Bodies of /v1/chat/completions and /v1/completions, with vLLM's extra fields under vLLM's names."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pocketllm.server.schemas import no_effect
from pocketllm.server.schemas.base import Json, Part, SamplingFields

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class FunctionSchema(Part):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Part):
    type: Literal["function"]
    function: FunctionSchema


class FunctionName(Part):
    name: str


class NamedTool(Part):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(Part):
    name: str
    arguments: str


class CalledTool(Part):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # clients that collect a stream send it back


class ChatMessage(Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Json] | None = Field(None, description="a text, or a list of parts of type text")
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = Field(None, description="what the assistant thought; reasoning_content is the same")
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Json] | None = Field(None, max_length=0)


class JsonSchema(Part):
    name: str
    description: str | None = None
    schema_: Json = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Part):
    """Exactly one of them."""

    json_: Json | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, description="in Lark's syntax")


class StreamOptions(Part):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationFields(SamplingFields):
    """What chat and completions share beside sampling."""

    model: str | None = Field(None, description="a name the server serves; none: the model it has")
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True


class ChatRequest(GenerationFields):
    no_effect = no_effect.CHAT

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    max_tokens: int | None = Field(None, description="OpenAI's older name of max_completion_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = Field(None, description="none: no thinking; others: a variable of the template")
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = Field(None, ge=0, description="most tokens of reasoning")
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(GenerationFields):
    no_effect = no_effect.COMPLETION

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    add_special_tokens: bool | None = None
