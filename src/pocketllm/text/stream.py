"""`TextStream`: token ids of one answer in, text to show out, up to a stop string."""

from __future__ import annotations

from collections.abc import Iterable

from pocketllm.text.detokenizer import IncrementalDetokenizer
from pocketllm.text.stop import StopChecker
from pocketllm.text.tokenizer import Tokenizer


class TextStream:
    """Joins the incremental detokenizer (whole characters only) with the stop checker (holds back what may be a stop).

    The texts of all `push` calls and of `finish` together are the answer; after a stop string nothing more comes.
    Control tokens are left out, except those whose text is in `keep` (`OutputParser.markup.tags`, for its parser).
    """

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str] = (), *, keep: Iterable[str] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, keep=keep)
        self._checker = StopChecker(stops)
        self.stopped: str | None = None  # the stop string that was met

    def push(self, token_ids: Iterable[int]) -> str:
        if self.stopped is not None:
            return ""
        text, self.stopped = self._checker.push(self._detokenizer.push(token_ids))
        return text

    def finish(self) -> str:
        """What was held back and is now known to be no stop string."""
        if self.stopped is not None:
            return ""
        text, self.stopped = self._checker.push(self._detokenizer.finish())
        return text if self.stopped is not None else text + self._checker.finish()
