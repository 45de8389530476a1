"""PocketLLM: Qwen inference for several long conversations at once.

    from pocketllm import LLM, SamplingParams

    llm = LLM()  # the embedded model; or a folder, a GGUF file, a hub id
    for answer in llm.generate(["The sea is", "Two and two are"], SamplingParams(max_tokens=16)):
        print(answer.text)

The public names are loaded when first used, so that a light part (options, text) does not wait for the heavy ones.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pocketllm.engine.async_engine import AsyncEngine
    from pocketllm.engine.engine import Engine
    from pocketllm.engine.memory_plan import MemoryPlan, plan_memory
    from pocketllm.engine.slot_engine import SlotEngine, SlotRequest, SlotResult
    from pocketllm.errors import PocketLLMError
    from pocketllm.llm import LLM, Generation
    from pocketllm.options import EngineOptions, SamplingParams

_HOME = {
    "AsyncEngine": "engine.async_engine",
    "Engine": "engine.engine",
    "MemoryPlan": "engine.memory_plan",
    "plan_memory": "engine.memory_plan",
    "SlotEngine": "engine.slot_engine",
    "SlotRequest": "engine.slot_engine",
    "SlotResult": "engine.slot_engine",
    "PocketLLMError": "errors",
    "LLM": "llm",
    "Generation": "llm",
    "EngineOptions": "options",
    "SamplingParams": "options",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "Engine",
    "EngineOptions",
    "Generation",
    "MemoryPlan",
    "PocketLLMError",
    "SamplingParams",
    "SlotEngine",
    "SlotRequest",
    "SlotResult",
    "plan_memory",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pocketllm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
