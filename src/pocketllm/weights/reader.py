"""`Reader`: the tensors of a model file under Hugging Face names, whatever the file calls them; and those names.

Canonical names are `model.embed_tokens.weight`, `model.layers.N.<module>.weight`, `model.norm.weight` and
`lm_head.weight`, and `mtp.<module>.weight`; the experts of a sparse layer are `mlp.experts.E.{gate,up,down}_proj.weight`
even where the file stacks them in one tensor.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from torch import Tensor

from pocketllm.kernels.types import LinearWeight
from pocketllm.weights.formats import StoredFormat

MTP = "mtp."  # before the names of layers that predict further tokens, which only some engines load
_SKIPPED_PREFIXES = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.")
_SKIPPED_SUFFIXES = (".rotary_emb.inv_freq",)
_RENAMED_PREFIXES = (
    ("model.language_model.lm_head.", "lm_head."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("model.mtp.", MTP),
)


class Storage(Protocol):
    """What a file stores, known from its header alone."""

    def has(self, name: str) -> bool: ...

    def format_of(self, name: str) -> StoredFormat:
        """How the matrix or small tensor `name` is stored. ModelError if in a way that can't be read."""


class Reader(Storage, Protocol):
    @property
    def path(self) -> Path: ...

    def names(self) -> Collection[str]:
        """Canonical names of everything a text model may ask for, in file order."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def matrix(self, name: str) -> LinearWeight:
        """A matrix [N, K] as stored, without bias. May share memory with the file: not to be written to."""

    def tensor(self, name: str) -> Tensor:
        """A tensor of any shape, decoded to a float type. May share memory with the file: not to be written to."""


def canonical_name(name: str) -> str | None:
    """The canonical form of a checkpoint's tensor or module name; None for parts a text model does not use."""
    if name.startswith(_SKIPPED_PREFIXES) or name.endswith(_SKIPPED_SUFFIXES):
        return None
    for old, new in _RENAMED_PREFIXES:
        if name.startswith(old):
            return new + name[len(old) :]
    return name
