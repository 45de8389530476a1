"""`pocketllm bench`: tokens per second with all slots busy, and how much of the memory's bandwidth that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from pocketllm.cli import console
from pocketllm.cli.flags import DRAFTS, ENGINE_FLAGS, PLAN_ONLY, integers, with_flags, without
from pocketllm.errors import OptionError
from pocketllm.options import EngineOptions

if TYPE_CHECKING:
    from pocketllm.cli.bench_run import Row

# Each row of the table has its own slots, context and KV type.
_OWN = ("max_batch_size", "max_context", "kv_tokens", "kv_cache_dtype")


@with_flags("given", without(ENGINE_FLAGS, *PLAN_ONLY, *DRAFTS, *_OWN), lambda **given: given)
def bench(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder, GGUF file, hub id, or a shape with --load-format dummy (default: the embedded model)."
        ),
    ] = None,
    slots: Annotated[str, typer.Option("--slots", metavar="N,N,...", help="Numbers of slots.")] = "1,4",
    context: Annotated[
        str, typer.Option("--context", metavar="N,N,...", help="Tokens in each slot's cache before the first step.")
    ] = "256",
    kv_cache_dtype: Annotated[
        str,
        typer.Option("--kv-cache-dtype", metavar="NAME,...", help="Storage of K and V; auto: the compute type. Also:"),
    ] = "auto",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Decode steps measured per row.")] = 32,
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Prompt tokens of the prefill measurement.")] = 256,
    fill: Annotated[
        str,
        typer.Option(
            "--fill",
            metavar="auto|prefill|random",
            help="How contexts come about: computed, or random values written to the cache; auto: random where "
            "computing would take more than 10 s.",
        ),
    ] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Measure prefill and full decode steps, sampling included.

    --json keys: model, kernels, device, threads, tensor_parallel, bandwidth (bytes/s this machine reads, measured in
    this run), steps, prompt, prefill_chunk, date, and rows, each with slots, context, kv, filled (prefill or random),
    step_ms (median), tok_s (all slots), prefill_tok_s, bytes_per_step, share_of_bandwidth, gb_s, memory_planned and
    memory_used (bytes of rank 0: on a GPU at most, by its tensors; on a CPU of the whole process), families_ms. A single
    row's keys stand at the top too.

    bytes_per_step, of one rank: the weights a step reads (linear layers, head, one embedding row a slot; of a sparse
    layer at most slots x top_k experts), the KV of all contexts, and the recurrent state, read and written.

    families_ms, of rank 0 on a GPU (elsewhere null): a step's milliseconds by kernel family (bridge, products, delta
    rule, attention, norms, ranks, rest), from torch's profiler, in a few steps after the measured ones. Where kernels
    overlap, the time is that of the one that started first, so the families add up to the time the device was busy; the
    profiler may slow it. A kernel that waits for other ranks counts that wait.
    """
    if fill not in ("auto", "prefill", "random"):
        raise OptionError(f"--fill {fill!r}: choose one of auto, prefill, random")
    slot_counts, contexts = integers("--slots", slots), integers("--context", context)
    formats = [name.strip() for name in kv_cache_dtype.split(",")]
    options = EngineOptions.of(**given)
    from pocketllm.cli.bench_run import Bench

    run = Bench(model, options, steps=steps, prompt=prompt, fill=fill)
    out = console.stdout()
    rows = []
    for count in slot_counts:
        for name in formats:
            for tokens in contexts:
                if not json and out.is_terminal:
                    with out.status(Text(f"{count} slots, {tokens} tokens, {name}", style="dim")):
                        rows.append(run.row(count, tokens, name))
                else:
                    rows.append(run.row(count, tokens, name))
    if json:
        values = {**run.facts(), "rows": [vars(row) for row in rows]}
        console.print_json({**values, **vars(rows[0])} if len(rows) == 1 else values)
    else:
        _show(run.facts(), rows)


def _show(facts: dict[str, Any], rows: list[Row]) -> None:
    out = console.stdout()
    count = facts["threads"]
    threads = f", {count} thread{'s' * (count > 1)}" if facts["device"] == "cpu" else ""
    out.print(f"[bold]{facts['model']}[/] on {facts['device']}{threads}, {facts['kernels']} kernels")
    chunks = f" in chunks of {facts['prefill_chunk']}" if facts["prompt"] > facts["prefill_chunk"] else ""
    bandwidth = f"{facts['bandwidth'] / 1e9:.1f} GB/s"
    out.print(f"read bandwidth {bandwidth}, prompt {facts['prompt']} tokens{chunks}", style="dim")
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in (
        "slots",
        "context",
        "kv",
        "ms/step",
        "tok/s",
        "prefill tok/s",
        "MB/step",
        "GB/s",
        "of bandwidth",
        "GiB used",
        "planned",
    ):
        table.add_column(name, justify="left" if name == "kv" else "right")
    for row in rows:
        table.add_row(
            str(row.slots),
            str(row.context) + ("*" if row.filled == "random" else ""),
            row.kv,
            f"{row.step_ms:.2f}",
            f"{row.tok_s:.1f}",
            f"{row.prefill_tok_s:.1f}",
            f"{row.bytes_per_step / 1e6:.1f}",
            f"{row.gb_s:.1f}",
            f"{row.share_of_bandwidth:.0%}",
            "?" if row.memory_used is None else f"{row.memory_used / 2**30:.2f}",
            f"{row.memory_planned / 2**30:.2f}",
        )
    out.print(table)
    if any(row.filled == "random" for row in rows):
        out.print("* random values in the cache instead of a computed context", style="dim")
    if any(row.families_ms for row in rows):
        out.print("ms of a step by kernel family, from torch's profiler:", style="dim")
        out.print(_families(rows))


def _families(rows: list[Row]) -> Table:
    """Only the families that some row has kernels of."""
    recorded = [(row, row.families_ms) for row in rows if row.families_ms]
    names = [name for name in recorded[0][1] if any(families[name] for _, families in recorded)]
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("slots", "context", "kv", *names, "all"):
        table.add_column(name, justify="left" if name == "kv" else "right")
    for row, families in recorded:
        times = [*(families[name] for name in names), sum(families.values())]
        table.add_row(str(row.slots), str(row.context), row.kv, *(f"{ms:.3f}" for ms in times))
    return table
