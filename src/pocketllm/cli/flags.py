"""The options of `options` as command-line flags: the one table of each class, and how a command takes them.

A flag that is not given leaves the option's own default. Values are checked where they are checked for everybody, in
`options`; its errors speak of option names, and `in_flags` turns those into flags.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperOption

from pocketllm.errors import OptionError
from pocketllm.options import (
    DrafterName,
    Dtype,
    EmbeddingStorage,
    EngineOptions,
    KernelsName,
    KVLayout,
    LoadFormat,
    LogFormat,
    Quantization,
    SamplingParams,
    ServerOptions,
    parse_bytes,
)


@dataclass(frozen=True)
class Flag:
    """One flag of the command line. kind: the type Typer converts to; parse: what makes the option's value of that."""

    option: str  # field of the option class
    name: str
    help: str
    kind: Any = str
    parse: Callable[[Any], Any] | None = None
    metavar: str | None = None


def _pairs(entries: Sequence[str]) -> dict[int, float]:
    biases = {}
    for entry in entries:
        match = re.fullmatch(r"(\d+):(-?(?:inf|\d+\.?\d*|\.\d+))", entry)
        if match is None:
            raise OptionError(f"logit_bias = {entry!r}: write it as TOKEN_ID:BIAS, such as 42:-1.5")
        biases[int(match[1])] = float(match[2])
    return biases


def _choices(literal: Any) -> str:
    return "|".join(get_args(literal))


ENGINE_FLAGS = (
    Flag("max_batch_size", "--slots", "Conversations that can be in memory at once.", int),
    Flag("max_context", "--context", "Most tokens one slot may hold (default: the model's limit, or what fits).", int),
    Flag("kv_tokens", "--kv-tokens", "Tokens in the shared pool (default: slots x context, or what fits).", int),
    Flag("kv_cache_dtype", "--kv-cache-dtype", "Storage of K and V; auto: the compute type. Also:", metavar="NAME"),
    Flag("kv_layout", "--kv-layout", "paged: one pool; slots: each owns its context.", metavar=_choices(KVLayout)),
    Flag("page_size", "--page-size", "Tokens per page, a power of two.", int),
    Flag("dtype", "--dtype", "Compute type; auto: float32 on a CPU, bfloat16 on a GPU.", metavar=_choices(Dtype)),
    Flag("quantization", "--quantization", "Storage of the weights; auto: as in the file, none: decoded at load.",
         metavar=_choices(Quantization)),
    Flag("quantize_embeddings", "--quantize-embeddings", "Plain embeddings and output head at half their size.",
         metavar=_choices(EmbeddingStorage)),
    Flag("kernels", "--kernels", "Kernel backend; auto: the fastest for the device.", metavar=_choices(KernelsName)),
    Flag("device", "--device", "Where the engine runs; auto: the first GPU, else the CPU.",
         metavar="auto|cpu|cuda|cuda:N"),
    Flag("tensor_parallel", "--tensor-parallel", "Ranks that share the model: a GPU each (on a CPU, a process each).", int),
    Flag("prefill_chunk", "--prefill-chunk",
         "Most prompt tokens in one step, a multiple of 64 (default: 512; on a GPU 2,048).", int),
    Flag("drafter", "--drafter", "Guesses next tokens for one pass to verify; answers stay the same. ngram: from what stood "
         "there before; mtp: by the model's own layer for it.", metavar=_choices(DrafterName)),
    Flag("max_draft_tokens", "--max-draft-tokens", "Most drafted tokens a verify pass checks per slot.", int),
    Flag("num_snapshots", "--snapshots", "Recurrent-state snapshots kept (hybrid models).", int),
    Flag("attention_window", "--attention-window", "See only the last N tokens (0: all). Changes results.", int),
    Flag("attention_sinks", "--attention-sinks", "First tokens that stay visible beyond the window.", int),
    Flag("memory_limit", "--memory", "Memory each rank may take, such as 6GiB (default: what is free).",
         parse=parse_bytes, metavar="SIZE"),
    Flag("load_format", "--load-format", "dummy: random weights of the right shape.", metavar=_choices(LoadFormat)),
    Flag("threads", "--threads", "CPU threads (default: POCKETLLM_THREADS, or one per core).", int),
)  # fmt: skip

SAMPLING_FLAGS = (
    Flag("max_tokens", "--max-tokens", "Most tokens to generate; none: until the model stops or its slot is full.", str,
         lambda text: None if text == "none" else _integer("max_tokens", text), metavar="N|none"),
    Flag("min_tokens", "--min-tokens", "No end before this many tokens.", int),
    Flag("temperature", "--temperature", "0: always the likeliest token.", float),
    Flag("top_k", "--top-k", "Only the K likeliest tokens (0: all).", int),
    Flag("top_p", "--top-p", "Only the likeliest tokens that make up this probability.", float),
    Flag("min_p", "--min-p", "Only tokens at least this likely, relative to the likeliest.", float),
    Flag("repetition_penalty", "--repetition-penalty", "Above 1 weakens tokens already seen.", float),
    Flag("presence_penalty", "--presence-penalty", "Subtracted once for a token already generated.", float),
    Flag("frequency_penalty", "--frequency-penalty", "Subtracted for each time it was generated.", float),
    Flag("logit_bias", "--logit-bias", "Added to a token's logit; repeatable.", list[str], _pairs, metavar="ID:BIAS"),
    Flag("seed", "--seed", "Makes random choices repeatable.", int),
    Flag("stop", "--stop", "Text that ends the generation; repeatable.", list[str], tuple),
    Flag("stop_token_ids", "--stop-token-id", "Token id that ends it; repeatable.", list[int], tuple),
    Flag("ignore_eos", "--ignore-eos", "Go on after the model's own end.", bool),
    Flag("logprobs", "--logprobs", "With --json: log-probabilities of each token and the N likeliest.", int),
)  # fmt: skip

