"""What an engine is doing now, read between two of its steps."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pocketllm.engine.device import used_memory
from pocketllm.engine.engine import Engine
from pocketllm.engine.request import EngineStats


@dataclass(frozen=True)
class SlotState:
    """use: free, acquired, queued, running or verifying; state: of its request, prefill or decode."""

    id: int
    use: str
    tokens: int  # in its cache
    request_id: str | None = None
    state: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    max_tokens: int | None = None


@dataclass(frozen=True)
class MemoryState:
    """Bytes of one rank. planned: by part; budget: what the engine may take; used: see `used_memory`."""

    device: str
    planned: dict[str, int]
    total: int
    budget: int | None
    used: int | None


@dataclass(frozen=True)
class EngineState:
    """pages: those that hold tokens, out of all; snapshots: of recurrent state, how many can be kept."""

    slots: tuple[SlotState, ...]
    stats: EngineStats
    max_context: int
    kv_tokens: int
    page_size: int
    pages_used: int
    pages_total: int
    snapshots: int
    memory: MemoryState

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_state(engine: Engine) -> EngineState:
    """For `AsyncEngine.call`: the engine's thread must run it."""
    plan, shape, table = engine.plan, engine.plan.kv, engine.slots
    slots = tuple(_slot(engine, slot) for slot in range(table.num_slots))
    return EngineState(
        slots=slots,
        stats=engine.stats,
        max_context=table.max_context,
        kv_tokens=plan.kv_tokens,
        page_size=shape.page_size,
        pages_used=sum(-(-slot.tokens // shape.page_size) for slot in slots),
        pages_total=shape.num_pages,
        snapshots=engine.options.num_snapshots,
        memory=MemoryState(str(engine.device), plan.parts, plan.total, plan.budget, used_memory(engine.device)),
    )


def _slot(engine: Engine, slot: int) -> SlotState:
    table, request = engine.slots, engine.scheduler.running.get(slot)
    use, tokens = table.use_of(slot).value, table.kv_lens[slot]
    if request is None:
        return SlotState(slot, use, tokens)
    return SlotState(
        slot,
        use,
        tokens,
        request.request_id,
        request.state.value,
        len(request.prompt_ids),
        len(request.output_ids),
        request.params.max_tokens,
    )
