"""Prometheus metrics, named as vLLM names its own (`pocketllm:` for `vllm:`), and those of slots, pages and snapshots."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pocketllm.server.generation import Usage
from pocketllm.server.state import EngineState

_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_USES = ("free", "acquired", "queued", "running", "verifying")


class Metrics:
    """One server's metrics: counted as requests go, and read from the engine's state when they are asked for."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(model)
        self._registry.register(self._engine)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            whole = Histogram(f"pocketllm:{name}", text, ("model_name",), buckets=buckets, registry=self._registry)
            return whole.labels(model)

        self._first = histogram("time_to_first_token_seconds", "Seconds from arrival to the first token.", _REQUEST)
        self._between = histogram("inter_token_latency_seconds", "Seconds between two tokens of a request.", _STEP)
        self._whole = histogram("e2e_request_latency_seconds", "Seconds from arrival to the end.", _REQUEST)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output = histogram("request_generation_tokens", "Tokens a request generated.", _TOKENS)
        self._ended = Counter(
            "pocketllm:request_success",
            "Requests that ended, by reason: stop, length, tool_calls, abort (the client left), error.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._reused = Counter(
            "pocketllm:prefix_cache_hits",
            "Prompt tokens reused from a slot, not computed again.",
            ("model_name",),
            registry=self._registry,
        ).labels(model)
        self._http = Counter("pocketllm:http_requests", "HTTP answers by status.", ("status",), registry=self._registry)
        self._model = model
        self.mean_seconds = 0.0  # a request takes, the last ones counting most

    def on_token(self, seconds: float, *, first: bool) -> None:
        (self._first if first else self._between).observe(seconds)

    def on_end(self, reason: str, seconds: float, usage: Usage) -> None:
        self._ended.labels(self._model, reason).inc()
        self._whole.observe(seconds)
        self.mean_seconds += 0.1 * (seconds - self.mean_seconds)
        self._prompt.observe(usage.prompt_tokens)
        self._output.observe(usage.completion_tokens)
        self._reused.inc(usage.cached_tokens)

    def on_answer(self, status: int) -> None:
        self._http.labels(str(status)).inc()

    def render(self, state: EngineState | None) -> bytes:
        """In Prometheus' text format; state None: the engine does not answer, its own metrics are left out."""
        self._engine.state = state
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, model: str) -> None:
        self._model = model
        self.state: EngineState | None = None

    def collect(self) -> Iterator[Metric]:
        state = self.state
        if state is None:
            return
        stats = state.stats
        yield self._gauge("num_requests_running", "Requests that have a slot.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests that wait for a slot.", stats.waiting)
        used = sum(slot.tokens for slot in state.slots)
        yield self._gauge("kv_cache_usage_perc", "Tokens in the cache, 1 = full.", used / state.kv_tokens)
        yield self._gauge("kv_cache_tokens", "Tokens in the cache.", used)
        yield self._gauge("kv_cache_capacity_tokens", "Tokens the cache can hold.", state.kv_tokens)
        yield self._gauge("pages_used", "Pages that hold tokens.", state.pages_used)
        yield self._gauge("pages_total", "Pages of the cache.", state.pages_total)
        yield self._gauge("snapshots", "Recurrent-state snapshots that can be kept.", state.snapshots)
        slots = GaugeMetricFamily("pocketllm:slots", "Slots by use.", labels=("model_name", "use"))
        for use in _USES:
            slots.add_metric((self._model, use), sum(slot.use == use for slot in state.slots))
        yield slots
        yield self._counter("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.output_tokens)
        yield self._counter("engine_steps", "Steps of the engine.", stats.steps)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens that the drafter drafted.", stats.drafted_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were right.", stats.accepted_tokens)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"pocketllm:{name}", text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"pocketllm:{name}", text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family
