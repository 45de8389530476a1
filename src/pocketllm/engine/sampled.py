"""What a sampling step found: on the device at first, read by the host when it has to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one step, of the raw logits over the real ids (before any parameter)."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), most likely first


@dataclass(frozen=True)
class LogprobTensors:
    rows: list[int]
    counts: list[int]  # how many each row asked for
    chosen: Tensor  # [m] float32
    top_ids: Tensor  # [m, NARROW] int64
    top: Tensor  # [m, NARROW] float32


@dataclass(frozen=True)
class SampleResult:
    """Everything is on the device; what is read as a list waits for it, once."""

    tokens: Tensor  # [n] int64; 0 in bad rows
    is_bad: Tensor  # [n] bool
    _logprobs: LogprobTensors | None = None
    _forbidden: Tensor | None = None  # [n] bool; None: no row
    _sent: list[tuple[Tensor, torch.cuda.Event]] = field(default_factory=list)  # none or one: on its way to the host

    @property
    def simple(self) -> bool:
        """Whether the tokens are all there is to know of the rows."""
        return self._logprobs is None and self._forbidden is None

    def send(self) -> None:
        """Begin the transfer to the host: what is launched after this is not waited for. (On a CPU there is none.)"""
        if self.tokens.device.type != "cuda":
            return
        both = self._both()
        there = torch.empty(both.shape, dtype=both.dtype, pin_memory=True).copy_(both, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._sent.append((there, arrived))

    def _both(self) -> Tensor:
        """tokens and is_bad, [2, n]: for one transfer."""
        return torch.stack((self.tokens, self.is_bad.long()))

    @cached_property
    def _on_host(self) -> list[list[int]]:
        there = self._both() if not self._sent else self._sent[0][0]
        for _, arrived in self._sent:
            arrived.synchronize()
        both: list[list[int]] = there.tolist()
        return both

    @property
    def token_ids(self) -> list[int]:
        return self._on_host[0]

    @cached_property
    def bad(self) -> list[int]:
        """Rows without a valid choice (NaN, +inf, or nothing finite left): their requests must fail, others go on."""
        return [row for row, bad in enumerate(self._on_host[1]) if bad]

    @cached_property
    def forbidden(self) -> list[int]:
        """Those of the bad rows whose logits are sound: the request's own settings leave no token to choose."""
        return [] if self._forbidden is None else torch.nonzero(self._forbidden).flatten().tolist()

    @cached_property
    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Row -> log-probabilities, for the rows that asked."""
        data = self._logprobs
        if data is None:
            return {}
        ids, top, chosen = data.top_ids.tolist(), data.top.tolist(), data.chosen.tolist()
        return {
            row: TokenLogprobs(chosen[i], tuple(zip(ids[i][:count], top[i][:count], strict=True)))
            for i, (row, count) in enumerate(zip(data.rows, data.counts, strict=True))
        }
