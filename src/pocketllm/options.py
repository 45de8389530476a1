"""What a user can set: engine, sampling and server options. Frozen, validated, unknown names rejected.

The only module that reads environment variables (`POCKETLLM_THREADS`, `POCKETLLM_API_KEY`; whether torch's own are set).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from pocketllm.errors import OptionError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVLayout = Literal["paged", "slots"]
KernelsName = Literal["auto", "reference", "numba", "triton"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["auto", "none", "bf16", "w8", "w4"]
EmbeddingStorage = Literal["none", "w8", "fp8"]
DrafterName = Literal["none", "ngram", "mtp"]
LogFormat = Literal["text", "json"]

MOST_VERIFIED = 64  # tokens of a pass in which drafts are verified (`parallel.SMALL_BATCH`)
CHUNK_ALIGNMENT = 64  # prefill chunks end on multiples of this, so the chunked delta rule sums in one order
# Tokens. On a GPU the host may take longer to launch a pass of fewer than the device to run it, and from so many on a chunk
# attends through the library (`kernels.triton.attention.LONG`).
PREFILL_CHUNKS = {"cpu": 512, "cuda": 2048}


class _Checked:
    """Shared by the option classes: `of(**kwargs)` rejects unknown names and says which one was likely meant."""

    @classmethod
    def of(cls, **values: Any) -> Self:
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]  # a dataclass is what has this as its base
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
                raise OptionError(f"unknown {cls.__name__} option {name!r}: {hint}")
        return cls(**values)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise OptionError(message)


def _choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    _require(value in choices, f"{name} = {value!r}: choose one of {', '.join(map(str, choices))}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def parse_bytes(text: str) -> int:
    """'22GiB', '22 GB', '512MiB' or plain bytes -> bytes (GiB = 2**30, GB = 10**9)."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(?:([kmgt])(i?)b|b)?\s*", text, re.IGNORECASE)
    if not match:
        raise OptionError(f"memory size {text!r}: write it as 22GiB, 22GB, 512MiB or a number of bytes")
    number, unit, binary = match.groups()
    power = "kmgt".index(unit.lower()) + 1 if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