SERVER_FLAGS = (
    Flag("host", "--host", "Address to listen on; 0.0.0.0: reachable from other machines.", metavar="ADDRESS"),
    Flag("port", "--port", "Port to listen on; 0: any free one.", int),
    Flag("api_keys", "--api-key", "A key that requests must carry; repeatable. Also: POCKETLLM_API_KEY.", list[str], tuple,
         metavar="KEY"),
    Flag("served_names", "--served-model-name", "Name of the model in the API; repeatable.", list[str], tuple,
         metavar="NAME"),
    Flag("max_body", "--max-body", "Size of the largest request.", parse=parse_bytes, metavar="SIZE"),
    Flag("max_choices", "--max-choices", "Most choices one request may ask for.", int),
    Flag("keep_alive", "--keep-alive", "Seconds of silence in a stream before a comment is sent.", float),
    Flag("stream_interval", "--stream-interval", "Seconds between two events of a stream, at least; 0: an event a token.",
         float),
    Flag("shutdown_timeout", "--shutdown-timeout", "Seconds that running requests get to finish.", float),
    Flag("log_format", "--log-format", "Log lines for people, or as JSON.", metavar=_choices(LogFormat)),
)  # fmt: skip
QUEUE_FLAG = Flag("max_queue", "--max-queue", "Requests that may wait for a slot; one more gets status 429.", int)

PLAN_ONLY = ("num_snapshots",)  # counted by a plan, of no use to the other commands
DRAFTS = ("drafter", "max_draft_tokens")  # of no use where passes are measured, and not answers

_NAMES = {flag.option: flag.name for flag in (*ENGINE_FLAGS, *SAMPLING_FLAGS, *SERVER_FLAGS, QUEUE_FLAG)}
_DEFAULTS = {
    f.name: f.default
    for cls in (ServerOptions, SamplingParams, EngineOptions)
    for f in fields(cls)
    if f.default is not MISSING
}


def _integer(option: str, text: str) -> int:
    if not re.fullmatch(r"-?\d+", text):
        raise OptionError(f"{option} = {text!r}: must be a whole number")
    return int(text)


def integers(flag: str, text: str) -> tuple[int, ...]:
    """'1,2,4' -> (1, 2, 4), for flags that take a list; OptionError unless all are whole numbers, at least 1."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d+", part) and int(part) for part in parts):
        raise OptionError(f"{flag} {text!r}: must be whole numbers from 1, separated by commas")
    return tuple(dict.fromkeys(map(int, parts)))


def without(flags: Sequence[Flag], *options: str) -> tuple[Flag, ...]:
    return tuple(flag for flag in flags if flag.option not in options)


def in_flags(message: str) -> str:
    """An error's text with option names replaced by their flags: 'max_context = 8: ...' -> '--context 8: ...'."""
    names = sorted(_NAMES, key=len, reverse=True)
    assigned = re.sub(rf"\b({'|'.join(names)}) ?= ?", lambda m: f"{_NAMES[m[1]]} ", message)
    words = [name for name in names if "_" in name]  # the others are words of plain English too
    return re.sub(rf"\b({'|'.join(words)})\b", lambda m: _NAMES[m[1]], assigned)


def with_flags(
    parameter: str, flags: Sequence[Flag], build: Callable[..., Any], **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command these flags in place of its `parameter`, which it gets as build(option=value, ...).

    `build` gets the options that were given, and those of `defaults`, the command's own default values.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        added = [_parameter(flag, defaults.get(flag.option, _DEFAULTS.get(flag.option))) for flag in flags]
        kept = [p for name, p in signature.parameters.items() if name != parameter]

        @functools.wraps(function)
        def run(**values: Any) -> None:
            options = dict(defaults)
            for flag in flags:
                value = values.pop(flag.option)
                if value is not None and value is not False and value != []:  # 0 is a value
                    options[flag.option] = flag.parse(value) if flag.parse is not None else value
            function(**values, **{parameter: build(**options)})

        shown: Any = run  # what Typer reads off a function
        shown.__signature__ = inspect.Signature([*kept, *added])
        shown.__annotations__ = {p.name: p.annotation for p in (*kept, *added)}
        return run

    return decorate


def _parameter(flag: Flag, default: Any) -> inspect.Parameter:
    """The command's parameter for a flag; its own default is "not given", the help names the option's."""
    shown = "" if default in (None, False, (), "auto") else f" Default: {default}."
    kind = flag.kind if flag.kind is bool else flag.kind | None
    return inspect.Parameter(
        flag.option,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if flag.kind is bool else None,
        annotation=Annotated[kind, typer.Option(flag.name, help=flag.help + shown, metavar=flag.metavar)],
    )


class EngineCommand(TyperCommand):
    """A command whose help lists the KV formats, looked up when the help is shown: finding them loads torch."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from pocketllm.cache.formats import KV_FORMATS

        for parameter in self.params:
            if parameter.name == "kv_cache_dtype" and isinstance(parameter, TyperOption):
                parameter.help = f"{parameter.help} {', '.join(KV_FORMATS)}."
        super().format_help(ctx, formatter)
