"""The operations every backend offers, with the contract each must keep. A backend is a module of these functions.

Contract of all of them: a row's result depends on that row's inputs and on the storage of its own slot alone, bit for bit.
(The reference relies on torch for that: the same library call on the same shape gives a row the same result.)
Matrix products of more than 64 rows, which only prefill has, are kept to within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from pocketllm.kernels.types import (
    Activations,
    AttentionMask,
    Bridge,
    GatedDeltaWeights,
    LayerKV,
    LayerState,
    LinearWeight,
    PrefillPart,
    Readers,
)
from pocketllm.parallel import Place, Summands

Cross = Callable[[Activations, Tensor], list[Tensor]]  # what `Kernels.bridge` gives


class Kernels(Protocol):
    name: str
    keeps_dtype: bool  # whether long passes keep intermediates in the activations' type, not float32, but those of all
    #                    pairs of a token and an expert at once
    meets_ranks: bool  # whether `add_up` and `add_rms_norm` can read a `Place` of other ranks
    captures: bool  # whether `capture` can give a replay: batches are then padded, and passes keep their intermediates
    short_prefills: tuple[int, ...]  # tokens, ascending, of the prefill passes that are worth a `capture`

    def set_num_threads(self, num_threads: int) -> None:
        """CPU threads of this backend when called from this Python thread."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Gets ready what must be compiled. `run()` uses every kernel once, on memory where that does no harm."""

    def pack_weight(self, weight: LinearWeight) -> LinearWeight:
        """The same weight in the order this backend reads fastest; called once, at load, and on meta tensors to plan."""

    def attention_workspace(self, num_heads: int, head_dim: int, q_len: int, kv_len: int, *, prefill: bool) -> int:
        """Most bytes of intermediate tensors that attention of q_len queries over kv_len tokens takes at a time, in
        `prefill` or else in `attend`."""

    def capture(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor] | None]:
        """The result of `run()`, and a function that repeats its work without its Python code.

        `run` reads its inputs from tensors that stay where they are, and what it launches must not depend on their values.
        It is called once or more, and must do no harm then: the inputs name the spare slot. A replay returns the same
        tensor with new contents. None instead of one if this backend can't repeat `run` so.
        """

    # -- rows in, rows out -------------------------------------------------------------------------------------------
    # Where `readers` are given, the result is for products with these weights alone: a backend may give it in the form in
    # which it multiplies them (`Activations`). Without readers it is a tensor.

    def linear(self, x: Activations, weight: LinearWeight) -> Tensor:
        """x [M, K] -> x W^T + bias, [M, N], in x's dtype; the sum over K is in float32."""

    def linear_summands(self, x: Activations, weight: LinearWeight, place: Place | None = None) -> Summands:
        """`linear`, but what is to be added at the end may be left to the reader. With a place, the result is put there."""

    def add_up(self, x: Summands, dtype: object) -> Tensor:
        """[M, N] in `dtype` (a torch.dtype); waits for the other ranks if there is a place."""

    def gated_linear(self, x: Activations, weight: LinearWeight, readers: Readers = ()) -> Activations:
        """silu_mul(linear(x, weight)) in one: x [M, K], a weight that stacks gate | up [2I, K] -> [M, I]."""

    def embedding(self, token_ids: Tensor, weight: LinearWeight, dtype: object) -> Tensor:
        """token_ids [T] int64 -> rows of the table, [T, K] in `dtype` (a torch.dtype)."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [M, K] * rsqrt(mean(x^2) + eps) * weight, computed in float32, returned in x's dtype. weight [K] float32."""

    def add_rms_norm(
        self, x: Summands, residual: Tensor, weight: Tensor, eps: float, readers: Readers = ()
    ) -> Activations:
        """Adds x [M, K] to `residual` [M, K] *in place*, and returns rms_norm of the sum."""

    def norm_rope(
        self, x: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, positions: Tensor
    ) -> Tensor:
        """x [T, H, D]: RMS norm of each head by `norm` [D] (if given), then rotate-half RoPE on the first R dims.

        cos, sin [max_context, R/2] float32 are indexed by positions [T]; pair i is (x[i], x[i + R/2]).
        """

    def silu_mul(self, gate_up: Tensor, readers: Readers = ()) -> Activations:
        """[M, 2I] -> silu(first half) * second half, [M, I]."""

    def sigmoid_mul(self, x: Tensor, gate: Tensor, readers: Readers = ()) -> Activations:
        """x [M, K] * sigmoid(gate), gate [M, K], [M, 1], or [M, H, K / H] where heads lie apart."""

    def bridge(self, weights: Bridge, num_rows: int, dtype: object, places: Sequence[Place] = ()) -> Cross | None:
        """What takes the result of a mixer to the next one's inputs in one, for so many rows of this type (a torch.dtype).
        None: go step by step. With several ranks, the summands of both sums over them go to two places.

        `cross(x, residual)`, x [M, A] made for the reader `weights`, gives for each of next_in an [M, N]:

            residual += linear(x, out)                          [M, H], in place
            h = gated_linear(rms_norm(residual, norm), gate_up)
            residual += linear(h, down)
            y = linear(rms_norm(residual, next_norm), w)        for w in next_in

        A result may be summands to be added in order, [P, M, N or more] float32. After the last block nothing is added to
        the residual at the end: the result is the summands [P, M, H] of linear(h, down), in the second place if there are
        places.
        """

    def moe(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        gate_up: list[LinearWeight],
        down: list[LinearWeight],
    ) -> Tensor:
        """Sum over the chosen experts of weight * down(silu(gate) * up). x [M, K], expert_ids/weights [M, top_k]."""

    # -- attention over slots ----------------------------------------------------------------------------------------

    def append(self, kv: LayerKV, k: Tensor, v: Tensor, token_slots: Tensor, positions: Tensor) -> None:
        """Encodes k, v [T, Hk, D] and writes each token to the row of (token_slots[t], positions[t])."""

    def attend(
        self, kv: LayerKV, q: Tensor, slot_ids: Tensor, kv_lens: Tensor, scale: float, mask: AttentionMask
    ) -> Tensor:
        """Decode and verify. q [n, Q, Hq, D] -> [n, Q, Hq, D].

        kv_lens [n] counts the tokens in cache including this pass's; query j of slot i stands at position
        kv_lens[i] - Q + j and sees positions up to its own.
        """

    def prefill(
        self,
        kv: LayerKV,
        q: Tensor,
        slot_ids: Tensor,
        cu_seqlens_q: Tensor,
        kv_lens: Tensor,
        scale: float,
        mask: AttentionMask,
        parts: Sequence[PrefillPart] | None = None,
    ) -> Tensor:
        """Packed queries q [T, Hq, D] -> [T, Hq, D]; those of slot i are cu_seqlens_q[i]:cu_seqlens_q[i+1]
        and stand at the end of its kv_lens[i] tokens. Attends to what `append` stored, for the chunk itself too.

        parts: slots and lengths once more, where they are known on the host; a backend may choose a way by them."""

    def dequantize(self, kv: LayerKV, slot_id: int, kv_len: int) -> tuple[Tensor, Tensor]:
        """The first kv_len tokens of a slot as K, V [kv_len, Hk, D] float32, K with its bias."""

    # -- Gated DeltaNet over slots -----------------------------------------------------------------------------------

    def gated_delta_prefill(
        self,
        qkv: Tensor,
        z: Tensor,
        b: Tensor,
        a: Tensor,
        weights: GatedDeltaWeights,
        state: LayerState,
        slot_ids: Tensor,
        cu_seqlens_q: Tensor,
        kv_lens: Tensor,
    ) -> Tensor:
        """Everything between in_proj and out_proj for packed sequences; updates the slots' state in place.

        qkv [T, C], z [T, Hv * dv], b, a [T, Hv] -> [T, Hv * dv]. Sums run in chunks that end on multiples of 64
        from the start of the *sequence* (kv_lens gives its length after this pass), whatever the pass contains.
        """

    def gated_delta_decode(
        self,
        qkv: Tensor,
        z: Tensor,
        b: Tensor,
        a: Tensor,
        weights: GatedDeltaWeights,
        state: LayerState,
        slot_ids: Tensor,
        readers: Readers = (),
    ) -> Activations:
        """One token a slot: shapes as in prefill with T = n; updates the state in place.

        b and a may also come as summands [P, T, Hv] float32, to be added in order.
        """

    def gated_delta_verify(
        self,
        qkv: Tensor,
        z: Tensor,
        b: Tensor,
        a: Tensor,
        weights: GatedDeltaWeights,
        state: LayerState,
        slot_ids: Tensor,
        q_len: int,
        readers: Readers = (),
    ) -> Activations:
        """q_len tokens a slot (T = n * q_len), the same arithmetic as q_len decodes; the state stays, the journal is
        written at the slot's row."""

    def gated_delta_commit(self, state: LayerState, slot_ids: Tensor, num_tokens: Tensor) -> None:
        """Replays the first num_tokens[i] journal entries of slot i into its state (0: leave it as it was)."""