@dataclass(frozen=True)
class EngineOptions(_Checked):
    """Settings of an engine, fixed when it is built.

    max_batch_size      slots: conversations that can be in memory at once
    max_context         most tokens one slot may hold; None: the model's own limit, or less if the pool is smaller
    kv_tokens           tokens in the shared pool; None: max_batch_size * max_context where that fits, else what fits
    kv_cache_dtype      storage of K and V: a name from `cache.formats`, or auto (the compute type, kept plain)
    kv_layout           paged: one pool, pages shared and copied on write; slots: every slot owns max_context tokens
    page_size           tokens per page, a power of two from 16
    dtype               compute type; auto: float32 on a CPU, bfloat16 on a GPU
    quantization        weights: auto keeps the file's own storage, none decodes to the compute type, else re-encodes
    quantize_embeddings w8, fp8: embedding and output head, if they are plain in the file, at half of bfloat16's size
    kernels             backend; auto picks the fastest for the device
    device              auto, cpu, cuda or cuda:N
    tensor_parallel     ranks that share the model, each a process with a GPU of its own (on a CPU: with some threads)
    prefill_chunk       most prompt tokens computed in one step, a multiple of 64: bounds how long others wait. None: 512;
                        2,048 on a GPU
    max_queue           requests that may wait for a slot; one more is refused
    drafter             guesses an answer's next tokens, which one pass then verifies (up to 64 of all slots): ngram looks
                        up what followed the last three tokens before, mtp asks the model's own layer for further tokens
                        (Qwen3-Next, 3.5 and later). Answers are the same, and may take fewer passes
    max_draft_tokens    most drafted tokens a verify pass checks per slot
    num_snapshots       recurrent-state snapshots kept per engine (hybrid models)
    attention_window    0: every token sees all before it; N: only the last N (and the sinks). Changes the model's results
    attention_sinks     first tokens that stay visible beyond the window
    memory_limit        bytes a rank may take (on a GPU the allocator refuses more); None: what the device has free
    load_format         auto, or dummy: random weights of the right shape
    threads             CPU threads; None: one per core
    seed                for dummy weights, and for requests that give no seed of their own
    """

    max_batch_size: int = 4
    max_context: int | None = None
    kv_tokens: int | None = None
    kv_cache_dtype: str = "auto"
    kv_layout: KVLayout = "paged"
    page_size: int = 256
    dtype: Dtype = "auto"
    quantization: Quantization = "auto"
    quantize_embeddings: EmbeddingStorage = "none"
    kernels: KernelsName = "auto"
    device: str = "auto"
    tensor_parallel: int = 1
    prefill_chunk: int | None = None
    max_queue: int = 1024
    drafter: DrafterName = "none"
    max_draft_tokens: int = 0
    num_snapshots: int = 0
    attention_window: int = 0
    attention_sinks: int = 0
    memory_limit: int | None = None
    load_format: LoadFormat = "auto"
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        positive = ("max_batch_size", "tensor_parallel")
        optional = ("max_context", "kv_tokens", "prefill_chunk", "memory_limit", "threads")
        for name in positive:
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, f"{name} = {value!r}: must be a whole number, at least 1")
        for name in optional:
            value = getattr(self, name)
            _require(
                value is None or (_is_int(value) and value >= 1), f"{name} = {value!r}: must be at least 1, or None"
            )
        for name in ("max_queue", "max_draft_tokens", "num_snapshots", "attention_window", "attention_sinks", "seed"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 0, f"{name} = {value!r}: must be a whole number, at least 0")
        _require(
            self.attention_window > 0 or self.attention_sinks == 0,
            f"attention_sinks = {self.attention_sinks} has no meaning without attention_window",
        )
        page = self.page_size
        _require(
            _is_int(page) and page >= 16 and page & (page - 1) == 0,
            f"page_size = {page!r}: must be a power of two, at least 16",
        )
        _require(
            (self.prefill_chunk or 0) % CHUNK_ALIGNMENT == 0,
            f"prefill_chunk = {self.prefill_chunk}: must be a multiple of {CHUNK_ALIGNMENT}",
        )
        _choice("kv_layout", self.kv_layout, get_args(KVLayout))
        _choice("dtype", self.dtype, get_args(Dtype))
        _choice("quantization", self.quantization, get_args(Quantization))
        _choice("quantize_embeddings", self.quantize_embeddings, get_args(EmbeddingStorage))
        _choice("kernels", self.kernels, get_args(KernelsName))
        _choice("load_format", self.load_format, get_args(LoadFormat))
        _choice("drafter", self.drafter, get_args(DrafterName))
        _require(
            self.drafter == "none" or 0 < self.max_draft_tokens < MOST_VERIFIED,
            f"max_draft_tokens = {self.max_draft_tokens}: drafter = {self.drafter!r} needs 1 to {MOST_VERIFIED - 1}, say 4",
        )
        _require(
            re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)) is not None,
            f"device = {self.device!r}: must be auto, cpu, cuda or cuda:N",
        )
        _require(
            self.kv_layout == "paged" or self.kv_tokens is None,
            "kv_tokens sets the size of the paged pool; with kv_layout='slots' every slot owns max_context tokens",
        )

    def chunk_tokens(self, device_type: str) -> int:
        """`prefill_chunk`, or what None stands for."""
        return self.prefill_chunk or PREFILL_CHUNKS[device_type]

    def num_threads(self) -> int:
        """CPU threads to use: the option, else POCKETLLM_THREADS, else the cores this process may run on."""
        if self.threads is not None:
            return self.threads
        text = os.environ.get("POCKETLLM_THREADS")
        if text is not None:
            _require(text.isdigit() and int(text) >= 1, f"POCKETLLM_THREADS = {text!r}: must be a whole number >= 1")
            return int(text)
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_allocator_settings() -> bool:
    """Whether the user has set torch's allocator, by torch's own variables."""
    return any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))


