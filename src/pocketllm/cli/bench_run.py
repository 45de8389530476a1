"""What `pocketllm bench` measures, and how it counts the bytes of a step."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch

from pocketllm.cli.bench_families import KernelRun, can_record, families_ms, record_kernels
from pocketllm.engine.device import forget_peak, peak_memory, pick_device
from pocketllm.engine.engine import Engine
from pocketllm.engine.request import RequestOutput
from pocketllm.engine.slot_engine import SlotRequest
from pocketllm.errors import OptionError
from pocketllm.kernels import select_kernels
from pocketllm.models.moe import SparseMoE
from pocketllm.models.registry import read_model
from pocketllm.options import EngineOptions, SamplingParams

_WARM_UP = 3  # steps before the clock starts: compilation, first touches
_RECORDED = 4  # steps after those on the clock, whose kernels are recorded
_FILL_SECONDS = 10.0  # a context that takes longer to compute is filled with random values, if fill is auto
_PROBE_BYTES = 256 << 20  # well beyond any cache
_COPIES = 8  # that are timed together


@dataclass(frozen=True)
class Row:
    slots: int
    context: int  # tokens in each slot before the first measured step
    kv: str
    filled: str  # prefill: the context was computed; random: its cache holds random values
    step_ms: float  # median
    tok_s: float  # all slots together
    prefill_tok_s: float
    bytes_per_step: int
    share_of_bandwidth: float
    gb_s: float  # bytes_per_step over step_ms
    memory_planned: int  # bytes of one rank, without those of the device's libraries
    memory_used: int | None  # bytes of rank 0 at most, see `engine.device.peak_memory`
    families_ms: dict[str, float] | None  # of rank 0; None where kernels can't be recorded, see `bench_families`


class Bench:
    def __init__(self, model: str | None, options: EngineOptions, *, steps: int, prompt: int, fill: str) -> None:
        """fill: auto, prefill or random, see `Row.filled`."""
        self._checkpoint = read_model(model, options.load_format)
        self._options, self._steps, self._prompt, self._fill = options, steps, prompt, fill
        self._device = pick_device(options.device)
        self._kernels = select_kernels(options.kernels, self._device.type)
        self._recorded = _RECORDED if can_record(self._kernels, self._device) else 0
        self._bandwidth = read_bandwidth(self._device, options.num_threads())

    def facts(self) -> dict[str, Any]:
        return {
            "model": self._checkpoint.name,
            "kernels": self._kernels.name,
            "device": str(self._device),
            "threads": self._options.num_threads(),
            "tensor_parallel": self._options.tensor_parallel,
            "bandwidth": self._bandwidth,
            "steps": self._steps,
            "prompt": self._prompt,
            "prefill_chunk": self._options.chunk_tokens(self._device.type),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def row(self, slots: int, context: int, kv_cache_dtype: str) -> Row:
        """Builds an engine of just this size and measures it. OptionError if the model can't hold so many tokens."""
        limit = self._checkpoint.config.max_position_embeddings
        needed_context = context_needed(context, self._steps, self._recorded)
        for flag, tokens, needed in (
            ("--context", context, needed_context),
            ("--prompt", self._prompt, self._prompt + 1),
        ):
            if needed > limit:
                raise OptionError(
                    f"{flag} {tokens}: with {needed - tokens} to generate that passes this model's limit of {limit} tokens: "
                    f"use {flag} <= {limit - (needed - tokens)}"
                )
        options = replace(
            self._options,
            max_batch_size=slots,
            max_context=max(needed_context, self._prompt + 1),
            kv_cache_dtype=kv_cache_dtype,
        )
        forget_peak(self._device)
        engine = Engine(self._checkpoint, options)
        try:
            return self._measure(engine, context)
        finally:
            engine.close()
            del engine
            gc.collect()  # the next row's plan counts on this memory

    def _measure(self, engine: Engine, context: int) -> Row:
        chunk = engine.options.chunk_tokens(engine.device.type)
        # Warms up, as libraries choose by size: a first chunk, and one that follows.
        timed_prefill(engine, random_tokens(engine, min(self._prompt, 2 * chunk), 1))
        prefill_tok_s = self._prompt / timed_prefill(engine, random_tokens(engine, self._prompt, 0))
        slots = engine.plan.kv.num_slots
        filled = choose_fill(self._fill, slots * context / prefill_tok_s)
        prompts = [random_tokens(engine, context + 1, slot) for slot in range(slots)]
        decode = timed_decode(engine, prompts, self._steps, filled, self._recorded)
        seconds = statistics.median(decode.step_seconds)
        read = bytes_per_step(engine, decode.context)
        return Row(
            slots=slots,
            context=context,
            kv=engine.plan.kv.kv_format.name,
            filled=filled,
            step_ms=round(seconds * 1e3, 4),
            tok_s=round(slots / seconds, 2),
            prefill_tok_s=round(prefill_tok_s, 2),
            bytes_per_step=read,
            share_of_bandwidth=round(read / seconds / self._bandwidth, 4),
            gb_s=round(read / seconds / 1e9, 1),
            memory_planned=engine.plan.total - engine.plan.runtime,
            memory_used=peak_memory(engine.device),
            families_ms=families_ms(decode.kernels, self._recorded),
        )


