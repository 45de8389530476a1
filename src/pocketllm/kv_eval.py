"""What a KV format costs in quality: next-token distributions with it against those with K and V kept plain.

One engine for each format, all on one copy of the weights, take the same chunk of text in turn. Every token attends to what
the format stored, its own K and V included, so this is the path that serving takes. The distributions of a chunk are
compared in float64 over the whole vocabulary and then forgotten: nothing but a few numbers a token is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from pocketllm.cache.formats import KV_FORMATS, KVFormat
from pocketllm.engine.device import pick_device
from pocketllm.engine.memory_plan import compute_dtype
from pocketllm.engine.slot_engine import SlotEngine, SlotRequest
from pocketllm.errors import OptionError, RequestError
from pocketllm.kernels import reference, select_kernels
from pocketllm.kernels.protocol import Kernels
from pocketllm.models.registry import Checkpoint, read_model
from pocketllm.options import EngineOptions
from pocketllm.text.tokenizer import load_tokenizer
from pocketllm.weights.base import Policy
from pocketllm.weights.shared import SharedSource
from pocketllm.weights.source import WeightSource

BLOCK = 1 << 20  # logits compared at a time: what float64 copies of a few rows take stays in the processor's cache
_MOST_LOGITS = 512  # tokens whose logits [tokens, vocabulary] float32 two engines give at a time: no plan counts them
BASELINE = "auto"  # the option's word for the plain format of the compute type


@dataclass(frozen=True)
class Loss:
    """One format's loss over `tokens` predictions in windows of `window` tokens. KL in nats, of baseline from format."""

    kv: str
    window: int
    tokens: int
    bytes_per_token: int  # K and V of all layers and heads
    perplexity: float
    change: float  # of perplexity, relative to the baseline's: 0.01 is +1%
    change_error: float  # standard error of `change`, tokens taken as independent
    kl_mean: float
    kl_p999: float  # 99.9% of the tokens lose less
    top1: float  # share of tokens whose likeliest next token is the baseline's


@dataclass(frozen=True)
class Divergence:
    """Greedy generation: tokens before the first that differs from the baseline's, over several prompts."""

    kv: str
    mean: float  # a prompt that never differs counts with all `generated` tokens
    same: int  # prompts that never differ
    prompts: int
    prompt_tokens: int
    generated: int


@dataclass(frozen=True)
class SharedCheckpoint(Checkpoint):
    """A checkpoint whose matrices are loaded once, by the first engine; all engines must have the same policy."""

    loaded: list[SharedSource] = field(default_factory=list, hash=False, compare=False)

    def open_source(self, policy: Policy, device: torch.device, seed: int = 0) -> WeightSource:
        if not self.loaded:
            self.loaded.append(SharedSource(super().open_source(policy, device, seed)))
        return self.loaded[0]


