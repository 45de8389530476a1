"""When drafts are made: as long as they pay."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from pocketllm.engine.payoff import Payoff


def verified(payoff: Payoff, steps: int, decode: float, verify: float, tokens: float, size: int = 1) -> list[bool]:
    """Which of so many passes were verify passes, if these are their seconds and a verify pass's tokens a slot."""
    draw, kinds = random.Random(0), []
    for _ in range(steps):
        kinds.append(payoff.drafts_pay(size))
        noise = draw.uniform(0.95, 1.05)
        payoff.note(size, kinds[-1], (verify if kinds[-1] else decode) * noise, tokens if kinds[-1] else 1.0)
    return kinds


def test_good_drafts_go_on() -> None:
    kinds = verified(Payoff(), 2000, decode=7.0, verify=10.0, tokens=2.5)
    assert sum(kinds) > 0.98 * len(kinds)
    assert not all(kinds)  # what decode takes is looked at now and then


def test_bad_drafts_rest_for_longer_and_longer() -> None:
    kinds = verified(Payoff(), 4000, decode=7.0, verify=10.0, tokens=1.1)
    assert sum(kinds) < 0.04 * len(kinds)
    assert sum(kinds[2000:]) > 6  # and are tried again


def test_drafts_that_become_good_are_made_again() -> None:
    payoff = Payoff()
    verified(payoff, 1000, decode=7.0, verify=10.0, tokens=1.0)
    kinds = verified(payoff, 3000, decode=7.0, verify=10.0, tokens=4.0)
    assert sum(kinds[1000:]) > 0.95 * 2000


def test_sizes_are_told_apart() -> None:
    """Drafts for one slot pay where those for eight do not."""
    payoff = Payoff()
    verified(payoff, 500, decode=8.0, verify=20.0, tokens=2.0, size=8)
    assert sum(verified(payoff, 500, decode=7.0, verify=8.0, tokens=2.0)) > 480


def test_a_first_pass_that_compiles_is_not_counted() -> None:
    payoff = Payoff()
    payoff.note(1, True, 60.0, 4.0)
    payoff.note(1, False, 60.0, 1.0)
    assert sum(verified(payoff, 300, decode=7.0, verify=8.0, tokens=2.0)) > 280


@given(st.floats(0.001, 1.0), st.floats(0.9, 8.0), st.floats(1.0, 8.0))
def test_little_is_lost_either_way(decode: float, ratio: float, tokens: float) -> None:
    """Against the better of both, over 5,000 passes."""
    verify = ratio * decode
    kinds = verified(Payoff(), 5000, decode, verify, tokens)
    seconds = sum(verify if kind else decode for kind in kinds)
    made = sum(tokens if kind else 1.0 for kind in kinds)
    best = max(tokens / verify, 1 / decode)
    assert made / seconds > 0.75 * best
