# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
"""Splits of a slot's tokens: where they lie, and which program takes which. For kernels in Triton and in Gluon.

SPLITS (`AttendConfig.splits`) is (tokens of a short split, tokens in short splits, tokens of a long one): a slot's first
tokens are cut finer than the rest, as a short context would else keep few multiprocessors busy.

A piece of work is a split of one sequence, a KV head and some of its query rows. Programs take the long pieces in turn.
Those that got one fewer than others then take short pieces until they have caught up, and what is left goes round.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def short_splits(tokens, SPLITS: tl.constexpr):
    """How many of the splits of so many tokens are short."""
    return tl.minimum((tokens + SPLITS[0] - 1) // SPLITS[0], SPLITS[1] // SPLITS[0])


@triton.jit
def long_splits(tokens, SPLITS: tl.constexpr):
    return tl.maximum(tokens - SPLITS[1] + SPLITS[2] - 1, 0) // SPLITS[2]


@triton.jit
def num_splits(tokens, SPLITS: tl.constexpr):
    return short_splits(tokens, SPLITS) + long_splits(tokens, SPLITS)


@triton.jit
def split_start(split, SPLITS: tl.constexpr):
    """Its first token."""
    SHORT: tl.constexpr = SPLITS[1] // SPLITS[0]
    return tl.minimum(split, SHORT) * SPLITS[0] + tl.maximum(split - SHORT, 0) * SPLITS[2]


@triton.jit
def share_of(program, programs, longs, shorts, SPLITS: tl.constexpr):
    """Of so many long and short pieces, the program's turns: (with a long one, to catch up, the rest), and what `piece_of`
    needs beyond."""
    ahead = longs % programs  # programs with one long piece more
    behind = programs - ahead
    catching_up = tl.minimum(shorts, behind * (SPLITS[2] // SPLITS[0]))
    own_longs = (longs - program + programs - 1) // programs
    own_catching_up = tl.where(program >= ahead, (catching_up - program + ahead + behind - 1) // behind, 0)
    own_rest = tl.maximum(shorts - catching_up - program + programs - 1, 0) // programs
    return own_longs, own_catching_up, own_rest, ahead, catching_up


@triton.jit
def piece_of(turn, share, program, programs):
    """The program's piece in a turn: whether it is a long one, and its number among those."""
    own_longs, own_catching_up, _, ahead, catching_up = share
    later = turn - own_longs
    to_catch_up = program - ahead + later * (programs - ahead)
    rest = catching_up + program + (later - own_catching_up) * programs
    short = tl.where(later < own_catching_up, to_catch_up, rest)
    return turn < own_longs, tl.where(turn < own_longs, program + turn * programs, short)
