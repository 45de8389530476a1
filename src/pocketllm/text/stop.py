"""`StopChecker`: ends a stream of text at the first stop string, showing nothing of it."""

from __future__ import annotations

from collections.abc import Iterable


class StopChecker:
    """Where a text ends does not depend on how it is cut into pieces: the stop string that is *complete* first ends it,
    as if the text came one character at a time. Of several complete at the same character the longest wins, so that no
    part of it is shown.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        if not all(self._stops):
            raise ValueError("a stop string must not be empty")
        self._held = ""  # the longest end of the text that could begin a stop string
        self._hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece. Returns the text that is safe to show now, and the stop string that was hit (or None).

        Text after a hit is dropped: further calls return ("", the same hit).
        """
        if self._hit is not None:
            return "", self._hit
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self._hit = min(matches)
            self._held = ""
            return text[:start], self._hit
        cut = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[cut:]
        return text[:cut], None

    def finish(self) -> str:
        """No more text comes: what was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
