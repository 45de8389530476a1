"""`ChatRoom`: several conversations, each in a slot of its own of one engine. No terminal here: texts in, texts out.

A turn sends the whole conversation as tokens to the conversation's slot; the engine computes only what the slot does
not hold yet, so a turn costs its own length and not the conversation's.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from pocketllm.engine.request import FinishReason
from pocketllm.errors import NoFreeSlot, OptionError, OutOfPages, PocketLLMError, RequestError, SlotError
from pocketllm.llm import LLM
from pocketllm.options import SamplingParams
from pocketllm.text.stream import TextStream


@dataclass
class Conversation:
    name: str
    slot: int
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def turns(self) -> int:
        return sum(message["role"] == "user" for message in self.messages)


@dataclass
class Answer:
    """One turn's answer and what it took. finish_reason is None while it is being written."""

    text: str = ""
    num_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt: they were in the slot already
    finish_reason: FinishReason | None = None
    first: float | None = None  # perf_counter seconds of the first and the last token
    last: float | None = None

    @property
    def tok_s(self) -> float | None:
        """Tokens per second since the first token."""
        if self.first is None or self.last is None or self.last <= self.first:
            return None
        return (self.num_tokens - 1) / (self.last - self.first)


@dataclass(frozen=True)
class Line:
    """A conversation in the list."""

    number: int  # from 1, as `switch` takes it
    name: str
    slot: int
    turns: int
    tokens: int  # in the slot's cache
    current: bool