@dataclass(frozen=True)
class SamplingParams(_Checked):
    """How one request's tokens are chosen and when it ends.

    max_tokens          most tokens to generate; None: until the model stops or the slot's share of the pool is full
    min_tokens          end-of-sequence and stop tokens are forbidden before this many
    temperature         0: greedy
    top_k, top_p, min_p truncation; top_k 0, top_p 1 and min_p 0 leave it out
    repetition_penalty  > 1 weakens tokens seen in prompt or output (divides positive, multiplies negative logits)
    presence_penalty    subtracted once for a token already generated; in [-2, 2]
    frequency_penalty   subtracted per time a token was generated; in [-2, 2]
    logit_bias          token id -> added to its logit; -100 and below forbids it
    seed                makes the request's random stream its own; None: drawn from the engine's seed and request count
    stop                texts that end the generation (applied by the text layer; the engine is told to stop)
    stop_token_ids      tokens that end it, besides the model's own end-of-sequence tokens
    ignore_eos          go on after the model's end-of-sequence tokens
    logprobs            None: none; n: the chosen token's and the n most likely tokens' log-probabilities, from raw logits
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            _require(isinstance(value, Iterable), f"{name} = {value!r}: must be a tuple, empty for none")
        biases = self.logit_bias
        _require(isinstance(biases, Mapping), f"logit_bias = {biases!r}: must be a dict of token ids and numbers")
        _require(isinstance(self.ignore_eos, bool), f"ignore_eos = {self.ignore_eos!r}: must be True or False")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(
                isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
                f"{name} = {value!r}: must be a finite number",
            )
        for name in ("min_tokens", "top_k"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 0, f"{name} = {value!r}: must be a whole number, at least 0")
        _require(
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
            f"max_tokens = {self.max_tokens!r}: must be at least 1, or None",
        )
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens = {self.min_tokens} is more than max_tokens = {self.max_tokens}",
        )
        _require(self.temperature >= 0, f"temperature = {self.temperature}: must be at least 0")
        _require(0 < self.top_p <= 1, f"top_p = {self.top_p}: must be in (0, 1]")
        _require(0 <= self.min_p <= 1, f"min_p = {self.min_p}: must be in [0, 1]")
        _require(self.repetition_penalty > 0, f"repetition_penalty = {self.repetition_penalty}: must be above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, f"{name} = {getattr(self, name)}: must be in [-2, 2]")
        _require(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63),
            f"seed = {self.seed!r}: must be a whole number in [0, 2**63), or None",
        )
        _require(
            self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= 64),
            f"logprobs = {self.logprobs!r}: must be in [0, 64], or None",
        )
        _require(all(isinstance(s, str) and s for s in self.stop), f"stop = {self.stop!r}: must be non-empty strings")
        _require(
            all(_is_int(t) and t >= 0 for t in self.stop_token_ids),
            f"stop_token_ids = {self.stop_token_ids!r}: must be token ids",
        )
        for token, bias in self.logit_bias.items():
            _require(_is_int(token) and token >= 0, f"logit_bias: {token!r} is no token id")
            _require(
                isinstance(bias, int | float) and bias <= 1e38,  # false for NaN; the logits are float32
                f"logit_bias[{token}] = {bias!r}: must be a number up to 1e38 (-inf forbids the token)",
            )


@dataclass(frozen=True)
class ServerOptions(_Checked):
    """Settings of the HTTP server.

    host, port          where it listens; port 0: any free one
    api_keys            a request must carry one of them; empty: POCKETLLM_API_KEY (comma-separated), else none is needed
    served_names        names clients may give as `model`, the first is the one shown; empty: the model's own name
    max_body            bytes of the largest request body
    max_choices         most choices (prompts x n) one request may ask for
    keep_alive          seconds of silence in a stream before a comment is sent
    stream_interval     seconds between two events of a stream, at least: each takes time from the engine. Steps that take
                        longer are not held up, nor are first tokens and ends; 0: an event a token
    shutdown_timeout    seconds that running requests get to finish after SIGTERM
    log_format          text, or json: a JSON object a line
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_names: tuple[str, ...] = ()
    max_body: int = 32 * 2**20
    max_choices: int = 64
    keep_alive: float = 10.0
    stream_interval: float = 0.02
    shutdown_timeout: float = 30.0
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        _require(
            _is_int(self.port) and 0 <= self.port < 65536, f"port = {self.port!r}: must be a whole number below 65536"
        )
        for name in ("max_body", "max_choices"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, f"{name} = {value!r}: must be a whole number, at least 1")
        _require(self.keep_alive > 0, f"keep_alive = {self.keep_alive}: must be above 0")
        for name in ("shutdown_timeout", "stream_interval"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value >= 0, f"{name} = {value}: must be at least 0")
        _choice("log_format", self.log_format, get_args(LogFormat))
        for name in ("api_keys", "served_names"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            _require(all(getattr(self, name)), f"{name}: must not hold an empty text")

    def keys(self) -> tuple[str, ...]:
        """The keys that are accepted: the option, else POCKETLLM_API_KEY; none: requests need no key."""
        text = os.environ.get("POCKETLLM_API_KEY", "")
        return self.api_keys or tuple(key.strip() for key in text.split(",") if key.strip())
