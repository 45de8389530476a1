"""Tensor parallelism: N ranks compute what one does, for every model kind, KV type, weight format and pass.

The ranks are threads here (`ranks.ThreadRanks`); processes and gloo are in `test_tensor_parallel_processes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from engines import drain, feed, prompt, tokens_of
from pocketllm import Engine, EngineOptions, SamplingParams, SlotEngine, SlotRequest
from pocketllm.engine.memory_plan import plan_memory
from pocketllm.errors import OptionError, RankError
from pocketllm.models.registry import config_from_shape
from pocketllm.parallel import Part, TensorParallel, blocks
from pocketllm.weights.formats import FORMATS, StoredFormat, encode
from pocketllm.weights.shards import check_cut, cut
from ranks import ThreadRanks
from test_memory import tensors_below

GIB = 1 << 30
SIZES = {"max_batch_size": 4, "max_context": 256, "page_size": 16, "kernels": "reference", "threads": 1}

# The sum of two halves is rounded once more than the whole; a quantised cache can turn that into another code.
TOLERANCE = {
    "fp32": 1e-4,
    "fp16": 4e-3,
    "bf16": 2e-2,
    "fp8": 0.08,
    "int8_per_token_head": 0.02,
    "turboquant_k8v4": 0.15,
}

FOUR_RANKS = {  # what the tiny hybrid models need for four ranks
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "num_attention_heads": 4,
}


def every_pass(engine: SlotEngine) -> list[Tensor]:
    """Logits of prompts, decodes, a verify and what follows it, a fork, and a snapshot."""
    got: list[Tensor] = []

    def run(requests: dict[int, list[int]], kind: str = "prefill") -> None:
        got.extend(feed(engine, requests, kind).values())

    a, b = engine.acquire_slot(100), engine.acquire_slot(100)
    run({a: prompt(70, 1), b: prompt(9, 2)})
    run({a: [3], b: [4]}, "decode")
    run({a: [5, 6, 7], b: [8, 9, 10]}, "verify")
    engine.commit([a, b], [2, 0])
    run({b: [11]}, "decode")
    child = engine.fork_slot(a, 100)
    run({child: prompt(20, 3)})
    snapshot = engine.save_snapshot(child, 1)
    run({a: [12], child: [13]}, "decode")
    engine.restore_snapshot(snapshot)
    run({child: [13]}, "decode")
    engine.release_slot(b)
    b = engine.acquire_slot(100)  # the slot's old state must be gone on every rank
    run({b: prompt(30, 4)})
    for slot in (a, b, child):
        engine.release_slot(slot)
    return got


def greedy(engine: Engine) -> list[list[int]]:
    names = [engine.add_request(prompt(n, n), SamplingParams(max_tokens=8, ignore_eos=True)) for n in (5, 40, 130)]
    outputs = drain(engine)
    assert all(output.error is None for name in names for output in outputs[name])
    return [tokens_of(outputs[name]) for name in names]


def build(model: Path, size: int, **options: Any) -> Engine:
    settings = {**SIZES, "max_draft_tokens": 3, "num_snapshots": 2, **options}
    return Engine(model, tensor_parallel=size, launch=ThreadRanks, **settings)


def check_same(model: Path, size: int, **options: Any) -> None:
    """Logits of every pass within the tolerance, and greedy tokens identical."""
    one, many = build(model, 1, **options), build(model, size, **options)
    try:
        for got, want in zip(every_pass(many), every_pass(one), strict=True):
            torch.testing.assert_close(got, want, atol=TOLERANCE[one.plan.kv.kv_format.name], rtol=0)
        if one.plan.kv.kv_format.name == "fp32":
            assert greedy(many) == greedy(one)
    finally:
        many.close()


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_two_ranks_equal_one(kind: str, tmp_path: Path) -> None:
    check_same(tiny_models.make(kind, tmp_path)[0], 2)


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_four_ranks_equal_one(kind: str, tmp_path: Path) -> None:
    """Two KV heads on four ranks: each is held twice."""
    overrides = FOUR_RANKS if tiny_models.is_hybrid(kind) else {}
    check_same(tiny_models.make(kind, tmp_path, **overrides)[0], 4)


@pytest.mark.parametrize("kv", [name for name in TOLERANCE if name != "fp32"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_5"])
def test_every_kv_type_is_sharded_by_heads(kind: str, kv: str, tmp_path: Path) -> None:
    """qwen2 has a bias on K, which quantised formats leave to attention; qwen3_5 has gates and recurrent state."""
    check_same(tiny_models.make(kind, tmp_path)[0], 2, kv_cache_dtype=kv, kv_layout="slots")


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "Q4_1", "Q5_0"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_stored_formats_are_cut_not_decoded(kind: str, type: str, tmp_path: Path) -> None:
    check_same(tiny_models.make_gguf(kind, tmp_path, type=type)[0], 2)


@pytest.mark.parametrize("quantization", ["none", "bf16", "w8", "w4"])
def test_reencoded_weights_are_cut_first(quantization: str, tmp_path: Path) -> None:
    """A shard re-encoded is the shard of the whole re-encoded: groups lie inside shards."""
    check_same(tiny_models.make("qwen3_5_moe", tmp_path, moe_intermediate_size=64,
                                shared_expert_intermediate_size=64, linear_key_head_dim=32,
                                linear_value_head_dim=32)[0], 2, quantization=quantization)  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_fp8_blocks(kind: str, tmp_path: Path) -> None:
    sizes = {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 512,
             "moe_intermediate_size": 256}  # fmt: skip
    check_same(tiny_models.make_fp8(kind, tmp_path, **sizes)[0], 2)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("storage", ["w8", "fp8"])
def test_quantised_embeddings(storage: str, tied: bool, tmp_path: Path) -> None:
    model = tiny_models.make("qwen3", tmp_path, hidden_size=128, tie_word_embeddings=tied)[0]
    check_same(model, 2, quantize_embeddings=storage)
    source = build(model, 1, quantize_embeddings=storage).runner.model.vocabulary
    assert {source.table.format.name, source.head.format.name} == {{"w8": "w8", "fp8": "fp8_block"}[storage]}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_next"])
def test_biases_and_tied_heads(kind: str, tmp_path: Path) -> None:
    """A bias of the output projection is added once, not by every rank."""
    overrides: dict[str, Any] = {"tie_word_embeddings": True}
    check_same(tiny_models.make(kind, tmp_path, **overrides)[0], 2)
    biased = {"attention_bias": True, "mlp_bias": True}
    check_same(tiny_models.make("llama", tmp_path, **biased)[0], 2)


def test_every_prompt_token_has_its_logits(tmp_path: Path) -> None:
    model = tiny_models.make("qwen3", tmp_path)[0]
    rows = []
    for size in (1, 2):
        engine = build(model, size)
        slot = engine.acquire_slot()
        (result,) = engine.batch_prefill([SlotRequest(slot, prompt(20))], all_logits=True)
        assert result.logits is not None
        rows.append(result.logits)
        engine.close()
    assert rows[0].shape == (20, 512)
    torch.testing.assert_close(rows[1], rows[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [2, 4])
def test_a_slot_in_a_batch_equals_the_slot_alone(size: int, tmp_path: Path) -> None:
    """Promise 1 on several ranks: bit for bit."""
    engine = build(tiny_models.make("qwen3_5", tmp_path, **FOUR_RANKS)[0], size)
    sequences = [prompt(length, seed) for seed, length in enumerate((70, 9, 33))]
    alone = []
    for ids in sequences:
        slot = engine.acquire_slot(100)
        feed(engine, {slot: ids[:-1]})
        alone.append(feed(engine, {slot: ids[-1:]}, "decode")[slot])
        engine.release_slot(slot)
    ids_of = {engine.acquire_slot(80): ids for ids in sequences}
    for slot, ids in ids_of.items():
        feed(engine, {slot: ids[:-1]})
    together = feed(engine, {slot: ids[-1:] for slot, ids in ids_of.items()}, "decode")
    for logits, want in zip(together.values(), alone, strict=True):
        assert torch.equal(logits, want)
    engine.close()


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_cut_matrix_decodes_to_the_part(form: StoredFormat) -> None:
    """Several ranges of rows, some of the columns; FP8's last block is not full."""
    n, k = 128 * 5 + 40, 128 * 3
    whole = encode(form, torch.randn(n, k, generator=torch.Generator().manual_seed(0)))
    rows, columns = Part(n, ((128, 256), (512, n))), Part(k, ((128, 256),))
    check_cut("w", form, rows, columns)
    part = cut(whole, rows, columns)
    want = form.decode(whole.tensors).float()
    want = torch.cat([want[128:256, 128:256], want[512:, 128:256]])
    assert part.shape == want.shape
    assert torch.equal(form.decode(part.tensors).float(), want)
    assert [t.shape for t in part.tensors] == [s.shape for s in form.specs(*part.shape)]
    if form.column_block > 1:
        with pytest.raises(ValueError, match=f"groups of {form.column_block}"):
            check_cut("w", form, rows, Part(k, ((0, form.column_block // 2),)))


def test_parts_of_heads_and_blocks() -> None:
    """Rank 1 of 2: the second half of each block; with more ranks than heads, a head is on several."""
    tp = TensorParallel(1, 2)
    heads = tp.shard(4, "heads")
    assert heads.times(8).ranges == ((16, 32),)
    assert blocks(heads, heads.times(2)).ranges == ((2, 4), (8, 12))
    held = [TensorParallel(rank, 8).replicate_or_shard(2, "heads").ranges for rank in range(8)]
    assert held == [((0, 1),)] * 4 + [((1, 2),)] * 4
    assert blocks(Part.of(3), Part.of(5)).is_whole
    assert torch.equal(blocks(heads, heads).take(torch.arange(8)), torch.tensor([2, 3, 6, 7]))


# -- the plan ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "qwen3_5"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_allocates_what_the_plan_says(kind: str, size: int, tmp_path: Path) -> None:
    overrides = FOUR_RANKS if tiny_models.is_hybrid(kind) else {}
    engine = build(tiny_models.make(kind, tmp_path, **overrides)[0], size, kv_cache_dtype="int8_per_token_head")
    plan, runner = engine.plan, engine.runner
    assert runner.kv.nbytes == plan.kv.nbytes
    assert runner.state.nbytes == plan.state.nbytes
    weights = sum(t.untyped_storage().nbytes() for t in distinct_tensors(runner.model))
    assert weights == plan.weights + plan.tables
    engine.close()


def distinct_tensors(root: object) -> Iterator[Tensor]:
    """Every tensor of a model, each storage once."""
    yield from tensors_below(root).values()


def test_weights_of_all_ranks_are_the_model() -> None:
    """The 27B: everything large is sharded; norms, routers and small vectors are on every rank."""
    config = config_from_shape("qwen3.8-27b-fp8")

    def weights(size: int) -> int:
        return plan_memory(config, EngineOptions(tensor_parallel=size), None, "cuda").weights

    whole = weights(1)
    for size in (2, 4, 8):
        assert whole <= size * weights(size) < 1.02 * whole


def test_eight_sessions_of_64k_on_two_22_gib_cards() -> None:
    """The 27B in FP8, its embeddings and head in 8 bits too, and a K8V4 cache."""
    config = config_from_shape("qwen3.8-27b-fp8")
    options = EngineOptions(
        max_batch_size=8, max_context=65536, kv_layout="slots", kv_cache_dtype="turboquant_k8v4", tensor_parallel=2
    )
    plain = plan_memory(config, options, 22 * GIB, "cuda")
    table = config.vocab_size // 2 * config.hidden_size  # elements a rank has, of the embedding and of the head each
    for storage, size in (("w8", table + table // 32 * 2), ("fp8", table + table // 128**2 * 4)):
        small = plan_memory(config, replace(options, quantize_embeddings=storage), 22 * GIB, "cuda")
        assert plain.weights - small.weights == 2 * (2 * table - size)
        assert small.fits


def test_shapes_that_cannot_be_sharded_name_those_that_can(tmp_path: Path) -> None:
    """Nothing is started for them."""

    def never(*_: object) -> Any:
        raise AssertionError("ranks were started")

    folder = tiny_models.make("qwen3", tmp_path)[0]
    with pytest.raises(OptionError, match=r"tensor_parallel = 3: .*over 3 ranks.* This model can use 1, 2, 4$"):
        Engine(folder, tensor_parallel=3, launch=never, **SIZES)
    fp8 = tiny_models.make_fp8("qwen3", tmp_path)[0]  # heads of 32 rows in blocks of 128
    with pytest.raises(OptionError, match=r"fp8_block: shards of 64 of its 128 rows .* groups of 128 .* can use 1$"):
        Engine(fp8, tensor_parallel=2, launch=never, **SIZES)
    hybrid = config_from_shape("qwen3.8-27b-fp8")
    with pytest.raises(OptionError, match=r"This model can use 1, 2, 4, 8$"):
        plan_memory(hybrid, EngineOptions(tensor_parallel=16), None)


def test_the_smallest_budget_is_everyones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks must have equally many pages: the rank with the least memory decides."""
    from pocketllm.engine import rank

    folder = tiny_models.make("qwen3", tmp_path)[0]
    sizes = iter([100 << 20, 50 << 20])
    monkeypatch.setattr(rank, "available_memory", lambda *_: next(sizes))
    engine = build(folder, 2, max_context=None, max_batch_size=8)
    assert engine.plan.budget == 50 << 20
    assert engine.plan.fits
    assert engine.plan.kv_tokens < 8 * 4096
    engine.close()


# -- the protocol ------------------------------------------------------------------------------------------------------


def test_other_ranks_are_told_numbers_only(tmp_path: Path) -> None:
    """A decode of two slots is one short line; a pass without page edits sends nothing but itself."""
    engine = build(tiny_models.make("qwen3", tmp_path)[0], 2)
    a, b = engine.acquire_slot(40), engine.acquire_slot(40)
    feed(engine, {a: [1, 2, 3], b: [4]})
    sent = engine._ranks.sent  # type: ignore[union-attr]
    sent.clear()
    feed(engine, {a: [5], b: [6]}, "decode")
    assert sent == [["forward", "decode", [[a, 3, [5], True], [b, 1, [6], True]], False]]
    engine.close()


def test_an_error_in_a_pass_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are out of step then: no slot is tried alone, and no call waits for an answer that won't come."""
    engine = build(tiny_models.make("qwen3", tmp_path)[0], 2)
    slot = engine.acquire_slot()
    monkeypatch.setattr(engine.runner.local, "forward", lambda *_, **__: 1 / 0)  # type: ignore[union-attr]
    assert engine.failure is None
    for _ in range(2):
        with pytest.raises(RankError, match="rank 0: ZeroDivisionError"):
            feed(engine, {slot: [1]})
    assert engine.failure is not None


def test_what_is_computed_after_a_rank_is_lost_reaches_nobody(tmp_path: Path) -> None:
    """Kernels that wait for a lost rank are let go with numbers that mean nothing."""
    folder, _ = tiny_models.make("qwen3", tmp_path)
    engine = Engine(folder, tensor_parallel=2, launch=ThreadRanks, **SIZES)
    forward = engine.runner.forward

    def lose(*arguments: Any, **named: Any) -> Tensor:
        logits = forward(*arguments, **named)
        engine._ranks.failure = RankError("a rank is gone")
        return logits

    engine.runner.forward = lose
    engine.add_request(prompt(5), SamplingParams(max_tokens=3))
    with pytest.raises(RankError, match="is gone"):
        engine.step()
    slot = engine.acquire_slot(20)
    engine._ranks.failure = None
    with pytest.raises(RankError, match="is gone"):
        engine.batch_prefill([SlotRequest(slot, prompt(5))])
    engine.close()


def test_kernels_of_ones_own_are_for_one_rank(tmp_path: Path) -> None:
    from pocketllm.kernels import reference

    with pytest.raises(OptionError, match="run on one rank"):
        Engine(tiny_models.make("qwen3", tmp_path)[0], tensor_parallel=2, backend=reference, **SIZES)


def test_a_shard_of_dummy_weights_is_the_shard_of_the_whole(tmp_path: Path) -> None:
    check_same(tiny_models.make("qwen3_moe", tmp_path)[0], 2, load_format="dummy")
