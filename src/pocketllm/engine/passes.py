"""`PassRunner`: runs one pass for several slots so that a failure hits only the slot that causes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pocketllm.cache.pages import PageEdits
from pocketllm.engine.inputs import SlotTokens
from pocketllm.engine.lead import AnyRunner
from pocketllm.engine.slots import SlotTable
from pocketllm.errors import PocketLLMError, RankError, RequestError
from pocketllm.layers.batch import Kind
from pocketllm.options import CHUNK_ALIGNMENT

History = Callable[[], Sequence[int]]  # a slot's token ids, asked for only when a pass failed


@dataclass(frozen=True)
class PassResult:
    """logits: [V] (prefill, decode) or [Q, V] (verify, all_logits), None for a chunk that asked for none; or the error."""

    logits: Tensor | None = None
    error: Exception | None = None


class PassRunner:
    def __init__(self, runner: AnyRunner, slots: SlotTable, chunk: int, has_state: bool) -> None:
        self._runner, self._slots, self._chunk, self._has_state = runner, slots, chunk, has_state

    def run(
        self, kind: Kind, items: Sequence[SlotTokens], histories: Sequence[History], *, all_logits: bool = False
    ) -> list[PassResult]:
        """One result an item. If the joint pass raises, each item is tried alone, and only those that raise again fail.

        histories give the tokens of each slot before its item's: a pass that broke off half-way may have moved recurrent
        state on, so before its second try, and after its failure, a slot's state is computed anew from them.
        """
        edits, resets = self._slots.take_changes()
        self._runner.apply(edits, resets)
        try:
            return self._forward(kind, items, all_logits)
        except RankError:  # no slot's fault, and nothing can be tried again
            raise
        except Exception as error:
            if len(items) == 1 and not self._has_state:
                return [PassResult(error=_described(error, items[0]))]
            return [
                self._alone(kind, item, history, all_logits) for item, history in zip(items, histories, strict=True)
            ]

    def prefill(self, items: Sequence[SlotTokens], histories: Sequence[History]) -> list[PassResult]:
        """As `run`, of items of any length: in passes of as many tokens as the memory plan has room for."""
        results = [PassResult()] * len(items)
        done = [0] * len(items)
        while left := [i for i, item in enumerate(items) if done[i] < len(item.token_ids)]:
            pieces: list[SlotTokens] = []
            before: list[History] = []
            budget = self._chunk
            for i in left:
                item, at = items[i], done[i]
                end = min(at + budget, len(item.token_ids))
                if end < len(item.token_ids):
                    end -= (item.start + end) % CHUNK_ALIGNMENT
                if end <= at:
                    break
                last = end == len(item.token_ids)
                pieces.append(SlotTokens(item.slot, item.start + at, item.token_ids[at:end], last))
                before.append(partial(_joined, histories[i], item.token_ids[:at]))
                budget -= end - at
            passed = self.run("prefill", pieces, before)
            for i, piece, result in zip(left, pieces, passed, strict=False):
                results[i] = result
                done[i] += len(piece.token_ids)
                if result.error is not None:
                    if piece.start > items[i].start:
                        self.undo(items[i], histories[i])
                    done[i] = len(items[i].token_ids)
        return results

    def decode_tokens(
        self, items: Sequence[SlotTokens], histories: Sequence[History], token_ids: Tensor
    ) -> Tensor | None:
        """Logits [n, V] of a decode pass whose tokens [n] only the device knows; None, and as if nothing had been, if it
        fails."""
        self._runner.apply(*self._slots.take_changes())
        try:
            return self._runner.decode_tokens(items, token_ids)
        except RankError:
            raise
        except Exception:  # it will fail again when its time has come, and then whose fault it is will be found out
            for item, history in zip(items, histories, strict=True):
                self.undo(item, history)
            return None

    def _alone(self, kind: Kind, item: SlotTokens, history: History, all_logits: bool) -> PassResult:
        try:
            self.undo(item, history)
            logits = self._forward(kind, [item], all_logits)[0].logits
            return PassResult(None if logits is None else logits.clone())  # the next one's pass may write over it
        except Exception as error:
            self.undo(item, history)
            return PassResult(error=_described(error, item))

    def undo(self, item: SlotTokens, history: History) -> None:
        """Put the slot's recurrent state back to before the item. (KV needs nothing: rows beyond kv_len don't count.)"""
        if not self._has_state:
            return
        tokens = history()
        self._runner.apply(PageEdits(), [item.slot])
        for start in range(0, item.start, self._chunk):
            end = min(start + self._chunk, item.start)
            self._runner.forward("prefill", [SlotTokens(item.slot, start, tokens[start:end], wants_logits=False)])

    def _forward(self, kind: Kind, items: Sequence[SlotTokens], all_logits: bool) -> list[PassResult]:
        logits = self._runner.forward(kind, items, all_logits=all_logits)
        if kind == "verify" or all_logits:
            return [PassResult(rows) for rows in torch.split(logits, [len(item.token_ids) for item in items])]
        rows = iter(logits)
        return [PassResult(next(rows) if item.wants_logits else None) for item in items]


def _joined(history: History, more: Sequence[int]) -> Sequence[int]:
    return [*history(), *more]


def _described(error: Exception, item: SlotTokens) -> Exception:
    if isinstance(error, PocketLLMError):
        return error
    described = RequestError(
        f"computing slot {item.slot} at token {item.start} failed: {type(error).__name__}: {error}"
    )
    described.__cause__ = error
    return described
