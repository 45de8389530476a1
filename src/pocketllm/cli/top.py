"""`pocketllm top`: what the slots of a running server do, live."""

from __future__ import annotations

import contextlib
import json as jsonlib
import time
from typing import Annotated, Any

import typer

from pocketllm.cli import console
from pocketllm.cli.top_view import Reading, picture
from pocketllm.errors import OptionError, PocketLLMError
from pocketllm.options import ServerOptions

_TIMEOUT = 30  # seconds: a server answers between two steps, and a step of a large prefill may take a while


def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option("--api-key", metavar="KEY", help="The server's key (default: POCKETLLM_API_KEY).")
    ] = None,
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", help="Time between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, an interval apart, print, and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --once: print one line of JSON.")] = False,
) -> None:
    """Watch a running server: slots, tokens per second, queue, pages and memory. Ctrl-C ends it.

    --json keys: those of the server's /slots (docs/server.md), and decode_tok_s and prefill_tok_s over the interval.
    """
    if interval <= 0:
        raise OptionError(f"--interval {interval}: must be above 0")
    if json and not once:
        raise OptionError("--json prints one reading: give --once too")
    out = console.stdout()
    if not once and not out.is_terminal:
        raise OptionError("the output is no terminal: give --once for one reading")
    server = _Server(url, api_key)
    reading = Reading(server.slots())
    if once:
        time.sleep(interval)
        reading = Reading(server.slots(), reading)
        if json:
            console.print_json(reading.as_json())
        else:
            out.print(picture(reading))
        return
    with contextlib.suppress(KeyboardInterrupt):
        _watch(server, reading, interval)


def _watch(server: _Server, reading: Reading, interval: float) -> None:
    """Until ctrl-C. A server that goes away may come back: its last state stays in sight, with a line that says so."""
    from rich.live import Live

    with Live(picture(reading), console=console.stdout(), screen=True, auto_refresh=False) as live:
        live.refresh()
        while True:
            time.sleep(interval)
            trouble = None
            try:
                reading = Reading(server.slots(), reading)
            except PocketLLMError as error:
                trouble = str(error)
            live.update(picture(reading, trouble), refresh=True)


class _Server:
    """Reads /slots over HTTP."""

    def __init__(self, url: str, api_key: str | None) -> None:
        base = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        keys = ServerOptions(api_keys=(api_key,) if api_key is not None else ()).keys()
        self._base, self._url = base, base + "/slots"
        self._headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}

    def slots(self) -> dict[str, Any]:
        """PocketLLMError, with what to do, if the server does not answer as one of ours does."""
        import urllib.error
        import urllib.request

        try:
            request = urllib.request.Request(self._url, headers=self._headers)
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                state: dict[str, Any] = jsonlib.load(answer)
                state["uptime"], state["slots"], state["memory"]  # what another server's /slots does not have
                return state
        except urllib.error.HTTPError as error:
            if error.code == 401:
                hint = "its key is another one" if self._headers else "give its key as --api-key or POCKETLLM_API_KEY"
                raise PocketLLMError(f"the server at {self._base} refuses: {hint}") from None
            raise PocketLLMError(f"{self._url} answers with status {error.code}: is it a PocketLLM server?") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, OSError):
                reason = getattr(error, "reason", error)
                raise PocketLLMError(
                    f"no server answers at {self._base} ({reason}): start one with `pocketllm serve`, or give its URL"
                ) from None
            raise PocketLLMError(f"{self._url} is not what a PocketLLM server answers: check the URL") from None
