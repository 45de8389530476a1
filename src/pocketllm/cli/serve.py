"""`pocketllm serve`: the OpenAI and Anthropic APIs over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from pocketllm.cli import console
from pocketllm.cli.flags import ENGINE_FLAGS, PLAN_ONLY, QUEUE_FLAG, SERVER_FLAGS, with_flags, without
from pocketllm.errors import OptionError
from pocketllm.options import EngineOptions, ServerOptions


@with_flags("options", (*without(ENGINE_FLAGS, *PLAN_ONLY), QUEUE_FLAG), EngineOptions.of)
@with_flags("server", SERVER_FLAGS, ServerOptions.of)
def serve(
    model: Annotated[
        str | None, typer.Argument(help="Folder, GGUF file or hub id (default: the embedded model).")
    ] = None,
    *,
    options: EngineOptions,
    server: ServerOptions,
) -> None:
    """Serve a model over HTTP to OpenAI and Anthropic clients.

    The routes and their fields are in docs/server.md. Ctrl-C or SIGTERM lets running requests finish first.
    """
    try:
        from pocketllm.server.logs import set_up_logging
        from pocketllm.server.run import Server
        from pocketllm.server.service import Service
    except ModuleNotFoundError as error:
        raise OptionError(f"{error.name} is not installed: the server needs pip install 'pocketllm[server]'") from None
    from pocketllm.llm import LLM

    out = console.stderr()
    set_up_logging(server.log_format)
    with out.status(Text("loading the model", style="dim"), spinner="dots", spinner_style="dim"):
        service = Service(LLM(model, options), server)

    def show(url: str) -> None:
        slots = options.max_batch_size
        out.print(Text(f"{service.model} · {slots} slots of {service.max_context} tokens · {url}"), soft_wrap=True)

    Server(service, on_start=show).run()
