"""`pocketllm chat`: talk to a model in the terminal; each conversation has its own slot."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pocketllm.cli import console
from pocketllm.cli.flags import ENGINE_FLAGS, PLAN_ONLY, SAMPLING_FLAGS, with_flags, without
from pocketllm.errors import PocketLLMError, RequestError
from pocketllm.options import EngineOptions, SamplingParams

if TYPE_CHECKING:
    from pocketllm.cli.chat_room import Answer, ChatRoom

HELP = {
    "/new [NAME]": "begin a conversation in a free slot",
    "/switch NAME": "go on with another conversation (or its number)",
    "/fork [NAME]": "copy this conversation to a free slot; what was said is shared, not computed again",
    "/list": "all conversations",
    "/close": "end this conversation and free its slot",
    "/system TEXT": "set the system message (none: remove it)",
    "/set NAME VALUE": "set a sampling parameter, such as temperature 0.7 or max_tokens 200",
    "/retry": "answer the last question again",
    "/help": "this list",
    "/quit": "leave (also ctrl-D)",
}


@with_flags("options", without(ENGINE_FLAGS, *PLAN_ONLY), EngineOptions.of)
@with_flags("given", without(SAMPLING_FLAGS, "logprobs"), lambda **given: given)
def chat(
    model: Annotated[
        str | None, typer.Argument(help="Folder, GGUF file or hub id (default: the embedded model).")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message of the first conversation.")] = None,
    *,
    options: EngineOptions,
    given: dict[str, Any],
) -> None:
    """Chat in the terminal, with several conversations side by side. Ctrl-C stops an answer, /help lists the commands.

    Sampling parameters that are not given come from the model's own generation config.
    """
    SamplingParams.of(**given)  # before the model is loaded
    from pocketllm.cli.chat_room import ChatRoom
    from pocketllm.llm import LLM

    out = console.stdout()
    with out.status(Text("loading the model", style="dim"), spinner="dots", spinner_style="dim"):
        llm = LLM(model, options)
        defaults: dict[str, Any] = {"max_tokens": 512, **llm.engine.config.generation_defaults}
        if "top_k" in defaults:
            defaults["top_k"] = int(defaults["top_k"])
        room = ChatRoom(llm, SamplingParams.of(**{**defaults, **given}))
    if system is not None:
        room.set_system(system)
    plan = llm.engine.plan
    out.print(
        Text(f"{llm.engine.checkpoint.name} · {plan.kv.num_slots} slots of {plan.max_context} tokens · /help", "dim")
    )
    if sys.stdin.isatty():
        import readline  # noqa: F401 (gives `input` a history and line editing)
    Terminal(room, out).run()


class Terminal:
    """Reads lines, runs commands, shows answers."""

    def __init__(self, room: ChatRoom, out: Console) -> None:
        self._room, self._out = room, out
        self._commands: dict[str, Callable[[str], None]] = {
            "/new": lambda name: self._enter("new conversation", room.new(name)),
            "/fork": lambda name: self._enter("fork", room.fork(name)),
            "/switch": lambda which: self._enter("switched to", room.switch(which)),
            "/close": lambda _: self._enter("closed; now in", room.close()),
            "/list": lambda _: self._list(),
            "/system": self._system,
            "/set": self._set,
            "/retry": lambda _: self._show(room.retry()),
            "/help": lambda _: self._help(),
        }

    def run(self) -> None:
        while True:
            try:
                line = self._read()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._say("\n/quit leaves")
                continue
            if line in ("/quit", "/exit"):
                return
            if line:
                self.handle(line)

    def handle(self, line: str) -> None:
        """One line: a command, or something to say. Errors are shown, and the chat goes on."""
        try:
            if not line.startswith("/"):
                self._show(self._room.ask(line))
                return
            word, _, rest = line.partition(" ")
            if word not in self._commands:
                raise RequestError(f"unknown command {word}: /help lists them")
            self._commands[word](rest.strip())
        except PocketLLMError as error:
            self._out.print(Text(str(error), style="red"), soft_wrap=True)

    def _read(self) -> str:
        prompt = f"{self._room.current.name} > " if sys.stdin.isatty() else ""
        return input(prompt).strip()

    def _show(self, pieces: Generator[str, None, None]) -> None:
        with stop_on_interrupt() as stopped:
            for piece in pieces:
                self._out.out(piece, end="", highlight=False)
                self._out.file.flush()
                if stopped():
                    break
            pieces.close()  # an abandoned generator ends its request here, not sometime
        self._out.print()
        self._say(_figures(self._room.answer))

    def _enter(self, what: str, conversation: Any) -> None:
        self._say(f"{what} {conversation.name} (slot {conversation.slot})")

    def _list(self) -> None:
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        for column in ("", "name", "slot", "turns", "cached tokens"):
            table.add_column(column, justify="left" if column == "name" else "right")
        for line in self._room.lines():
            style = "bold" if line.current else ""
            numbers = (str(line.slot), str(line.turns), str(line.tokens))
            table.add_row(f"{'*' if line.current else ' '}{line.number}", Text(line.name), *numbers, style=style)
        self._out.print(table)

    def _system(self, text: str) -> None:
        self._room.set_system(text)
        self._say("system message set" if text else "system message removed")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not value.strip():
            raise RequestError("write /set NAME VALUE, such as /set temperature 0.7")
        params = self._room.set_param(name, value.strip())
        self._say(f"{name} = {getattr(params, name)}")

    def _help(self) -> None:
        table = Table.grid(padding=(0, 3))
        for usage, meaning in HELP.items():
            table.add_row(Text(usage), Text(meaning, style="dim"))
        self._out.print(table)

    def _say(self, text: str) -> None:
        self._out.print(Text(text, style="dim"))


def _figures(answer: Answer) -> str:
    rate = f", {answer.tok_s:.1f} tok/s" if answer.tok_s else ""
    ended = {"abort": ", stopped", "length": ", cut at the token limit"}.get(answer.finish_reason or "", "")
    reused = f"{answer.reused_tokens} of {answer.prompt_tokens} prompt tokens reused"
    return f"{answer.num_tokens} tokens{rate}, {reused}{ended}"


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """While inside, ctrl-C sets a flag instead of raising: an engine step is never torn apart half-way."""
    pressed = False

    def note(signum: int, frame: object) -> None:
        nonlocal pressed
        pressed = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)