class ChatRoom:
    """`ask` and `retry` give an answer piece by piece; leaving their iterator stops the answer and keeps its part.

    All other methods act at once; PocketLLMError says what is wrong and changes nothing.
    """

    def __init__(self, llm: LLM, params: SamplingParams | None = None) -> None:
        self.llm = llm
        self.params = params or SamplingParams()
        self.conversations: list[Conversation] = []
        self.answer = Answer()  # the last one
        self._made = 0
        self.current = self.new()

    # -- conversations -----------------------------------------------------------------------------------------------

    def new(self, name: str = "") -> Conversation:
        """Begin a conversation in a free slot and make it the current one."""
        name = self._new_name(name)
        with_system = [m for m in self.current.messages if m["role"] == "system"] if self.conversations else []
        return self._enter(Conversation(name, self._take_slot(None), list(with_system)))

    def fork(self, name: str = "") -> Conversation:
        """A copy of the current conversation in a slot of its own, sharing the pages of what was said so far."""
        name = self._new_name(name)
        return self._enter(Conversation(name, self._take_slot(self.current.slot), list(self.current.messages)))

    def switch(self, which: str) -> Conversation:
        """Make another conversation the current one, by name or by number."""
        for number, conversation in enumerate(self.conversations, 1):
            if which in (conversation.name, str(number)):
                self.current = conversation
                return conversation
        names = ", ".join(f"{n} {c.name}" for n, c in enumerate(self.conversations, 1))
        raise RequestError(f"no conversation {which!r}: there are {names}")

    def close(self) -> Conversation:
        """End the current conversation and free its slot; the next one, or a fresh one, is current then."""
        index = self.conversations.index(self.current)
        self.llm.engine.release_slot(self.current.slot)
        del self.conversations[index]
        if not self.conversations:
            return self.new()
        self.current = self.conversations[min(index, len(self.conversations) - 1)]
        return self.current

    def lines(self) -> list[Line]:
        return [
            Line(n, c.name, c.slot, c.turns, self.llm.engine.slot_length(c.slot), c is self.current)
            for n, c in enumerate(self.conversations, 1)
        ]

    def _enter(self, conversation: Conversation) -> Conversation:
        self._made += 1
        self.conversations.append(conversation)
        self.current = conversation
        return conversation

    def _new_name(self, name: str) -> str:
        name = name or f"chat-{self._made + 1}"
        if any(name == c.name for c in self.conversations):
            raise RequestError(f"there is a conversation {name!r} already: choose another name")
        if name.isdigit():
            raise RequestError(f"a name of digits only, {name!r}, would look like a number: choose another")
        return name

    def _take_slot(self, parent: int | None) -> int:
        engine = self.llm.engine
        try:
            return engine.acquire_slot() if parent is None else engine.fork_slot(parent)
        except NoFreeSlot:
            slots = engine.plan.kv.num_slots
            raise NoFreeSlot(f"all {slots} slots are busy: /close frees one, or start with more --slots") from None
        except OutOfPages:
            raise OutOfPages("the page pool is full: /close a conversation, or start with more --kv-tokens") from None

    # -- settings ----------------------------------------------------------------------------------------------------

    def set_system(self, text: str) -> None:
        """Set the current conversation's system message (an empty one removes it)."""
        rest = [m for m in self.current.messages if m["role"] != "system"]
        self.current.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def set_param(self, name: str, value: str) -> SamplingParams:
        """Set a sampling parameter, for all conversations, from its text."""
        current = {f.name: getattr(self.params, f.name) for f in dataclasses.fields(SamplingParams)}
        if name not in current:
            SamplingParams.of(**{name: value})  # says which one was likely meant
        if name in ("logit_bias", "stop_token_ids", "logprobs"):
            raise OptionError(f"{name} can't be set in a chat")
        self.params = SamplingParams.of(**{**current, name: _value(current[name], value)})
        return self.params

    # -- turns -------------------------------------------------------------------------------------------------------

    def ask(self, text: str) -> Generator[str, None, None]:
        """The answer to `text`, piece by piece; `self.answer` has its figures. A failed turn is taken back."""
        return self._turn(self.current.messages, text)

    def retry(self) -> Generator[str, None, None]:
        """Answer the last question again, forgetting the answer it got."""
        messages = self.current.messages
        last = next((i for i in range(len(messages) - 1, -1, -1) if messages[i]["role"] == "user"), None)
        if last is None:
            raise RequestError("nothing was asked yet")
        return self._turn(messages[:last], messages[last]["content"])

    def _turn(self, earlier: list[dict[str, str]], text: str) -> Generator[str, None, None]:
        conversation, before = self.current, self.current.messages
        conversation.messages = [*earlier, {"role": "user", "content": text}]
        try:
            yield from self._generate(conversation)
        except PocketLLMError:
            conversation.messages = before
            raise

    def _generate(self, conversation: Conversation) -> Generator[str, None, None]:
        engine, answer = self.llm.engine, Answer()
        self.answer = answer
        prompt = self.llm.chat_prompt(conversation.messages)
        answer.prompt_tokens = len(prompt)
        assert self.llm.tokenizer is not None  # or there had been no prompt
        stream = TextStream(self.llm.tokenizer, self.params.stop)
        request_id = engine.add_request(prompt, self._params_for(len(prompt)), slot=conversation.slot)
        try:
            while answer.finish_reason is None:
                outputs = engine.step()
                if not outputs and engine.stalled:
                    raise OutOfPages("the page pool is too full for this turn: /close frees a conversation's pages")
                if not outputs:
                    yield ""  # a chunk of the prompt is done: the caller may want to stop here
                for output in outputs:
                    if output.error is not None:
                        raise output.error
                    answer.last = time.perf_counter()
                    answer.first = answer.first or answer.last
                    answer.num_tokens = output.num_output_tokens
                    answer.reused_tokens = output.num_cached_tokens
                    piece = stream.push(output.new_token_ids)
                    answer.finish_reason = "stop" if stream.stopped is not None else output.finish_reason
                    if answer.finish_reason is not None:
                        piece += stream.finish()
                    answer.text += piece
                    yield piece
        finally:
            if answer.finish_reason is None:
                answer.finish_reason = "abort"
            engine.end_request(request_id)
            conversation.messages.append({"role": "assistant", "content": answer.text})

    def _params_for(self, prompt_tokens: int) -> SamplingParams:
        """The room's parameters with max_tokens cut to what the slot still holds."""
        room = self.llm.engine.plan.max_context - prompt_tokens
        if room < 1:
            raise SlotError(
                f"this conversation has {prompt_tokens} tokens and a slot holds {self.llm.engine.plan.max_context}: "
                "/new begins another, or start with more --context"
            )
        wanted = self.params.max_tokens
        if wanted is None or wanted <= room:
            return self.params
        return dataclasses.replace(self.params, max_tokens=room, min_tokens=min(self.params.min_tokens, room))


def _value(current: Any, text: str) -> Any:
    """`text` as the kind of value that the parameter has now."""
    if text == "none":
        return () if isinstance(current, tuple) else None
    if isinstance(current, bool):
        if text not in ("on", "off"):
            raise OptionError(f"{text!r}: write on or off")
        return text == "on"
    if isinstance(current, tuple):
        return (text,)
    try:
        return float(text) if isinstance(current, float) else int(text)
    except ValueError:
        raise OptionError(f"{text!r} is not a number") from None
