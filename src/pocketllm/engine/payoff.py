"""`Payoff`: whether drafts pay, by what passes took and gave lately. They decide speed only, so a clock may choose."""

from __future__ import annotations

from dataclasses import dataclass, field

_WEIGHT = 0.2  # of the newest number in an average
_TRIES = 6  # verify passes after which there is something to judge by
_COMPARED = 2  # decode passes that are timed for comparison
_LASTS = 256  # verify passes after which decode is timed again: contexts grow
_LONGEST_REST = 512  # decode passes


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _WEIGHT * (new - old)


@dataclass
class _Size:
    """Of batches of one size. Seconds and tokens are averages, 0 at first."""

    decode: float = 0.0
    verify: float = 0.0
    tokens: float = 0.0  # that a slot got of a verify pass
    tries: int = 0  # verify passes since the last rest
    rest: int = 0  # decode passes to come
    pause: int = 0  # the last rest's


@dataclass
class Payoff:
    """Verify passes go on while a slot's tokens come faster by them than by decode passes. Where they do not, they rest,
    each time for longer, and are tried again. The first pass of each kind and size is not counted: it may compile."""

    _sizes: dict[int, _Size] = field(default_factory=dict)
    _seen: set[tuple[int, bool]] = field(default_factory=set)

    def drafts_pay(self, size: int) -> bool:
        """Whether the next pass of such a size should be a verify pass; asked once a pass."""
        state = self._sizes.setdefault(size, _Size())
        if state.rest:
            state.rest -= 1
            return False
        return True

    def note(self, size: int, verified: bool, seconds: float, tokens: float) -> None:
        """Such a pass took so long, the making of drafts included, and gave so many tokens a slot."""
        state = self._sizes.setdefault(size, _Size())
        if (size, verified) not in self._seen:
            self._seen.add((size, verified))
            return
        if not verified:
            state.decode = _average(state.decode, seconds)
            return
        state.verify, state.tokens = _average(state.verify, seconds), _average(state.tokens, tokens)
        state.tries += 1
        if state.tries < _TRIES:
            return
        if state.decode == 0.0 or state.tries >= _LASTS:
            state.tries, state.rest = 0, _COMPARED + (state.decode == 0.0)
        elif state.tokens * state.decode <= state.verify:
            state.pause = min(max(2 * state.pause, 16), _LONGEST_REST)
            state.tries, state.rest = 0, state.pause
        else:
            state.pause = 0
