"""`ThinkingBudget`: after so many tokens of reasoning its end is written for the model."""

from __future__ import annotations

import codecs
from enum import Enum

import torch
from torch import Tensor

from pocketllm.engine.constraint import TokenConstraint
from pocketllm.text.tokenizer import Tokenizer


class _Stage(Enum):
    BEFORE = "the model may open its reasoning"
    REASONING = "reasoning"
    AFTER = "the answer"


class ThinkingBudget:
    """A `TokenConstraint` that lets reasoning run for `max_tokens` tokens, then forces line break, `end` and empty line.

    A character that takes several tokens may end first. Everything else is free, or `then`'s to decide: it is told every
    token, those of the reasoning too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_tokens: int,
        *,
        begin: str = "<think>",
        end: str = "</think>",
        opened: bool,
        then: TokenConstraint | None = None,
    ) -> None:
        """opened: the prompt ends inside the reasoning; False: it begins if the answer begins with `begin`."""
        self._tokenizer = tokenizer
        self._left = max_tokens
        self._begin, self._end = begin.encode(), end.encode()
        self._stage = _Stage.REASONING if opened else _Stage.BEFORE
        self._then = then
        self._text = b""  # as much of its end as tags need
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # holds an unfinished character
        self._ending = tokenizer.encode(f"\n{end}\n\n", add_special=False)
        self._forced: list[int] = []  # tokens that must come next

    def allowed(self) -> Tensor | None:
        if self._stage is _Stage.REASONING and self._left <= 0 and not self._forced and not self._decoder.getstate()[0]:
            self._forced = list(self._ending)
        if self._forced:
            return _only(self._forced[0], self._tokenizer.vocab_size)
        return self._then.allowed() if self._then is not None else None

    def accept(self, token_id: int) -> None:
        if self._then is not None:
            self._then.accept(token_id)
        if self._forced:
            self._forced.pop(0)
        if self._stage is _Stage.AFTER:
            return
        data = self._tokenizer.token_bytes(token_id)
        self._decoder.decode(data)
        self._text += data
        if self._stage is _Stage.REASONING:
            self._left -= 1
            if self._end in self._text:
                self._stage = _Stage.AFTER
            self._text = self._text[-len(self._end) :]
        else:
            self._look_for_beginning()

    @property
    def finished(self) -> bool:
        return self._then is not None and self._then.finished

    def _look_for_beginning(self) -> None:
        body = self._text.lstrip()
        if body.startswith(self._begin):
            self._text = body[len(self._begin) :]
            self._stage = _Stage.AFTER if self._end in self._text else _Stage.REASONING
        elif not self._begin.startswith(body):
            self._stage = _Stage.AFTER


def _only(token_id: int, vocab_size: int) -> Tensor:
    """The mask of one token, as `TokenConstraint.allowed` gives it."""
    words = torch.zeros(-(-vocab_size // 32), dtype=torch.int32)
    bit = token_id % 32
    words[token_id // 32] = 1 << bit if bit < 31 else -(1 << 31)
    return words