class ReferenceAttention:
    """A backend with the reference's attention, for formats that exist in PyTorch only; the rest is the backend's own."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.append, self.attend, self.prefill = reference.append, reference.attend, reference.prefill
        self.dequantize, self.attention_workspace = reference.dequantize, reference.attention_workspace
        self.capture = reference.capture  # a replay must not leave torch's work out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


class Text:
    """Token ids of a file, cut into windows."""

    def __init__(self, name: str, ids: Sequence[int]) -> None:
        self.name, self.ids = name, ids

    def windows(self, count: int, length: int) -> list[list[int]]:
        """`count` windows of `length` tokens, none overlapping, spread evenly over the text."""
        fit = len(self.ids) // length
        return [list(self.ids[i * fit // count * length :][:length]) for i in range(count)]


class KVEval:
    """Engines for a baseline and several formats, and the measurements.

    window       most tokens a window will have
    prompts      prompts of the greedy comparison, each of `prompt_tokens` tokens and `generated` more
    OptionError, ModelError and MemoryPlanError as from `SlotEngine`.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint | None,
        options: EngineOptions,
        formats: Sequence[KVFormat],
        *,
        window: int,
        prompts: int = 8,
        prompt_tokens: int = 128,
        generated: int = 128,
    ) -> None:
        checkpoint = model if isinstance(model, Checkpoint) else read_model(model, options.load_format)
        self.checkpoint = SharedCheckpoint(**vars(checkpoint))
        self.kernels = select_kernels(options.kernels, pick_device(options.device).type)
        self.prompts, self.prompt_tokens, self.generated = prompts, prompt_tokens, generated
        tokenizer = load_tokenizer(checkpoint.path) if checkpoint.path is not None and checkpoint.reader else None
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size if tokenizer is not None else checkpoint.config.vocab_size
        context = max(window, prompt_tokens + generated)
        pages = max(-(-context // options.page_size), prompts * -(-(prompt_tokens + generated) // options.page_size))
        self._options = replace(
            options,
            max_batch_size=prompts,
            max_context=context,
            kv_tokens=pages * options.page_size,
            kv_layout="paged",
            kv_cache_dtype=BASELINE,
        )
        self.baseline = SlotEngine(self.checkpoint, self._options)
        self.baseline_name = self.baseline.plan.kv.kv_format.name
        self.engines = {fmt.name: self._engine(fmt) for fmt in formats if fmt.name != self.baseline_name}

    def _engine(self, fmt: KVFormat) -> SlotEngine:
        known = KV_FORMATS.get(fmt.name) is fmt
        backend = None if known else cast(Kernels, ReferenceAttention(self.kernels))
        with _found_by_name(fmt):
            return SlotEngine(self.checkpoint, replace(self._options, kv_cache_dtype=fmt.name), backend=backend)

    def facts(self) -> dict[str, Any]:
        """What was measured, where and when."""
        return {
            "model": self.checkpoint.name,
            "kernels": self.kernels.name,
            "device": str(self.baseline.device),
            "threads": self._options.num_threads(),
            "quantization": self._options.quantization,
            "dtype": str(compute_dtype(self._options, self.baseline.device.type)).removeprefix("torch."),
            "baseline": self.baseline_name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def read(self, name: str, text: str) -> Text:
        """A text as tokens, without the tokens a model wants around it."""
        if self.tokenizer is None:
            raise OptionError("a model of random weights has no tokenizer and predicts nothing: give a trained model")
        return Text(name, self.tokenizer.encode(text, add_special=False))

    @torch.inference_mode()
    def losses(
        self, texts: Sequence[Text], window: int, tokens: int, progress: Callable[[str], None] = lambda news: None
    ) -> list[Loss]:
        """The loss of the baseline (none) and of each format, over tokens // window windows, spread over the texts."""
        windows = _share(texts, tokens // window, window)
        step = min(self._options.chunk_tokens(self.baseline.device.type), _MOST_LOGITS)
        base_nll: list[Tensor] = []
        found: dict[str, list[Comparison]] = {name: [] for name in self.engines}
        engines = {self.baseline_name: self.baseline, **self.engines}
        for number, ids in enumerate(windows):
            slots = {name: engine.acquire_slot(window) for name, engine in engines.items()}
            for start in range(0, window - 1, step):
                progress(f"window {number + 1} of {len(windows)}, token {start}")
                end = min(start + step, window - 1)
                chunk, targets = ids[start:end], torch.tensor(ids[start + 1 : end + 1])
                rows = self._logits(self.baseline, slots[self.baseline_name], chunk)
                base_nll.append(_nll(rows, targets))
                for name, engine in self.engines.items():
                    found[name].append(compare(rows, self._logits(engine, slots[name], chunk), targets))
            for name, engine in engines.items():
                engine.release_slot(slots[name])
        nll = torch.cat(base_nll)
        nothing = Comparison(nll, torch.zeros_like(nll), torch.ones_like(nll))
        compared = {self.baseline_name: nothing, **{name: _joined(parts) for name, parts in found.items()}}
        return [self._loss(name, engine, window, nll, compared[name]) for name, engine in engines.items()]

    def _loss(self, name: str, engine: SlotEngine, window: int, base: Tensor, found: Comparison) -> Loss:
        rise = found.nll - base
        change = math.expm1(rise.mean())
        return Loss(
            kv=name,
            window=window,
            tokens=len(base),
            bytes_per_token=_bytes_per_token(engine),
            perplexity=math.exp(found.nll.mean()),
            change=change,
            change_error=(1 + change) * float(rise.std()) / len(base) ** 0.5,
            kl_mean=float(found.kl.mean()),
            kl_p999=float(found.kl.quantile(0.999)),
            top1=float(found.same_top.double().mean()),
        )

    @torch.inference_mode()
    def divergences(
        self, texts: Sequence[Text], progress: Callable[[str], None] = lambda news: None
    ) -> list[Divergence]:
        """Greedy divergence of the baseline (none, unless prefill and decode differ) and of each format.

        The baseline generates, end tokens included. A format reads the baseline's tokens: up to its first difference, its
        own generation is the same, so the first place where its choice is another one is what counts.
        """
        prompts = _share(texts, self.prompts, self.prompt_tokens)
        progress(f"{len(prompts)} greedy generations of {self.generated} tokens")
        answers = self.generate(self.baseline, prompts)
        return [
            self._divergence(name, engine, prompts, answers, progress)
            for name, engine in {self.baseline_name: self.baseline, **self.engines}.items()
        ]

    def _divergence(
        self,
        name: str,
        engine: SlotEngine,
        prompts: list[list[int]],
        answers: list[list[int]],
        progress: Callable[[str], None],
    ) -> Divergence:
        progress(f"greedy tokens with {name}")
        lengths = []
        for prompt, answer in zip(prompts, answers, strict=True):
            slot = engine.acquire_slot(self.prompt_tokens + self.generated)
            self._logits(engine, slot, prompt[:-1])
            choices = self._logits(engine, slot, [prompt[-1], *answer[:-1]]).argmax(-1).tolist()
            engine.release_slot(slot)
            same = [choice == token for choice, token in zip(choices, answer, strict=True)]
            lengths.append((*same, False).index(False))
        whole = lengths.count(self.generated)
        mean = sum(lengths) / len(lengths)
        return Divergence(name, mean, whole, len(prompts), self.prompt_tokens, self.generated)

    def generate(self, engine: SlotEngine, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Greedy continuations of prompts of `prompt_tokens` tokens, all in one batch."""
        answers: list[list[int]] = [[] for _ in prompts]
        slots = [engine.acquire_slot(self.prompt_tokens + self.generated) for _ in prompts]
        results = engine.batch_prefill([SlotRequest(s, ids) for s, ids in zip(slots, prompts, strict=True)])
        for step in range(self.generated):
            for answer, result in zip(answers, results, strict=True):
                answer.append(int(_checked(result.logits, result.error)[: self.vocab_size].argmax()))
            if step + 1 < self.generated:
                results = engine.batch_decode([SlotRequest(s, a[-1:]) for s, a in zip(slots, answers, strict=True)])
        for slot in slots:
            engine.release_slot(slot)
        return answers

    def _logits(self, engine: SlotEngine, slot: int, ids: list[int]) -> Tensor:
        """[len(ids), V]: of every real token of the vocabulary, after each of the ids."""
        (result,) = engine.batch_prefill([SlotRequest(slot, ids)], all_logits=True)
        return _checked(result.logits, result.error)[:, : self.vocab_size]


@dataclass(frozen=True)
class Comparison:
    """A format's numbers for some tokens, [T] each: negative log-likelihood, KL divergence, same likeliest token."""

    nll: Tensor  # float64
    kl: Tensor  # float64
    same_top: Tensor  # bool


def compare(base: Tensor, other: Tensor, targets: Tensor) -> Comparison:
    """base, other: logits [T, V] float32; targets [T] on the CPU."""
    nll, kl, same = [], [], []
    step = max(1, BLOCK // base.shape[1])
    for start in range(0, len(base), step):
        part = slice(start, start + step)
        x, y = base[part].double(), other[part].double()
        x_norm, y_norm = x.logsumexp(-1), y.logsumexp(-1)
        same.append((x.argmax(-1) == y.argmax(-1)).cpu())
        nll.append((y_norm - y.gather(1, targets[part, None].to(y.device))[:, 0]).cpu())
        p = (x - x_norm[:, None]).exp_()
        # sum p (log p - log q), log p = x - x_norm; exact zeros of the sum come out as rounding, at most 1e-14
        kl.append((p.mul_(x - y).sum(-1) - x_norm + y_norm).clamp_min(0).cpu())
    return Comparison(torch.cat(nll), torch.cat(kl), torch.cat(same))


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) of each row, [T] float64 on the CPU."""
    chosen = logits.gather(1, targets.to(logits.device)[:, None])[:, 0]
    step = max(1, BLOCK // logits.shape[1])
    norms = [logits[start : start + step].double().logsumexp(-1) for start in range(0, len(logits), step)]
    return (torch.cat(norms) - chosen).cpu()


def _joined(parts: list[Comparison]) -> Comparison:
    return Comparison(
        torch.cat([p.nll for p in parts]), torch.cat([p.kl for p in parts]), torch.cat([p.same_top for p in parts])
    )


def _share(texts: Sequence[Text], count: int, length: int) -> list[list[int]]:
    """`count` windows of `length` tokens, the same number from each text (from the first ones, one more)."""
    if not texts or count < 1:
        raise OptionError(f"nothing to measure: {len(texts)} texts, {count} windows of {length} tokens")
    windows = []
    for i, text in enumerate(texts):
        wanted = count // len(texts) + (i < count % len(texts))
        if len(text.ids) < wanted * length:
            raise OptionError(
                f"{text.name} has {len(text.ids)} tokens, its share is {wanted} windows of {length}: "
                "give a longer text, more texts, or ask for fewer tokens"
            )
        windows += text.windows(wanted, length)
    return windows


def _bytes_per_token(engine: SlotEngine) -> int:
    return engine.plan.kv.page_nbytes // engine.plan.kv.page_size


def _checked(logits: Tensor | None, error: Exception | None) -> Tensor:
    if error is not None:
        raise error
    if logits is None:
        raise RequestError("a pass gave neither logits nor an error")
    return logits


@contextmanager
def _found_by_name(fmt: KVFormat) -> Iterator[None]:
    """Lets an engine that is being built find a format that is not one of the package's; it keeps the object itself."""
    if KV_FORMATS.get(fmt.name, fmt) is not fmt:
        raise OptionError(f"the name {fmt.name!r} is taken by another KV format")
    added = fmt.name not in KV_FORMATS
    KV_FORMATS[fmt.name] = fmt
    try:
        yield
    finally:
        if added:
            del KV_FORMATS[fmt.name]
