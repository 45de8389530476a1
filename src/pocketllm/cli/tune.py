"""`pocketllm tune`: finds the tile sizes of the attention kernels for this GPU and a model's heads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pocketllm.cli import console
from pocketllm.errors import OptionError

if TYPE_CHECKING:
    from pocketllm.models.config import ModelConfig


def tune(
    model: Annotated[
        str | None, typer.Argument(help="Folder, GGUF file or shape name (default: the embedded model).")
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--kv-cache-dtype", metavar="NAME", help="A KV format to tune for; repeatable (default: all)."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where to write the table (default: where it is looked for).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Time the attention kernels on the first GPU, and keep the best tile sizes for later runs.

    Takes minutes for each KV format. The table goes to ~/.config/pocketllm/tuned, which is looked at before the tables
    that come with the package. --json keys: table (its path), entries.
    """
    import torch

    from pocketllm.cache.formats import KV_FORMATS, kv_format
    from pocketllm.engine.device import set_cache_aside

    chosen = [kv_format(name) for name in formats or [name for name in KV_FORMATS if name != "fp32"]]
    if not torch.cuda.is_available():
        raise OptionError("tune measures kernels on a GPU, and there is none here")
    try:
        from pocketllm.kernels.triton import tune as tuner
        from pocketllm.kernels.triton.tuning import device_name, device_table, user_folder
    except ModuleNotFoundError as error:
        raise OptionError(f"{error.name} is not installed: tune is for the Triton kernels") from None
    config, device, out = _config(model), torch.device("cuda", 0), console.stderr()
    set_cache_aside(device)
    found = []
    for kind in chosen:
        out.print(f"[bold]{kind.name}[/]")
        best: dict[type, float] = {}

        def note(sizes: object, times: list[float], best: dict[type, float] = best) -> None:
            mean = tuner.geometric_mean(times)
            if mean < best.get(type(sizes), float("inf")):
                best[type(sizes)] = mean
                out.print(f"{mean:9.1f} us  {sizes}", highlight=False, soft_wrap=True)

        found.append(tuner.tune_format(kind, config.head_dim, config.num_heads, config.num_kv_heads, device, note))
    name = device_name(device)
    path = tuner.write_table(folder or user_folder(), name, device_table(name)["attention"], found)
    if json:
        console.print_json({"table": str(path), "entries": [tuner.as_entry(entry) for entry in found]})
    else:
        typer.echo(path)


def _config(model: str | None) -> ModelConfig:
    from pocketllm.models.registry import read_model, shape_names

    return (read_model(model, "dummy") if model in shape_names() else read_model(model)).config
