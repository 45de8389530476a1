"""`CheckpointSource`: weights of a model file. All its faults are found in one run and named in one error."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from pocketllm.errors import ModelError
from pocketllm.kernels.types import LinearWeight
from pocketllm.parallel import Part
from pocketllm.weights.base import BaseSource, Policy, placeholder
from pocketllm.weights.formats import convert
from pocketllm.weights.reader import MTP, Reader
from pocketllm.weights.shards import check_cut, cut
from pocketllm.weights.source import Role


class CheckpointSource(BaseSource):
    """Weights from `reader`, put on `device` in the formats of `policy`."""

    def __init__(self, reader: Reader, policy: Policy, device: torch.device, *, tied_head: bool) -> None:
        super().__init__(policy, tied_head=tied_head)
        self._reader, self._device = reader, device
        self._used: set[str] = {"lm_head.weight"} if tied_head else set()  # a file may hold the tied head again

    def has(self, name: str) -> bool:
        return self._reader.has(name)

    def matrix(self, name: str, rows: Part, columns: Part, role: Role) -> LinearWeight:
        full = f"{name}.weight"
        self._check(full, (rows.total, columns.total))
        try:
            stored = self._reader.format_of(full)
            target = self.policy.target(stored, role)
            for form in (stored, target):
                check_cut(full, form, rows, columns)
            if self.problems:  # the model won't be built: check the rest, but read no more
                return placeholder(rows.size, columns.size, False)
            return convert(cut(self._reader.matrix(full), rows, columns), target, self._device)
        except ModelError as error:
            raise self._fault(full, str(error)) from None

    def vector(self, name: str, shape: tuple[int, ...], offset: float) -> Tensor:
        self._check(name, shape)
        try:
            values = self._reader.tensor(name)
        except ModelError as error:
            raise self._fault(name, str(error)) from None
        return values.reshape(shape).to(self._device, torch.float32, copy=True) + offset

    def finish(self) -> None:
        extra = [name for name in self._reader.names() if name not in self._used and not name.startswith(MTP)]
        self.problems += [f"{name} is in the file but not in the model" for name in extra]
        try:
            super().finish()
        except ModelError as error:
            raise ModelError(f"{self._reader.path}: {error}") from None

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        self._used.add(name)
        if not self._reader.has(name):
            raise ModelError(f"{name} {list(shape)} is missing")
        found = self._reader.shape(name)
        if _without_ones(found) != _without_ones(shape) or prod(found) != prod(shape):
            raise ModelError(f"{name} is {list(found)}, must be {list(shape)}")

    def _fault(self, name: str, text: str) -> ModelError:
        return ModelError(text if name in text else f"{name}: {text}")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Converters differ on whether a dimension of 1 is kept."""
    return tuple(s for s in shape if s != 1)
