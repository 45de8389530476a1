"""What all commands share towards the terminal: where text goes, how an error looks, what an exit status means.

Exit status: 0 done; 1 done, but the answer is no (`demo`: tokens differ; `plan`: does not fit); 2 an error; 130 ctrl-C.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from pocketllm.cli.flags import in_flags
from pocketllm.errors import PocketLLMError

ERROR, INTERRUPTED = 2, 130
_WIDE = 200


def stdout() -> Console:
    """Where answers and tables go. A pipe or a file has no width that a table must be cut to, unless COLUMNS names one."""
    width = None if sys.stdout.isatty() else shutil.get_terminal_size((_WIDE, 1)).columns
    return Console(highlight=False, width=width)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def print_json(values: Mapping[str, Any]) -> None:
    """The one line that a command with --json prints."""
    typer.echo(json.dumps(values, ensure_ascii=False))


def print_error(error: Exception | str) -> None:
    stderr().print(Text(f"error: {in_flags(str(error))}", style="red"), soft_wrap=True)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose expected errors are one red line on stderr, and which ends quietly on ctrl-C."""

    @functools.wraps(function)
    def run(*args: Any, **values: Any) -> None:
        try:
            function(*args, **values)
        except PocketLLMError as error:
            print_error(error)
            raise typer.Exit(ERROR) from None
        except KeyboardInterrupt:
            stderr().print("interrupted", style="dim")
            raise typer.Exit(INTERRUPTED) from None

    return run
