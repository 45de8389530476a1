"""Bodies of /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from pocketllm.server.schemas.base import Part
from pocketllm.server.schemas.openai import ChatMessage, Tool


class TokenizeRequest(Part):
    """prompt, or messages (with the fields below them)."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(Part):
    model: str | None = None
    tokens: list[int]
