"""`pocketllm kv-eval`: what each storage type of K and V costs in quality, measured on a text with a model."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text as Styled

from pocketllm.cli import console
from pocketllm.cli.flags import DRAFTS, ENGINE_FLAGS, PLAN_ONLY, integers, with_flags, without
from pocketllm.errors import OptionError
from pocketllm.options import EngineOptions

if TYPE_CHECKING:
    from pocketllm.cache.formats import KVFormat

# The measurement sets these itself, or (layout, ranks) they change no value.
_OWN = ("max_batch_size", "max_context", "kv_tokens", "kv_cache_dtype", "kv_layout", "tensor_parallel")


@with_flags("given", without(ENGINE_FLAGS, *PLAN_ONLY, *DRAFTS, *_OWN), lambda **given: given, quantization="none")
def kv_eval(
    model: Annotated[
        str | None, typer.Argument(help="Folder, GGUF file or hub id (default: the embedded model).")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option("--text", metavar="FILE", help="UTF-8 text to predict; repeatable, needed.")
    ] = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            "--formats",
            metavar="NAME,...",
            help="Storage types to compare with the plain compute type; all: every one, and public_k8v4, the scheme of "
            "other engines. Also:",
        ),
    ] = "all",
    window: Annotated[
        str, typer.Option("--window", metavar="N,N,...", help="Tokens of a window: each is a context of its own.")
    ] = "1024",
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens read per window size.")] = 16384,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts continued greedily.")] = 8,
    prompt: Annotated[int, typer.Option("--prompt", min=2, help="Tokens of each.")] = 128,
    generate: Annotated[int, typer.Option("--generate", min=1, help="Greedy tokens of each.")] = 128,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw KL divergence against bytes per token.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Compare next-token distributions with those of K and V kept in the compute type, on the same text.

    --json keys: model, kernels, device, threads, quantization, dtype, baseline, date, texts (name, sha256, tokens), rows
    and greedy. A row: kv, window, tokens (predicted), bytes_per_token (all layers), perplexity, change (of perplexity;
    0.01: +1%), change_error (its standard error), kl_mean and kl_p999 (nats; the latter: 99.9% of the tokens lose less),
    top1 (share of tokens with the same likeliest next token). greedy: kv, mean (tokens before the first that differs; all
    generated ones if none does), same (prompts that never differ), prompts, prompt_tokens, generated.
    """
    sizes = integers("--window", window)
    if min(sizes) < 2:
        raise OptionError(f"--window {window!r}: a window of one token predicts nothing, use 2 or more")
    if tokens < max(sizes):
        raise OptionError(f"--tokens {tokens}: less than one window of {max(sizes)}")
    sources = {path: _read(path) for path in text or ()}
    if not sources:
        raise OptionError("give at least one --text FILE to predict")
    from pocketllm.kv_eval import KVEval

    out = console.stderr()
    options = EngineOptions.of(**given)
    with out.status(Styled("loading", style="dim")) as status:

        def progress(news: str) -> None:
            status.update(Styled(news, style="dim"))

        run = KVEval(
            model,
            options,
            _formats(kv_cache_dtype),
            window=max(sizes),
            prompts=prompts,
            prompt_tokens=prompt,
            generated=generate,
        )
        texts = [run.read(path.name, source) for path, source in sources.items()]
        rows = [asdict(loss) for size in sizes for loss in run.losses(texts, size, tokens, progress)]
        greedy = [asdict(divergence) for divergence in run.divergences(texts, progress)]
    values = {
        **run.facts(),
        "texts": [
            {"name": t.name, "sha256": hashlib.sha256(source.encode()).hexdigest(), "tokens": len(t.ids)}
            for t, source in zip(texts, sources.values(), strict=True)
        ],
        "rows": rows,
        "greedy": greedy,
    }
    if plot is not None:
        from pocketllm.cli.kv_eval_plot import draw

        plot.write_text(draw(values), encoding="utf-8")
    if json:
        console.print_json(values)
    else:
        _show(values)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"--text {path}: not UTF-8 at byte {error.start}") from None


def _formats(names: str) -> list[KVFormat]:
    from pocketllm.cache.formats import KV_FORMATS
    from pocketllm.kv_public import PublicK8V4

    public = PublicK8V4()
    known = {**KV_FORMATS, public.name: public}
    if names == "all":
        return list(known.values())
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in chosen:
        if name not in known:
            raise OptionError(f"--formats {name!r}: choose from all, {', '.join(known)}")
    return [known[name] for name in chosen]


def _show(values: dict[str, Any]) -> None:
    out = console.stdout()
    out.print(
        f"[bold]{values['model']}[/] on {values['device']}, {values['kernels']} kernels, {values['dtype']}; "
        f"baseline: K and V in {values['baseline']}"
    )
    out.print(f"text: {', '.join(text['name'] for text in values['texts'])}", style="dim")
    greedy = {row["kv"]: row for row in values["greedy"]}
    for size in dict.fromkeys(row["window"] for row in values["rows"]):
        rows = [row for row in values["rows"] if row["window"] == size]
        out.print(f"\nwindows of {size} tokens, {rows[0]['tokens']} predicted")
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        for name in ("kv", "bytes/token", "perplexity", "change", "+-", "KL mean", "KL 99.9%", "top-1", "greedy"):
            table.add_column(name, justify="left" if name == "kv" else "right")
        for row in rows:
            table.add_row(
                row["kv"],
                str(row["bytes_per_token"]),
                f"{row['perplexity']:.4f}",
                f"{row['change']:+.3%}",
                f"{row['change_error']:.3%}",
                f"{row['kl_mean']:.2e}",
                f"{row['kl_p999']:.2e}",
                f"{row['top1']:.2%}",
                f"{greedy[row['kv']]['mean']:.1f}",
            )
        out.print(table)
    first = values["greedy"][0]
    out.print(
        f"\ngreedy: tokens before the first that differs from the baseline's, mean of {first['prompts']} prompts, "
        f"at most {first['generated']}",
        style="dim",
    )
