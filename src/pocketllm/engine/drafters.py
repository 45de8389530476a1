"""Drafters: guesses of a request's next tokens that cost next to nothing, for a verify pass to check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

TokensOf = Callable[[int, int], Sequence[int]]  # (start, end) -> a request's tokens start .. end - 1


class Drafter(Protocol):
    """One request's own. Its tokens only grow from one call to the next."""

    def propose(self, tokens: TokensOf, length: int, most: int) -> list[int]:
        """At most `most` tokens that may follow the request's `length` ones; none if there is nothing to go by."""


class NgramDrafter:
    """What followed when the last N tokens stood there before, in prompt or answer (prompt lookup, A. Saxena 2023). For
    answers that repeat: code that is edited, text that is quoted, lists."""

    N = 3  # fewer find more, of which less is right
    _BITS = 32  # of a token id

    def __init__(self) -> None:
        self._next: dict[int, int] = {}  # N tokens, as one number -> where the token after them stood last
        self._known = self.N - 1  # tokens up to here are in it, but for the last N: nothing followed them yet

    def propose(self, tokens: TokensOf, length: int, most: int) -> list[int]:
        if length <= self.N or most < 1:
            return []
        first = self._known + 1 - self.N
        recent = tokens(first, length)
        key, mask = 0, (1 << self.N * self._BITS) - 1
        for at, token in enumerate(recent, first):
            if at >= first + self.N:  # key: the N tokens before this one
                self._next[key] = at
            key = (key << self._BITS | token) & mask
        self._known = length - 1
        found = self._next.get(key)
        return [] if found is None else list(tokens(found, min(found + most, length)))