@dataclass(frozen=True)
class Decode:
    """What `timed_decode` saw."""

    step_seconds: list[float]
    context: float  # tokens each slot saw, on average over the steps
    tokens: list[list[int]]  # of each slot: all its generated tokens, those of steps off the clock included
    kernels: list[KernelRun] = field(default_factory=list)  # of the recorded steps


def context_needed(context: int, steps: int, recorded: int = 0) -> int:
    """Tokens a slot must have room for, to be decoded by `timed_decode` after `context` + 1 of its own."""
    return context + 1 + _generated(steps + recorded)


def _generated(steps: int) -> int:
    return 1 + _WARM_UP + steps + 1  # one more than these steps make: no request ends in them


def choose_fill(fill: str, prefill_seconds: float) -> str:
    """prefill or random for `fill` (auto, too), where computing the contexts would take so long."""
    return ("random" if prefill_seconds > _FILL_SECONDS else "prefill") if fill == "auto" else fill


def timed_decode(engine: Engine, prompts: list[list[int]], steps: int, filled: str, recorded: int = 0) -> Decode:
    """Times `steps` greedy decode steps (sampling included) of as many slots as prompts, all of one length.

    recorded: so many more steps, off the clock, whose kernels are recorded (on a GPU, see `can_record`).
    filled: prefill or random, how all but a prompt's last token get into the cache. The engine must be idle, and is so
    again afterwards. Raises the error of any request.
    """
    params = SamplingParams(max_tokens=_generated(steps + recorded), ignore_eos=True)
    held = [engine.acquire_slot(context_needed(len(prompt) - 1, steps, recorded)) for prompt in prompts]
    contexts = {slot: prompt[:-1] for slot, prompt in zip(held, prompts, strict=True)}
    (fill_by_prefill if filled == "prefill" else fill_randomly)(engine, contexts)
    requests = [engine.add_request(prompt, params, slot=slot) for slot, prompt in zip(held, prompts, strict=True)]
    tokens: dict[str, list[int]] = {request: [] for request in requests}

    def step() -> float:
        seconds, outputs = _timed_step(engine)
        for output in outputs:
            tokens[output.request_id] += output.new_token_ids
        return seconds

    # The first step computes each prompt's last token, the rest decode.
    times = [step() for _ in range(1 + _WARM_UP + steps)]
    kernels = record_kernels(step, recorded, engine.device) if recorded else []
    for request, slot in zip(requests, held, strict=True):
        engine.end_request(request)
        engine.release_slot(slot)
    start = len(prompts[0]) + _WARM_UP
    return Decode(times[1 + _WARM_UP :], start + (steps + 1) / 2, list(tokens.values()), kernels)


def timed_prefill(engine: Engine, prompt: list[int]) -> float:
    """Seconds from a prompt to its first new token."""
    engine.add_request(prompt, SamplingParams(max_tokens=1))
    seconds = 0.0
    while engine.has_work:
        seconds += _timed_step(engine)[0]
    return seconds


