"""`ForwardBatch`: the inputs of one pass through the model, an argument of every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pocketllm.kernels.types import PrefillPart

Kind = Literal["prefill", "decode", "verify"]


@dataclass(frozen=True)
class ForwardBatch:
    """n slots, T packed tokens; slot i's tokens are cu_seqlens_q[i]:cu_seqlens_q[i+1], the newest of its kv_lens[i].

    decode has one token a slot, verify the same q_len for every slot, prefill any number, none included.
    """

    kind: Kind
    q_len: int  # tokens per slot of decode (1) and verify; 0 for prefill
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, in the slot's sequence
    token_slots: Tensor  # [T] int32, slot of each token
    slot_ids: Tensor  # [n] int32
    cu_seqlens_q: Tensor  # [n + 1] int32
    kv_lens: Tensor  # [n] int32, tokens in cache once this pass's are appended
    logits_rows: Tensor | None  # [m] int64: tokens whose logits are wanted; None: all of them
    parts: tuple[PrefillPart, ...] | None = None  # of a prefill pass: slots and lengths, as the host knows them
