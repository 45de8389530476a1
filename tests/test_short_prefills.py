"""Short prompts by recorded passes: filled up to one of few sizes, they give each slot what an unrecorded pass gives it.

On a CPU a backend stands in that "records" a pass by keeping its Python function, so that the inputs of a replay, and they
alone, are those of the block; on a GPU it is the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import tiny_models
from engines import CPU_BACKENDS, prompt
from pocketllm import Engine, EngineOptions, SamplingParams, SlotEngine, SlotRequest
from pocketllm.engine.memory_plan import plan_memory
from pocketllm.kernels import select_kernels
from pocketllm.kernels.protocol import Kernels
from pocketllm.models.registry import read_model

GPU = torch.cuda.is_available()
KINDS = ["qwen2", "qwen3_5", "qwen3_5_moe"]
# Lengths of the items of one pass after the other; each slot goes on where it was.
PASSES = [[1], [5], [16], [17], [3, 9], [64], [1, 2, 30, 7], [65], [9, 1, 1, 1, 2], [40, 24], [12]]


class Recorder:
    """A backend whose recordings are the functions themselves."""

    captures = True

    def __init__(self, kernels: Kernels, sizes: tuple[int, ...]) -> None:
        self._kernels, self.short_prefills = kernels, sizes
        self.recorded = self.replayed = 0

    def capture(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        self.recorded += 1

        def replay() -> Tensor:
            self.replayed += 1
            return run()

        return run(), replay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


def engine(kind: str, tmp_path: Path, kernels: str, sizes: tuple[int, ...] | None, **options: Any) -> SlotEngine:
    """sizes: those of recorded prefills; None: no pass is recorded."""
    small = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    folder, _ = tiny_models.make(kind, tmp_path, **(small if tiny_models.is_hybrid(kind) else {"num_hidden_layers": 2}))
    backend = cast(Kernels, Recorder(select_kernels(kernels, "cpu"), sizes)) if sizes is not None else None
    values = {"max_batch_size": 5, "max_context": 256, "page_size": 16, "device": "cpu", "dtype": "float32", **options}
    return SlotEngine(folder, backend=backend, kernels=kernels, **values)


def run(slots: SlotEngine, passes: list[list[int]]) -> list[Tensor]:
    """The logits of each pass, and of a decode pass of all slots at the end."""
    held = [slots.acquire_slot() for _ in range(max(map(len, passes)))]
    found = []
    for i, lengths in enumerate(passes):
        requests = [SlotRequest(slot, prompt(n, seed=50 * i + slot)) for slot, n in zip(held, lengths, strict=False)]
        results = slots.batch_prefill(requests)
        assert all(result.error is None for result in results)
        found.append(torch.stack([result.logits for result in results if result.logits is not None]))
    results = slots.batch_decode([SlotRequest(slot, [7]) for slot in held])
    found.append(torch.stack([result.logits for result in results if result.logits is not None]))
    return found


@pytest.mark.parametrize("kernels", CPU_BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_prompts_give_what_unrecorded_ones_give(kind: str, kernels: str, tmp_path: Path) -> None:
    recorded = engine(kind, tmp_path, kernels, (16, 32, 64))
    recorder: Any = recorded.runner._kernels  # type: ignore[union-attr]
    recorder.replayed = 0  # some backends warm up
    for got, wanted in zip(run(recorded, PASSES), run(engine(kind, tmp_path, kernels, None), PASSES), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
    short = [lengths for lengths in PASSES if sum(lengths) <= 64 and len(lengths) <= 4]
    assert recorder.replayed == len(short) + 1  # and the decode pass


def test_recorded_prompts_in_the_interpreter(tmp_path: Path) -> None:
    """Kernels of the GPU backend with items of no token among a pass's."""
    pytest.importorskip("triton")
    if GPU:
        pytest.skip("on a GPU the test below runs them")
    passes = [[5], [16], [3, 4]]
    recorded, plain = (engine("qwen3_5", tmp_path, "triton", sizes) for sizes in ((16,), None))
    for got, wanted in zip(run(recorded, passes), run(plain, passes), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8_per_token_head", "turboquant_k8v4"])
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_prompts_on_a_gpu(kind: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cuda", "kv_cache_dtype": kv_cache_dtype}
    recorded, plain = (engine(kind, tmp_path, "triton", None, **options) for _ in range(2))
    assert recorded.runner._prefills._graphs  # type: ignore[union-attr]
    before = len(recorded.runner._prefills._graphs)  # type: ignore[union-attr]
    plain.runner._prefills._sizes.clear()  # type: ignore[union-attr]
    for got, wanted in zip(run(recorded, PASSES), run(plain, PASSES), strict=True):
        torch.testing.assert_close(got, wanted, atol=5e-3, rtol=5e-3)
    assert len(recorded.runner._prefills._graphs) == before  # type: ignore[union-attr]


def test_a_request_waits_for_no_recording(tmp_path: Path) -> None:
    """And sizes beyond a pass's, or a slot's, are not recorded."""
    for most, options in ((32, {"prefill_chunk": 64, "max_context": 48}), (64, {"prefill_chunk": 64})):
        slots = engine("qwen2", tmp_path, "reference", (16, 32, 64, 128), **options)
        recorder: Any = slots.runner._kernels  # type: ignore[union-attr]
        prefills: Any = slots.runner._prefills  # type: ignore[union-attr]
        prefills.record_all()
        before = recorder.recorded
        assert max(layout.num_tokens for layout in prefills._graphs) == most
        slot = slots.acquire_slot()
        for length in (1, 16, 20):
            assert slots.batch_prefill([SlotRequest(slot, prompt(length))])[0].error is None
        assert recorder.recorded == before


def test_chunks_without_logits_move_the_slot_on(tmp_path: Path) -> None:
    """A prompt of two chunks, the second of which alone has logits; beside it a short one."""
    outputs = []
    folder, _ = tiny_models.make("qwen3_5", tmp_path)
    for recorder in (Recorder(select_kernels("reference", "cpu"), (64, 128)), None):
        options = EngineOptions(max_batch_size=2, max_context=256, kernels="reference", prefill_chunk=64, device="cpu")
        running = Engine(folder, options, backend=cast(Any, recorder))
        names = [running.add_request(prompt(n), SamplingParams(max_tokens=20)) for n in (100, 9)]
        found: dict[str, list[int]] = {name: [] for name in names}
        for _ in range(6):
            for output in running.step():
                assert output.error is None
                found[output.request_id] += output.new_token_ids
        outputs.append(found)
        if recorder is not None:
            assert recorder.replayed > 3
    assert outputs[0] == outputs[1]
    assert all(outputs[0].values())


def test_what_they_keep_is_in_a_gpus_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the intermediates of the longest one, and no more than that if chunks are shorter."""
    checkpoint, kernels = read_model("qwen3-8b", "dummy"), select_kernels("triton", "cuda")
    monkeypatch.setattr(kernels, "captures", True)  # as on a GPU

    def graphs(chunk: int) -> int:
        options = EngineOptions(max_batch_size=1, max_context=4096, prefill_chunk=chunk, load_format="dummy")
        return plan_memory(checkpoint.config, options, None, "cuda", checkpoint.storage).graphs

    sizes, config = kernels.short_prefills, checkpoint.config
    assert graphs(64) < graphs(2048) == graphs(sizes[-1])
    assert graphs(2048) > sizes[-1] * (3 * config.intermediate_size + config.hidden_size) * 2