def _timed_step(engine: Engine) -> tuple[float, list[RequestOutput]]:
    """A step ends when its tokens are on the host. (A GPU may be at work on the next one then: see `engine.ahead`.)"""
    start = time.perf_counter()
    outputs = engine.step()
    seconds = time.perf_counter() - start
    for output in outputs:
        if output.error is not None:
            raise output.error
    return seconds, outputs


def random_tokens(engine: Engine, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, engine.config.vocab_size, (count,), generator=generator).tolist()
    return ids


def fill_by_prefill(engine: Engine, tokens: dict[int, list[int]]) -> None:
    """Compute each acquired slot's tokens, in chunks as the scheduler would."""
    chunk = engine.options.chunk_tokens(engine.device.type)
    for slot, ids in tokens.items():
        for start in range(0, len(ids), chunk):
            (result,) = engine.batch_prefill([SlotRequest(slot, ids[start : start + chunk])])
            if result.error is not None:
                raise result.error


def fill_randomly(engine: Engine, tokens: dict[int, list[int]]) -> None:
    """Make acquired slots hold these tokens without computing them: their K, V and state are random values.

    Every page is really written (memory that never was is not read from the memory chips), and the time of a step does
    not depend on the values.
    """
    for slot, ids in tokens.items():
        engine.slots.prepare_write(slot, len(ids))
    engine.runner.apply(*engine.slots.take_changes())
    shape, generator = engine.plan.kv, torch.Generator().manual_seed(0)
    rows = torch.randn(2, shape.page_size, shape.num_kv_heads, shape.head_dim, generator=generator).to(engine.device)
    page = shape.kv_format.encode(rows[0], rows[1])
    for kv in engine.runner.kv.layers:
        for plane, values in zip(kv.planes, page, strict=True):
            plane.copy_(values)
    for state in engine.runner.state.layers:
        state.conv.normal_(std=0.1)
        state.recurrent.normal_(std=0.1)
    for slot, ids in tokens.items():
        engine.slots.kv_lens[slot] = len(ids)
        engine.slots.token_ids[slot] = list(ids)


def bytes_per_step(engine: Engine, context: float, slots: int | None = None) -> int:
    """Bytes that a decode step of `slots` (None: all) reads (recurrent state: also writes), `context` tokens in each."""
    plan, options, model = engine.plan, engine.options, engine.runner.model
    slots, vocabulary = slots or plan.kv.num_slots, model.vocabulary
    weights = plan.weights
    if not engine.config.tie_word_embeddings:
        weights -= vocabulary.table.nbytes
    weights += slots * vocabulary.table.nbytes // vocabulary.table.shape[0]
    for block in model.blocks:
        if isinstance(block.feed_forward, SparseMoE) and engine.config.moe is not None:
            experts = [*zip(block.feed_forward.gate_up, block.feed_forward.down, strict=True)]
            idle = max(len(experts) - slots * engine.config.moe.top_k, 0)
            weights -= idle * sum(weight.nbytes for weight in experts[0])
    if options.attention_window:
        context = min(context, options.attention_window + options.attention_sinks)
    kv = slots * context * plan.kv.page_nbytes / plan.kv.page_size
    conv, recurrent = plan.state.layer_specs()[:2]  # each with a spare slot's row
    state = plan.state.num_layers * (conv.nbytes + recurrent.nbytes) * slots / (plan.kv.num_slots + 1)
    return round(weights + kv + 2 * state)


def read_bandwidth(device: torch.device, threads: int) -> float:
    """Bytes per second: of a sum over a large tensor on a CPU, with so many threads; of copies on a GPU."""
    source = torch.ones(_PROBE_BYTES // 4, device=device)
    if device.type == "cuda":
        return _copy_bandwidth(source)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        source.sum()
        best = min(best, time.perf_counter() - start)
    torch.set_num_threads(threads_before)
    return _PROBE_BYTES / best


def _copy_bandwidth(source: torch.Tensor) -> float:
    """Reading and writing counted, by the device's clock: the host takes a tenth of the time of one copy."""
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        start.record()
        for _ in range(_COPIES):
            target.copy_(source)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e-3 / _COPIES)
    return 2 * source.nbytes / best
