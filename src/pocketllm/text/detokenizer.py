"""`IncrementalDetokenizer`: text of a stream of tokens, as early as it is certain.

A token may end inside a character. Python's incremental decoder keeps such bytes (at most 3) until they are complete,
or until a byte comes that can't follow; every piece it gives is final.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from pocketllm.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The joined results of all `push` calls and of `finish` equal `tokenizer.decode` of all ids together (`keep` aside)."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, keep: Iterable[str] = ()) -> None:
        """keep: control tokens, by their text, that are shown in any case."""
        self._tokenizer = tokenizer
        skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._skipped = skipped - {tokenizer.token_to_id(token) for token in keep}
        self._decoder = _Utf8Decoder(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens (any number); the new text that no later token can change."""
        data = b"".join(self._tokenizer.token_bytes(i) for i in token_ids if i not in self._skipped)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """No more tokens come: an unfinished character, if any, as U+FFFD."""
        return self._decoder.decode(b"", final=True)
