"""What fits: the largest contexts; and when a memory plan does not, the error, which names the nearest settings that do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pocketllm.cache.formats import KV_FORMATS
from pocketllm.engine.memory_plan import MemoryPlan, Planner, gib
from pocketllm.errors import MemoryPlanError, PocketLLMError
from pocketllm.models.config import ModelConfig
from pocketllm.options import CHUNK_ALIGNMENT, EngineOptions
from pocketllm.weights.reader import Storage

_RANKS = (2, 4, 8)  # of one machine
TABLE_SLOTS = (1, 2, 4, 8, 16, 32)


def context_table(
    config: ModelConfig,
    options: EngineOptions,
    device_memory: int,
    device_type: str = "cpu",
    storage: Storage | None = None,
) -> dict[str, dict[int, int]]:
    """Largest context per slot for each KV format and number of slots in TABLE_SLOTS (0: does not fit)."""
    open_context = dataclasses.replace(options, max_context=None)
    planner = Planner(config, open_context, device_memory, device_type, storage)
    return {
        name: {slots: planner.largest_context(slots, fmt) for slots in TABLE_SLOTS} for name, fmt in KV_FORMATS.items()
    }


def check_fits(
    plan: MemoryPlan,
    config: ModelConfig,
    options: EngineOptions,
    device_type: str = "cpu",
    storage: Storage | None = None,
) -> None:
    """MemoryPlanError naming the nearest settings that fit, if the plan of these options does not."""
    if plan.fits:
        return
    assert plan.budget is not None
    planner = Planner(config, options, plan.budget, device_type, storage)
    advice = list(_same_weights(planner, plan)) or list(_other_weights(planner, plan, storage))
    too_much = "The weights alone do" if plan.weights > plan.budget else "What every engine needs beside its slots does"
    raise MemoryPlanError(
        f"{plan.kv.num_slots} slots of {plan.max_context} tokens as {plan.kv.kv_format.name} need {gib(plan.total)} "
        f"({gib(plan.weights)} of it weights), {gib(plan.budget)} are available. "
        + ("What fits: " + "; ".join(advice) if advice else f"{too_much} not fit: use a smaller model, or more memory")
    )


def _same_weights(planner: Planner, plan: MemoryPlan) -> Iterator[str]:
    """Changes of context (or of a pool whose size was given), slots and KV type, one at a time; all three and the chunk only
    if none is enough."""
    slots, context, fmt = plan.kv.num_slots, plan.max_context, plan.kv.kv_format
    found = False
    pages = planner.pages_that_fit(slots, plan.kv.max_pages, fmt)
    if planner.options.kv_tokens is not None and pages >= max(slots, plan.kv.max_pages):
        found = True
        yield f"kv_tokens={pages * plan.kv.page_size} with the same slots, context and KV type"
    elif fitting := planner.largest_context(slots, fmt):
        found = True
        yield f"max_context={fitting}{_pool(planner, slots * fitting)} with the same slots and KV type"
    if fewer := _most_slots(planner, slots - 1, context):
        found = True
        yield f"max_batch_size={fewer} with the same context and KV type"
    size = fmt.bytes_per_token(plan.kv.head_dim)
    smaller = sorted(KV_FORMATS.values(), key=lambda other: -other.bytes_per_token(plan.kv.head_dim))
    smaller = [other for other in smaller if other.bytes_per_token(plan.kv.head_dim) < size]
    for other in smaller:
        if planner.with_options(kv_cache_dtype=other.name, max_context=context).choose().fits:
            found = True
            yield f"kv_cache_dtype={other.name} with the same slots and context"
            break
    chosen = planner.options.prefill_chunk
    for chunk in () if found else (chosen, CHUNK_ALIGNMENT):
        for other in (fmt, *smaller):
            if fitting := planner.with_options(prefill_chunk=chunk).largest_context(1, other):
                kv = f" kv_cache_dtype={other.name}" if other is not fmt else ""
                shorter = f" prefill_chunk={chunk}" if chunk != chosen else ""
                yield f"max_batch_size=1 max_context={fitting}{_pool(planner, fitting)}{kv}{shorter}"
                return


def _pool(planner: Planner, tokens: int) -> str:
    """What else to set for a smaller context: a pool whose size was given does not shrink with it."""
    return "" if planner.options.kv_tokens is None else f" kv_tokens={tokens}"


def _most_slots(planner: Planner, most: int, context: int) -> int:
    """The largest number of slots of this context up to `most` that fits; 0: none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if planner.with_options(max_batch_size=middle, max_context=context).choose().fits:
            low = middle
        else:
            high = middle - 1
    return low


def _other_weights(planner: Planner, plan: MemoryPlan, storage: Storage | None) -> Iterator[str]:
    """Smaller weights on a device: more GPUs, or another storage; with a smaller context if it must be."""
    options = planner.options
    ranks = [n for n in _RANKS if n > options.tensor_parallel] if planner.device_type == "cuda" else []
    for values in ([{"tensor_parallel": n} for n in ranks], [{"quantization": name} for name in ("w8", "w4")]):
        for change in values:
            try:
                changed = dataclasses.replace(options, **change)
                other = Planner(planner.config, changed, planner.budget, planner.device_type, storage)
            except PocketLLMError:  # this model can't be cut or stored so
                continue
            setting = "".join(f"{name}={value}" for name, value in change.items())
            if other.with_options(max_context=plan.max_context).choose().fits:
                yield f"{setting} with the same slots, context and KV type"
                break
            if context := other.largest_context(plan.kv.num_slots, plan.kv.kv_format):
                pool = _pool(other, plan.kv.num_slots * context)
                yield f"{setting} max_context={context}{pool} with the same slots and KV type"
                break
