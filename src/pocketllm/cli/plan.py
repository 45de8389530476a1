"""`pocketllm plan`: what a model, its slots and their contexts need in memory, before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from pocketllm.cli import console
from pocketllm.cli.flags import ENGINE_FLAGS, in_flags, with_flags, without
from pocketllm.errors import MemoryPlanError, ModelError, OptionError
from pocketllm.options import EngineOptions, parse_bytes

if TYPE_CHECKING:
    from pocketllm.engine.memory_plan import MemoryPlan
    from pocketllm.models.registry import Checkpoint

# The device follows from --gpu-memory; threads and the attention mask change no byte.
_UNUSED = ("device", "threads", "attention_window", "attention_sinks", "load_format")


@with_flags("options", without(ENGINE_FLAGS, *_UNUSED), EngineOptions.of)
def plan(
    model: Annotated[
        str | None,
        typer.Argument(help="Shape name (see --list), folder, GGUF file or hub id (default: the embedded model)."),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Plan for GPUs with this much to use, each.")
    ] = None,
    list_shapes: Annotated[bool, typer.Option("--list", help="List the built-in shapes.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    *,
    options: EngineOptions,
) -> None:
    """Print the memory plan of a model: without --gpu-memory for this machine's CPU memory. Exit 1 if it does not fit.

    --json keys, bytes of one rank: fits, weights, kv, state, tables, sampler, drafts, logits, graphs, workspace, runtime,
    total, budget, left; and model, device, slots, max_context, kv_tokens, kv_cache_dtype, kv_layout, tensor_parallel, notes,
    advice (null if it fits), context_table (KV type -> slots -> largest context per slot). With --list: shapes.
    """
    if list_shapes:
        _list_shapes(json)
        return
    if gpu_memory is not None and options.memory_limit is not None:
        raise OptionError("--gpu-memory plans for GPUs, --memory for the CPU: give one of them")
    import torch

    from pocketllm.engine.device import available_memory
    from pocketllm.engine.memory_advice import check_fits, context_table
    from pocketllm.engine.memory_plan import plan_memory

    device = "cpu" if gpu_memory is None else "cuda"
    budget = parse_bytes(gpu_memory) if gpu_memory is not None else options.memory_limit
    if budget is None:
        budget = available_memory(torch.device("cpu"))
    if budget is None:
        raise OptionError("this system does not say how much memory is free: give --memory or --gpu-memory")
    options = replace(options, memory_limit=None)
    checkpoint = _find(model)
    config, storage = checkpoint.config, checkpoint.storage
    result = plan_memory(config, options, budget, device, storage)
    table = context_table(config, options, budget, device, storage)
    advice = None
    try:
        check_fits(result, config, options, device, storage)
    except MemoryPlanError as error:
        advice = in_flags(str(error))
    if json:
        console.print_json(_as_json(checkpoint, options, device, result, table, advice))
    else:
        _show(checkpoint, options, device, result, table)
    if advice is not None:
        console.print_error(advice)
        raise typer.Exit(1)


def _list_shapes(json: bool) -> None:
    from pocketllm.models.registry import shape_names

    if json:
        console.print_json({"shapes": shape_names()})
    else:
        typer.echo("\n".join(shape_names()))


def _find(model: str | None) -> Checkpoint:
    """Config and storage of a model; of a hub id, which may be large, only the config is fetched."""
    from pocketllm.models.config_hf import config_from_folder
    from pocketllm.models.registry import Checkpoint, ConfigStorage, read_model, shape_names
    from pocketllm.weights.hub import find_config

    if model is None or Path(model).expanduser().exists():
        return read_model(model)
    if model in shape_names():
        return read_model(model, "dummy")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) or model.endswith(".gguf"):
        if "/" not in model:
            raise ModelError(f"{model}: no such file, folder or shape. Shapes: {', '.join(shape_names())}")
        return read_model(model)
    try:
        config = config_from_folder(find_config(model))
    except ModelError as error:
        raise ModelError(f"{error}. Shapes that need no file: `plan --list`") from None
    return Checkpoint(config, None, model, ConfigStorage(config), None)


_MEANINGS = {
    "weights": "as they are kept in memory",
    "state": "recurrent state of all slots",
    "tables": "cos and sin of the positions",
    "sampler": "penalties and counts per slot",
    "drafts": "what the model's own drafts are made of",
    "logits": "of the largest pass",
    "graphs": "recorded passes",
    "workspace": "intermediates of the largest pass",
    "runtime": "the device's libraries (assumed)",
}


def _show(
    checkpoint: Checkpoint, options: EngineOptions, device: str, plan: MemoryPlan, table: dict[str, dict[int, int]]
) -> None:
    from pocketllm.engine.memory_plan import gib

    out, kv = console.stdout(), plan.kv
    per_rank = f", each of {options.tensor_parallel} ranks" if options.tensor_parallel > 1 else ""
    out.print(f"[bold]{checkpoint.name}[/] on {'a GPU' if device == 'cuda' else 'the CPU'}{per_rank}")
    out.print(f"{kv.num_slots} slots of up to {plan.max_context} tokens, KV as {kv.kv_format.name}, {kv.layout}\n")
    parts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    parts.add_column(style="bold")
    parts.add_column(justify="right")
    parts.add_column(style="dim")
    meanings = {**_MEANINGS, "kv": f"{plan.kv_tokens} tokens in {kv.num_pages} pages of {kv.page_size}"}
    for name, size in plan.parts.items():
        if size:
            parts.add_row(name, gib(size), meanings[name])
    parts.add_section()
    parts.add_row("total", gib(plan.total), f"of {gib(plan.budget or 0)}")
    left = plan.left or 0
    parts.add_row("left", f"[{'green' if plan.fits else 'red'}]{gib(left)}[/]", "" if plan.fits else "does not fit")
    out.print(parts)
    for note in plan.notes:
        out.print(f"note: {note}", style="yellow")
    out.print("\n[bold]Largest context per slot[/], by KV type and number of slots")
    contexts = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    contexts.add_column("")
    for slots in next(iter(table.values())):
        contexts.add_column(str(slots), justify="right")
    for name, row in table.items():
        style = "bold" if name == kv.kv_format.name else ""
        contexts.add_row(name, *(str(n) if n else "-" for n in row.values()), style=style)
    out.print(contexts)


def _as_json(
    checkpoint: Checkpoint,
    options: EngineOptions,
    device: str,
    plan: MemoryPlan,
    table: dict[str, dict[int, int]],
    advice: str | None,
) -> dict[str, Any]:
    return {
        "fits": plan.fits,
        "model": checkpoint.name,
        "device": device,
        "slots": plan.kv.num_slots,
        "max_context": plan.max_context,
        "kv_tokens": plan.kv_tokens,
        "kv_cache_dtype": plan.kv.kv_format.name,
        "kv_layout": plan.kv.layout,
        "tensor_parallel": options.tensor_parallel,
        **plan.parts,
        "total": plan.total,
        "budget": plan.budget,
        "left": plan.left,
        "notes": plan.notes,
        "advice": advice,
        "context_table": table,
    }
