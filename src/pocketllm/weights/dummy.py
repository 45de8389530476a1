"""Weights without a file: random ones of the right shapes, and ones that only count bytes."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from pocketllm.errors import ModelError
from pocketllm.kernels.types import LinearWeight
from pocketllm.parallel import Part
from pocketllm.weights.base import BaseSource, Policy
from pocketllm.weights.formats import StoredFormat
from pocketllm.weights.reader import Storage
from pocketllm.weights.shards import check_cut, cut
from pocketllm.weights.source import Role

_POOL = 1 << 20  # random elements that large matrices are tiled from


class PlannedSource(BaseSource):
    """Tensors on the meta device: what a `CheckpointSource` would hand out, and its `nbytes`, without memory."""

    def __init__(self, storage: Storage, policy: Policy, *, tied_head: bool) -> None:
        super().__init__(policy, tied_head=tied_head)
        self._storage = storage

    def has(self, name: str) -> bool:
        return self._storage.has(name)

    def matrix(self, name: str, rows: Part, columns: Part, role: Role) -> LinearWeight:
        target = _target(self._storage, self.policy, name, role, rows, columns)
        shape = rows.size, columns.size
        planes = tuple(torch.empty(s.shape, dtype=s.dtype, device="meta") for s in target.specs(*shape))
        return LinearWeight(target, shape, planes)

    def vector(self, name: str, shape: tuple[int, ...], offset: float) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device="meta")


class DummySource(BaseSource):
    """Random weights, the same for the same seed, name and device type, scaled so that activations keep their size.

    A large matrix is tiled from a pool of 2**20 random elements, encoded once: filling 27 billion weights is a copy.
    Pool length and row width have no common divisor, so rows differ.
    """

    def __init__(
        self, storage: Storage, policy: Policy, device: torch.device, *, tied_head: bool, seed: int = 0
    ) -> None:
        super().__init__(policy, tied_head=tied_head)
        self._storage, self._device, self._seed = storage, device, seed
        self._pools: dict[tuple[str, int], tuple[Tensor, ...]] = {}

    def has(self, name: str) -> bool:
        return self._storage.has(name)

    def matrix(self, name: str, rows: Part, columns: Part, role: Role) -> LinearWeight:
        target = _target(self._storage, self.policy, name, role, rows, columns)
        n, k = rows.total, columns.total
        start = zlib.crc32(name.encode()) % _POOL
        planes = []
        for spec, pool in zip(target.specs(n, k), self._pool(target, k), strict=True):
            plane = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            _tile(plane, pool, start)
            planes.append(plane)
        return cut(LinearWeight(target, (n, k), tuple(planes)), rows, columns)

    def vector(self, name: str, shape: tuple[int, ...], offset: float) -> Tensor:
        """Norms near 1 (offset included), A_log in the range of trained models, the rest by fan-in."""
        generator = torch.Generator().manual_seed(self._seed ^ zlib.crc32(name.encode()))
        noise = torch.randn(shape, generator=generator)
        if name.endswith("A_log"):
            values = torch.log(0.05 + 3.95 * torch.rand(shape, generator=generator))
        elif "norm" in name:
            values = 1.0 + 0.1 * noise
        else:
            values = noise / math.sqrt(shape[-1]) if len(shape) > 1 else 0.1 * noise
        return values.to(self._device)

    def _pool(self, target: StoredFormat, k: int) -> tuple[Tensor, ...]:
        """The planes of a random matrix of width k, flat."""
        key = (target.name, k)
        if key not in self._pools:
            generator = torch.Generator().manual_seed(self._seed)
            rows = -(-_POOL // k)
            matrix = torch.randn(rows, k, generator=generator) / math.sqrt(k)
            planes = target.encode(matrix.to(self._device))
            self._pools[key] = tuple(_coprime(plane.flatten(), plane.shape[1]) for plane in planes)
        return self._pools[key]


def _target(storage: Storage, policy: Policy, name: str, role: Role, rows: Part, columns: Part) -> StoredFormat:
    full = f"{name}.weight"
    if not storage.has(full):
        raise ModelError(f"{full} is missing")
    stored = storage.format_of(full)
    target = policy.target(stored, role)
    for form in (stored, target):
        check_cut(full, form, rows, columns)
    return target


def _coprime(flat: Tensor, width: int) -> Tensor:
    """The longest head of `flat` whose length has no divisor in common with `width` (so that tiled rows differ)."""
    length = len(flat)
    while math.gcd(length, width) > 1:
        length -= 1
    return flat[:length]


def _tile(plane: Tensor, pool: Tensor, start: int) -> None:
    """Fills `plane` with `pool`, repeated, beginning at element `start` of it."""
    flat, at, start = plane.view(-1), 0, start % len(pool)
    while at < len(flat):
        count = min(len(pool) - start, len(flat) - at)
        flat[at : at + count] = pool[start : start + count]
        at, start = at + count, 0
