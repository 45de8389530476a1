"""Parts of OpenAI's answers that chat and completions share."""

from __future__ import annotations

from typing import Any

from pocketllm.engine.sampled import TokenLogprobs
from pocketllm.server.generation import Generation, Usage
from pocketllm.text.detokenizer import IncrementalDetokenizer
from pocketllm.text.tokenizer import Tokenizer

_LOWEST = -9999.0  # what OpenAI writes for a probability of zero; JSON has no infinity


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def head(generation: Generation, object: str, model: str) -> dict[str, Any]:
    """The fields that an answer and each chunk of a stream begin with."""
    return {"id": generation.id, "object": object, "created": generation.created, "model": model}


def logprob(value: float) -> float:
    return max(value, _LOWEST)


def chat_logprobs(
    tokenizer: Tokenizer, tokens: tuple[int, ...] | list[int], logprobs: tuple[TokenLogprobs, ...] | list[TokenLogprobs]
) -> dict[str, Any] | None:
    """An entry for each generated token, those of reasoning and of the end included; None if none were asked for."""
    if not logprobs:
        return None

    def entry(token: int, value: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob(value), "bytes": list(data)}

    return {
        "content": [
            {**entry(token, step.chosen), "top_logprobs": [entry(*pair) for pair in step.top]}
            for token, step in zip(tokens, logprobs, strict=True)
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """The older form: parallel lists, with each token's offset in the text. Pieces of a character are written as bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._text = tokenizer, IncrementalDetokenizer(tokenizer)
        self._offset = 0

    def push(
        self, tokens: tuple[int, ...] | list[int], logprobs: tuple[TokenLogprobs, ...] | list[TokenLogprobs]
    ) -> dict[str, Any] | None:
        """Of the next tokens; None if none were asked for."""
        if not logprobs:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._text.push((token,)))
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [logprob(step.chosen) for step in logprobs],
            "top_logprobs": [{self._name(token): logprob(value) for token, value in step.top} for step in logprobs],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
