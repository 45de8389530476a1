"""A pass's inputs in one block of memory, and passes recorded in the spare slot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines import engine, feed, prompt
from pocketllm.engine.graphs import padded_size, padded_sizes
from pocketllm.engine.inputs import SlotTokens, pack


def test_a_block_holds_what_the_items_say() -> None:
    items = [SlotTokens(2, 5, [7, 8, 9]), SlotTokens(0, 0, [4], wants_logits=False), SlotTokens(1, 64, [3, 2])]
    layout, block = pack("prefill", items, all_logits=False, pinned=False)
    batch = layout.batch(block)
    assert (batch.kind, batch.q_len) == ("prefill", 0)
    assert batch.token_ids.tolist() == [7, 8, 9, 4, 3, 2]
    assert batch.positions.tolist() == [5, 6, 7, 0, 64, 65]
    assert batch.token_slots.tolist() == [2, 2, 2, 0, 1, 1]
    assert batch.slot_ids.tolist() == [2, 0, 1]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4, 6]
    assert batch.kv_lens.tolist() == [8, 1, 66]
    assert batch.logits_rows is not None
    assert batch.logits_rows.tolist() == [2, 5]
    assert batch.token_ids.dtype == batch.positions.dtype == batch.logits_rows.dtype == torch.int64
    assert {t.dtype for t in (batch.token_slots, batch.slot_ids, batch.cu_seqlens_q, batch.kv_lens)} == {torch.int32}


@pytest.mark.parametrize("all_logits", [True, False])
def test_views_share_the_block_and_begin_at_16_bytes(all_logits: bool) -> None:
    items = [SlotTokens(1, 0, [1, 2, 3], wants_logits=False)]
    layout, block = pack("prefill", items, all_logits=all_logits, pinned=False)
    batch = layout.batch(block)
    tensors = [t for t in vars(batch).values() if isinstance(t, torch.Tensor)]
    assert len(tensors) == (6 if all_logits else 7)  # without logits_rows, every token's logits are wanted
    for view in tensors:
        assert view.untyped_storage().data_ptr() == block.data_ptr()
        assert view.storage_offset() * view.element_size() % 16 == 0
    other = layout.batch(torch.zeros_like(block))
    assert other.token_ids.tolist() == [0, 0, 0]


def test_batches_are_padded_to_few_sizes() -> None:
    assert [padded_size(n) for n in (1, 2, 3, 5, 8, 9, 16, 17)] == [1, 2, 4, 8, 8, 16, 16, 24]
    assert padded_sizes(20) == [1, 2, 4, 8, 16, 24]
    assert padded_sizes(3) == [1, 2, 4]


def test_recording_a_pass_leaves_every_slot_as_it_was(tmp_path: Path) -> None:
    """A batch of two is recorded when slots 0 and 2 first decode together: their tokens, and slot 1, know nothing of it."""
    pytest.importorskip("numba")
    slots = engine("qwen3_5", tmp_path, kernels="numba")
    plain = engine("qwen3_5", tmp_path, kernels="reference")
    for each in (slots, plain):
        held = [each.acquire_slot() for _ in range(3)]
        feed(each, {slot: prompt(5, seed=slot) for slot in held})
    got, wanted = (feed(each, {0: [1], 2: [2]}, "decode") for each in (slots, plain))
    for slot in (0, 2):
        torch.testing.assert_close(got[slot], wanted[slot], atol=2e-3, rtol=2e-3)
    got, wanted = (feed(each, {1: [3]}, "decode") for each in (slots, plain))
    torch.testing.assert_close(got[1], wanted[1], atol=2e-3, rtol=2e-3)
