"""`KVFormat`: how K and V of one token and one KV head are stored, and the only object that knows.

A format is one file in this folder that defines `FORMATS`, a tuple of instances; it is found by itself, and with it its
command-line choice, its byte counts, its tests and its benchmarks. `encode` and `decode` in plain PyTorch *define* it;
a backend's kernels read the same planes in place and are tested against them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from pocketllm.errors import OptionError
from pocketllm.kernels.types import PlaneSpec

if TYPE_CHECKING:  # Numba and Triton are optional dependencies
    from pocketllm.kernels.numba.format_pieces import FormatPieces
    from pocketllm.kernels.triton.pieces import TritonPieces


class KVFormat(ABC):
    """A KV storage scheme.

    name            what `--kv-cache-dtype` calls it
    tolerance       largest relative RMS error of attention output it may cause on Gaussian data; used by tests
    drops_key_bias  store K without the model's K bias (see `kernels.types.KeyBias`): the bias is one large outlier that
                    would eat a quantised format's range
    """

    name: str
    tolerance: float
    drops_key_bias: ClassVar[bool] = True

    @abstractmethod
    def planes(self, head_dim: int) -> tuple[PlaneSpec, ...]:
        """The planes of one token and KV head. ValueError if head_dim can't be stored."""

    @abstractmethod
    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """k, v [..., D] of any float type -> one tensor [..., width] for each plane."""

    @abstractmethod
    def decode(self, planes: Sequence[Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        """The inverse: K, V [..., D] float32, up to the format's loss."""

    def numba_pieces(self, head_dim: int) -> FormatPieces:
        """How the Numba kernels read and write the format; OptionError if it has no such pieces."""
        raise OptionError(f"KV format {self.name!r} has no Numba pieces: use kernels='reference'")

    def triton_pieces(self, head_dim: int) -> TritonPieces:
        """How the Triton kernels read and write the format; OptionError if it has no such pieces."""
        raise OptionError(f"KV format {self.name!r} has no Triton pieces: use kernels='reference'")

    def bytes_per_token(self, head_dim: int) -> int:
        """Bytes of one token and one KV head, K and V together."""
        return sum(p.nbytes for p in self.planes(head_dim))


def absmax_scale(x: Tensor, largest: float) -> Tensor:
    """Scale [..., 1] float32 that maps the largest magnitude of x's last dimension to `largest`.

    The floor keeps all-zero rows finite; it is far below any K or V of a real model.
    """
    return x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / largest
