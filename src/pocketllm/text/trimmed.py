"""Two helpers for text that comes in pieces: whitespace that may have to go, and tags that may be beginning."""

from __future__ import annotations


class TrimmedText:
    """Text without the whitespace that touches a cut, where text stands on one side of the cut only.

    `cut` marks where something was taken out of the text (a call, the reasoning before it). Whitespace is held back until
    it is known whether text follows; `take` gives what is certain.
    """

    def __init__(self) -> None:
        self.empty = True
        self._space = ""
        self._cut = False  # somewhere in the held whitespace
        self._certain: list[str] = []

    def push(self, text: str) -> None:
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._certain.append(body.lstrip() if self._cut and self.empty else body)
            self._cut = self.empty = False

    def cut(self) -> None:
        self._cut = True

    def finish(self) -> None:
        """No more text comes."""
        if not self._cut:
            self._certain.append(self._space)
        self._space = ""

    def take(self) -> str:
        text = "".join(self._certain)
        self._certain.clear()
        return text


def tag_begun(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `tag`."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if tag.startswith(text[-n:])), 0)
