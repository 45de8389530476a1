"""`LLM`: texts in, texts out, many at once. For scripts; a server uses `AsyncEngine`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from pocketllm.engine.engine import Engine
from pocketllm.engine.request import FinishReason, RequestOutput
from pocketllm.engine.sampled import TokenLogprobs
from pocketllm.errors import OptionError, PocketLLMError, QueueFull, RequestError
from pocketllm.models.registry import Checkpoint, read_model
from pocketllm.options import EngineOptions, SamplingParams
from pocketllm.text.chat import ChatTemplate
from pocketllm.text.stream import TextStream
from pocketllm.text.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Sequence[int]
Conversation = Sequence[dict[str, Any]]


@dataclass
class Generation:
    """What became of one prompt. Either `error` is set, or `text` and `token_ids` hold the whole answer."""

    index: int  # of the prompt in the call
    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    slot: int | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class TextDelta:
    """News of one prompt while a batch is being generated: `text` is what was added."""

    generation: Generation
    text: str
    new_token_ids: tuple[int, ...]


class LLM:
    """A model with its tokenizer and an engine."""

    def __init__(
        self,
        model: str | Path | Checkpoint | None = None,
        options: EngineOptions | None = None,
        **option_values: Any,
    ) -> None:
        """model: folder, GGUF file, hub id or None (the embedded model); options and errors as for `Engine`."""
        if options is not None and option_values:
            raise OptionError("give either options or single options by name, not both")
        options = options or EngineOptions.of(**option_values)
        checkpoint = model if isinstance(model, Checkpoint) else read_model(model, options.load_format)
        self.tokenizer: Tokenizer | None = load_tokenizer(checkpoint.path) if checkpoint.path is not None else None
        if self.tokenizer is not None:  # a GGUF file names one end token; its vocabulary may hold the family's second
            ends = dict.fromkeys((*checkpoint.config.eos_token_ids, *self.tokenizer.eos_ids))
            checkpoint = replace(checkpoint, config=replace(checkpoint.config, eos_token_ids=tuple(ends)))
        self._template: ChatTemplate | None = None
        self.engine = Engine(
            checkpoint, options, vocab_limit=self.tokenizer.vocab_size if self.tokenizer is not None else None
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Generation]:
        """Completes each prompt (a text or token ids). One prompt's error is in its result; the others are completed.

        params: one for all, or one per prompt. progress: show a bar on the terminal.
        """
        batch = _as_batch(prompts)
        results: dict[int, Generation] = {}
        with Progress(disable=not progress, transient=True) as bar:
            task = bar.add_task("generating", total=len(batch))
            for delta in self.stream(batch, params):
                results[delta.generation.index] = delta.generation
                if delta.generation.finish_reason is not None:
                    bar.advance(task)
        return [results[i] for i in range(len(batch))]

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **template_values: Any,
    ) -> list[Generation]:
        """Answers each conversation, a list of {"role": ..., "content": ...}, through the model's chat template.

        One conversation's error, the template's refusal included, is in its result; the others are answered.
        """
        one = bool(conversations) and isinstance(conversations[0], dict)
        batch: list[Any] = [conversations] if one else list(conversations)
        each = self._params(params, len(batch))
        if batch:
            self._chat_template()  # a model that has none can answer nobody
        results: dict[int, Generation] = {}
        prompts: dict[int, list[int]] = {}
        for index, conversation in enumerate(batch):
            try:
                prompts[index] = self.chat_prompt(conversation, **template_values)
            except PocketLLMError as error:
                results[index] = Generation(index, [], finish_reason="error", error=error)
        answers = self.generate(list(prompts.values()), [each[index] for index in prompts], progress=progress)
        for index, answer in zip(prompts, answers, strict=True):
            results[index] = replace(answer, index=index)
        return [results[index] for index in range(len(batch))]

    def chat_prompt(self, conversation: Conversation, **template_values: Any) -> list[int]:
        """Token ids of a conversation with the generation prompt; RequestError if the template refuses it."""
        template = self._chat_template()
        if isinstance(conversation, str) or not isinstance(conversation, Sequence):
            raise RequestError(f"{conversation!r}: a conversation is a list of messages, dicts with role and content")
        return self._tokenizer().encode(template.render(list(conversation), **template_values), add_special=False)

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            self._template = ChatTemplate.of(self._tokenizer())
        return self._template

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[TextDelta]:
        """As `generate`, giving each prompt's news as it comes, from all of them interleaved.

        Leaving the iterator early ends what is still running.
        """
        each = self._params(params, len(prompts))
        pending = list(reversed(list(enumerate(prompts))))
        running: dict[str, tuple[Generation, TextStream | None]] = {}
        try:
            while pending or running:
                yield from self._submit(pending, each, running)
                outputs = self.engine.step()
                if not outputs and self.engine.stalled:
                    raise RequestError("all slots are held by their callers: release one, or build with more slots")
                for output in outputs:
                    if output.request_id in running:
                        yield self._deliver(output, running)
        finally:
            for request_id in running:
                self.engine.end_request(request_id)

    @staticmethod
    def _params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        """One for each of `count` prompts; RequestError if they are not SamplingParams, or not so many."""
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * count
        for one in each:
            if not isinstance(one, SamplingParams):
                raise RequestError(
                    f"{one!r} is no SamplingParams: write SamplingParams(max_tokens=...), or one per prompt"
                )
        if len(each) != count:
            raise RequestError(f"{count} prompts but {len(each)} SamplingParams: give one, or one per prompt")
        return each

    def _submit(
        self,
        pending: list[tuple[int, Prompt]],
        params: Sequence[SamplingParams],
        running: dict[str, tuple[Generation, TextStream | None]],
    ) -> Iterator[TextDelta]:
        """Queue what the engine takes; a prompt it refuses for good is news at once."""
        while pending:
            index, prompt = pending[-1]
            generation = Generation(index, [])
            try:
                generation.prompt_ids = (
                    self._tokenizer().encode(prompt) if isinstance(prompt, str) else self.engine.check_tokens(prompt)
                )
                stream = TextStream(self.tokenizer, params[index].stop) if self.tokenizer is not None else None
                if params[index].stop and stream is None:
                    raise RequestError("stop strings need a tokenizer, and this model has none: use stop_token_ids")
                request_id = self.engine.add_request(generation.prompt_ids, params[index])
                running[request_id] = generation, stream
            except QueueFull:
                return
            except PocketLLMError as error:
                generation.error, generation.finish_reason = error, "error"
                yield TextDelta(generation, "", ())
            pending.pop()

    def _deliver(self, output: RequestOutput, running: dict[str, tuple[Generation, TextStream | None]]) -> TextDelta:
        generation, stream = running[output.request_id]
        generation.slot = output.slot
        generation.num_cached_tokens = output.num_cached_tokens
        generation.error, generation.finish_reason = output.error, output.finish_reason
        text, tokens = "", output.new_token_ids
        if stream is not None:
            for i, token in enumerate(
                tokens
            ):  # one by one: what comes after a stop string in the same step does not count
                text += stream.push((token,))
                if stream.stopped:
                    tokens = tokens[: i + 1]
                    break
            if stream.stopped and not output.finished:
                self.engine.end_request(output.request_id, "stop")
            if stream.stopped:
                generation.finish_reason = "stop"
            if generation.finish_reason is not None:
                text += stream.finish()
        generation.text += text
        generation.token_ids += tokens
        generation.logprobs += output.logprobs[: len(tokens)]
        if generation.finish_reason is not None:
            del running[output.request_id]
        return TextDelta(generation, text, tokens)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("a shape of dummy weights has no tokenizer: give token ids, or a folder that has one")
        return self.tokenizer


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single text, or a single list of token ids, is a batch of one."""
    values: Sequence[Any] = prompts
    if not isinstance(values, Sequence):
        raise RequestError(f"{type(values).__name__}: a prompt is a text or a list of token ids, several are a list")
    single = isinstance(values, str) or (len(values) > 0 and isinstance(values[0], int))
    return [values] if single else list(values)
