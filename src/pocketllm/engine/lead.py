"""`LeadRunner`: rank 0's runner. What it is called to do, it first tells the other ranks, which obey (`obey`).

Rank 0 decides everything: which tokens run in which slots, which pages they use, what is sampled and accepted. The others
hold shards of weights and caches, and get each call of a `ModelRunner` as one line of JSON: its name and arguments, whole
numbers all of them. Nothing else travels but the collectives inside the passes, so ranks can't disagree on an order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pocketllm.cache.pages import PageEdits
from pocketllm.engine.inputs import SlotTokens
from pocketllm.engine.runner import ModelRunner
from pocketllm.errors import RankError
from pocketllm.layers.batch import Kind
from pocketllm.parallel import TensorParallel

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks 1, 2 ... of an engine, as rank 0 sees them. `failure`: why they ended, if nobody asked them to."""

    failure: RankError | None

    def meet(self, budget: int | None) -> int | None:
        """Wait until all are there. The least memory budget of all ranks, `budget` being rank 0's (None: unlimited)."""

    def build(self, budget: int | None) -> TensorParallel:
        """Let them build their models within `budget`; returns rank 0's way to the others."""

    def wait_ready(self) -> None:
        """Until all are built. Raises the error of one that failed."""

    def send(self, message: bytes) -> None:
        """To all of them. RankError if one is gone."""

    def fail(self, error: BaseException) -> RankError:
        """Ends all ranks: a call on rank 0 ended with `error`, so they can't be in step any more. Says whose fault it is."""

    def at_end(self, call: Callable[[], None]) -> None:
        """Call this before rank 0 leaves the group."""

    def close(self) -> None:
        """Ends all ranks, if that has not been done. Nothing of them stays."""


class LeadRunner:
    """The calls of a `ModelRunner`, on all ranks. After a RankError the engine can't go on."""

    def __init__(self, local: ModelRunner, ranks: Ranks) -> None:
        self.local, self._ranks = local, ranks
        self.model, self.kv, self.state = local.model, local.kv, local.state
        ranks.at_end(local.forget_recordings)

    def apply(self, edits: PageEdits, resets: Sequence[int]) -> None:
        if edits.entries or edits.copies or resets:
            self._lead(lambda: self.local.apply(edits, resets), "apply", edits.entries, edits.copies, resets)

    def forward(self, kind: Kind, items: Sequence[SlotTokens], *, all_logits: bool = False) -> Tensor:
        plain = [(item.slot, item.start, list(item.token_ids), item.wants_logits) for item in items]
        return self._lead(
            lambda: self.local.forward(kind, items, all_logits=all_logits), "forward", kind, plain, all_logits
        )

    def decode_tokens(self, items: Sequence[SlotTokens], token_ids: Tensor) -> Tensor:
        plain = [(item.slot, item.start, list(item.token_ids)) for item in items]
        return self._lead(lambda: self.local.decode_tokens(items, token_ids), "decode_tokens", plain)

    def propose(self, items: Sequence[SlotTokens]) -> Tensor:
        plain = [(item.slot, item.start, list(item.token_ids)) for item in items]
        return self._lead(lambda: self.local.propose(items), "propose", plain)

    def commit(self, slots: Sequence[int], num_tokens: Sequence[int]) -> None:
        self._lead(lambda: self.local.commit(slots, num_tokens), "commit", slots, num_tokens)

    def fork(self, parent: int, child: int) -> None:
        self._lead(lambda: self.local.fork(parent, child), "fork", parent, child)

    def save_snapshot(self, slot: int, index: int) -> None:
        self._lead(lambda: self.local.save_snapshot(slot, index), "save_snapshot", slot, index)

    def restore_snapshot(self, slot: int, index: int) -> None:
        self._lead(lambda: self.local.restore_snapshot(slot, index), "restore_snapshot", slot, index)

    def warm_up(self) -> None:
        self._lead(self.local.warm_up, "warm_up")

    def _lead(self, run: Callable[[], T], name: str, *arguments: Any) -> T:
        self._ranks.send(json.dumps([name, *arguments], separators=(",", ":")).encode())
        try:
            return run()
        except Exception as error:
            raise self._ranks.fail(error) from error
        except BaseException as error:  # ctrl-C in the midst of a pass
            self._ranks.fail(error)
            raise


AnyRunner = ModelRunner | LeadRunner


def obey(runner: ModelRunner, message: bytes) -> None:
    """Do what rank 0 does at this moment."""
    name, *arguments = json.loads(message)
    _COMMANDS[name](runner, *arguments)


def _apply(runner: ModelRunner, entries: list[Any], copies: list[Any], resets: list[int]) -> None:
    runner.apply(PageEdits(entries, copies), resets)


def _forward(runner: ModelRunner, kind: Kind, items: list[Any], all_logits: bool) -> None:
    runner.forward(kind, [SlotTokens(*item) for item in items], all_logits=all_logits)


def _decode_tokens(runner: ModelRunner, items: list[Any]) -> None:
    tokens = torch.zeros(len(items), dtype=torch.int64, device=runner.device)  # rank 0's take their place
    runner.decode_tokens([SlotTokens(*item) for item in items], tokens)


def _propose(runner: ModelRunner, items: list[Any]) -> None:
    runner.propose([SlotTokens(*item) for item in items])


_COMMANDS: dict[str, Callable[..., None]] = {
    "apply": _apply,
    "forward": _forward,
    "decode_tokens": _decode_tokens,
    "propose": _propose,
    "commit": ModelRunner.commit,
    "fork": ModelRunner.fork,
    "save_snapshot": ModelRunner.save_snapshot,
    "restore_snapshot": ModelRunner.restore_snapshot,
    "warm_up": ModelRunner.warm_up,
}
