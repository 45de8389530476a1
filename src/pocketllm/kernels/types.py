"""What a kernel sees: tensors, and the two small protocols through which it reads a storage format.

Nothing here knows a model, a request or a cache's bookkeeping. Symbols used in shapes throughout the package:

    T   tokens in this pass, packed        n   sequences (slots) in this pass     S   slots of the engine
    Hq  query heads   Hk  KV heads         D   head dimension                     V   vocabulary
    M   rows of a matrix product           N   its outputs                        K   its inputs (the summed dimension)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of a tensor to be allocated; `nbytes` is what it will take."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize
        for s in self.shape:
            size *= s
        return size


class WeightFormat(Protocol):
    """How a weight matrix [N, K] is stored. `decode` *defines* the format; optimised kernels read the tensors in place."""

    @property
    def name(self) -> str: ...

    def specs(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        """The tensors that hold an [n, k] matrix, in the order of `LinearWeight.tensors`."""

    def decode(self, tensors: Sequence[Tensor]) -> Tensor:
        """The matrix [N, K] in float32 (in its own dtype if the format is plain)."""

    def decode_rows(self, tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
        """Rows `rows` [M] of the matrix, [M, K]: an embedding look-up that does not decode the rest."""


@dataclass(frozen=True)
class LinearWeight:
    """One weight matrix y = x W^T + bias as stored. `tensors` are the planes that `format.specs(*shape)` describes."""

    format: WeightFormat
    shape: tuple[int, int]  # (N, K)
    tensors: tuple[Tensor, ...]
    bias: Tensor | None = None  # [N] float32
    pairs: tuple[Tensor, ...] = ()  # a narrow matrix in 16 bits once more, as `kernels.triton.bridge` reads it

    @property
    def nbytes(self) -> int:
        more = self.pairs if self.bias is None else (*self.pairs, self.bias)
        return sum(t.nbytes for t in (*self.tensors, *more))


@dataclass(frozen=True, eq=False)
class Quantized:
    """Activations [M, K] rounded to e4m3 in groups of 128 columns, as products of many rows in FP8 read them."""

    codes: Tensor  # [M', K] e4m3; M' = M or a few more, and what is in rows past M means nothing
    scales: Tensor  # [K / 128, M'] float32
    num_rows: int  # M
    dtype: torch.dtype  # of a product's result
    plain: Tensor | None = None  # [M, K] not rounded, if there are products that read them so

    def __len__(self) -> int:
        return self.num_rows

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.codes.shape[1]

    @property
    def planes(self) -> tuple[Tensor, Tensor]:
        return self.codes, self.scales


@dataclass(frozen=True, eq=False)
class Paired:
    """Few rows of activations [M, K], each as two rows of e4m3: x = scale (high + low / 16). See `kernels.triton.pairs`.

    R is M up to a power of two of at least 8. What is in rows past M means nothing.
    """

    codes: Tensor  # [2 R, K] e4m3: high parts, then low ones
    scales: Tensor  # [K / 128, 2 R] float32: of high parts, then the same over 16
    num_rows: int  # M
    dtype: torch.dtype  # of a product's result

    def __len__(self) -> int:
        return self.num_rows

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.codes.shape[1]


Activations = Tensor | Quantized | Paired  # what an operation gives its readers (see `kernels.protocol`)


@dataclass(frozen=True, eq=False)
class Bridge:
    """The weights of all that lies between two mixers of a model: attention, delta rule."""

    out: LinearWeight  # [H, A], of the mixer
    norm: Tensor  # [H] float32
    gate_up: LinearWeight  # gate | up [2 I, H]
    down: LinearWeight  # [H, I]
    next_norm: Tensor | None  # [H] float32; None: this is the last block
    next_in: tuple[LinearWeight, ...]  # [N, H] each, of the next mixer
    eps: float


Readers = Sequence[LinearWeight] | Bridge  # the weights that a result will be multiplied by


@dataclass(frozen=True)
class PlaneSpec:
    """One kind of data of a KV format: `width` elements of `dtype` per token and KV head."""

    name: str
    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.width * self.dtype.itemsize


class KVCodec(Protocol):
    """What a kernel may ask of a KV format (see `cache.formats.base.KVFormat`)."""

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """[..., D], [..., D] -> one tensor [..., width] per plane."""

    def decode(self, planes: Sequence[Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        """One tensor [..., width] per plane -> K and V [..., D] float32, in the basis they were given in."""


@dataclass(frozen=True)
class KeyBias:
    """The part of K that a format left out of storage: RoPE(bias, position), the same for every slot.

    Models with a bias on K (Qwen2, Qwen2.5) have large outliers there; quantised formats store K without it and the
    attention kernels add q . RoPE(bias, position) back to the scores from the model's own cos/sin table.
    """

    bias: Tensor  # [Hk, D] float32
    cos: Tensor  # [max_context, R/2] float32, R = rotated dims
    sin: Tensor  # [max_context, R/2] float32


@dataclass(frozen=True)
class LayerKV:
    """The KV storage of one attention layer, and how to read it.

    The row of token `pos` of slot `s` is `block_table[s, pos // page_size] * page_size + pos % page_size`. Slot S and the
    last page are spare: padding rows of a batch read and write there, so no kernel needs a branch for them.
    """

    planes: tuple[Tensor, ...]  # each [num_pages + 1, page_size, Hk, width]
    block_table: Tensor  # [S + 1, max_pages] int32
    codec: KVCodec
    head_dim: int
    key_bias: KeyBias | None = None

    @property
    def page_size(self) -> int:
        return self.planes[0].shape[1]


@dataclass(frozen=True)
class PrefillPart:
    """One slot's chunk of a prefill pass, as the host knows it."""

    slot: int
    num_tokens: int
    kv_len: int  # tokens in cache with the chunk's


@dataclass(frozen=True)
class AttentionMask:
    """Which cached tokens a query at position p may see: j <= p and (p - j < window or j < sinks). window 0: all."""

    window: int = 0
    sinks: int = 0


@dataclass(frozen=True)
class GatedDeltaWeights:
    """Parameters of a Gated DeltaNet layer between its input and output projections. C = 2 Hk dk + Hv dv channels."""

    conv: Tensor  # [C, W] float32, oldest tap first
    a_log: Tensor  # [Hv] float32
    dt_bias: Tensor  # [Hv] float32
    norm: Tensor  # [dv] float32
    eps: float
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int


@dataclass(frozen=True)
class LayerState:
    """Recurrent state of one Gated DeltaNet layer for every slot, and the journal of a verify pass.

    A verify pass leaves `conv` and `recurrent` alone and writes what it would have done to the journal;
    `gated_delta_commit` replays the accepted tokens. A journal entry is 3 small rows a token instead of a whole state.
    """

    conv: Tensor  # [S + 1, C, W - 1] float32: the last W - 1 inputs of the convolution, oldest first
    recurrent: Tensor  # [S + 1, Hv, dk, dv] float32
    journal_x: Tensor  # [S + 1, Q, C] float32: inputs of the convolution; Q = max_draft_tokens + 1 (0 without drafts)
    journal_k: Tensor  # [S + 1, Q, Hk, dk] float32: normalised keys
    journal_d: Tensor  # [S + 1, Q, Hv, dv] float32: what was written along the key
    journal_g: Tensor  # [S + 1, Q, Hv] float32: decay factor exp(g)
