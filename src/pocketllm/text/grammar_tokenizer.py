"""Our tokenizer as llguidance wants it: the bytes of every token, and a way to cut forced text into tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pocketllm.errors import RequestError
from pocketllm.text.markup import THINK_BEGIN, THINK_END
from pocketllm.text.tool_calls import CALL_BEGIN, CALL_END

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from pocketllm.text.tokenizer import Tokenizer


class _Adapter:
    """The attributes and the call that `llguidance.TokenizerWrapper` looks for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Tags of reasoning and calls are text that a grammar may ask for, whatever the tokenizer's file calls them.
        tags = {tokenizer.token_to_id(tag) for tag in (THINK_BEGIN, THINK_END, CALL_BEGIN, CALL_END)}
        control = sorted(tokenizer.special_ids - tags)
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens: Sequence[bytes] = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = control
        self._tokenizer = tokenizer
        texts = [re.escape(self.tokens[i].decode()) for i in control]
        self._control = re.compile("(" + "|".join(texts) + ")") if texts else None

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids of a text that a grammar forces. `<|im_end|>` in a JSON string is those characters, not the token."""
        text = text.decode() if isinstance(text, bytes) else text
        pieces = (
            self._control.split(text) if self._control is not None else [text]
        )  # odd ones are control tokens' texts
        parts = [part for i, piece in enumerate(pieces) for part in ((piece[:1], piece[1:]) if i % 2 else (piece,))]
        return [i for part in parts if part for i in self._tokenizer.encode(part, add_special=False)]


def grammar_tokenizer(tokenizer: Tokenizer) -> LLTokenizer:
    """Takes a second for a large vocabulary: use `Tokenizer.for_grammars`, which keeps it."""
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise RequestError("grammars need the package llguidance: pip install 'pocketllm[server]'") from error
    if not tokenizer.eos_ids:
        raise RequestError("this model's tokenizer names no end-of-sequence token, so no grammar could end an answer")
    return LLTokenizer(
        TokenizerWrapper(_Adapter(tokenizer)), n_vocab=tokenizer.vocab_size, eos_token=list(tokenizer.eos_ids)
    )
