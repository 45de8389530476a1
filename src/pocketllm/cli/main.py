"""The `pocketllm` command, one subcommand a file. They import heavy modules when they run, so `--help` is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from pocketllm.cli.bench import bench
from pocketllm.cli.chat import chat
from pocketllm.cli.console import command
from pocketllm.cli.demo import demo
from pocketllm.cli.flags import EngineCommand
from pocketllm.cli.generate import generate
from pocketllm.cli.kv_eval import kv_eval
from pocketllm.cli.plan import plan
from pocketllm.cli.serve import serve
from pocketllm.cli.top import top
from pocketllm.cli.tune import tune

app = typer.Typer(
    help="Qwen inference for several long conversations at once. Without MODEL, commands use a small embedded model.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("pocketllm"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


for function in (demo, generate, chat, serve, plan, bench, kv_eval):
    app.command(cls=EngineCommand)(command(function))
app.command()(command(top))
app.command()(command(tune))


def main() -> None:
    app()
