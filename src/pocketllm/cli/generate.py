"""`pocketllm generate`: complete one prompt, streaming, or many at once."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from pocketllm.cli import console
from pocketllm.cli.flags import ENGINE_FLAGS, PLAN_ONLY, SAMPLING_FLAGS, with_flags, without
from pocketllm.errors import RequestError
from pocketllm.options import EngineOptions, SamplingParams

if TYPE_CHECKING:
    from pocketllm.llm import LLM, Generation


@with_flags("options", without(ENGINE_FLAGS, *PLAN_ONLY), EngineOptions.of)
@with_flags("params", SAMPLING_FLAGS, SamplingParams.of)
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to complete; none: read one from stdin.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Folder, GGUF file or hub id (default: the embedded model).")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read prompts from a file, one per line.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask each prompt through the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="With --chat: the system message.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON (keys: see docs).")] = False,
    *,
    options: EngineOptions,
    params: SamplingParams,
) -> None:
    """Complete one or many prompts.

    --json keys: model, seconds, tokens, tok_s (new tokens over all prompts) and results, one per prompt, with prompt,
    text, token_ids, prompt_tokens, slot, finish_reason, error (null or a text), and with --logprobs also logprobs.
    """
    texts = _read_prompts(prompts, file)
    if system is not None and not chat:
        raise RequestError("--system is part of a conversation: add --chat")
    if params.logprobs is not None and not json:
        raise RequestError("--logprobs are shown in JSON only: add --json")
    from pocketllm.llm import LLM

    slots = min(
        options.max_batch_size, max(len(texts), 1)
    )  # a slot nobody uses would only cost memory and start-up time
    llm = LLM(model, dataclasses.replace(options, max_batch_size=slots))
    inputs: list[Any] = list(texts)
    if chat:
        start = [{"role": "system", "content": system}] if system is not None else []
        inputs = [llm.chat_prompt([*start, {"role": "user", "content": text}]) for text in texts]
    begin = time.perf_counter()
    if len(texts) == 1 and not json:
        results = [_stream(llm, inputs[0], params)]
    else:
        results = llm.generate(inputs, params, progress=not json and sys.stdout.isatty())
    seconds = time.perf_counter() - begin
    if json:
        console.print_json(_as_json(llm, texts, results, seconds))
    elif len(texts) > 1:
        _show(texts, results)
    if sys.stdout.isatty() and not json:
        tokens = sum(len(result.token_ids) for result in results)
        console.stderr().print(f"{tokens} tokens, {tokens / seconds:.1f} tok/s", style="dim")
    for index, result in enumerate(results):
        if result.error is not None:
            console.print_error(f"prompt {index}: {result.error}" if len(results) > 1 else str(result.error))
    if any(result.error is not None for result in results):
        raise typer.Exit(console.ERROR)


def _read_prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    if prompts and file is not None:
        raise RequestError("give prompts as arguments or with --file, not both")
    if prompts:
        return prompts
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"--file {file}: can't be read: {error}") from None
        texts = [line for line in lines if line.strip()]
        if not texts:
            raise RequestError(f"--file {file}: holds no prompt (one per line)")
        return texts
    if sys.stdin.isatty():
        raise RequestError("no prompt: give one as an argument, with --file, or through stdin")
    text = sys.stdin.read().rstrip("\n")
    if not text:
        raise RequestError("no prompt: stdin is empty")
    return [text]


def _stream(llm: LLM, prompt: Any, params: SamplingParams) -> Generation:
    for delta in llm.stream([prompt], params):
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        generation = delta.generation
    if generation.error is None:
        sys.stdout.write("\n")
    return generation


def _show(texts: list[str], results: list[Generation]) -> None:
    out = console.stdout()
    for index, (text, result) in enumerate(zip(texts, results, strict=True)):
        out.print(Text(f"── {index} · {' '.join(text.split())}", style="bold", overflow="ellipsis", no_wrap=True))
        if result.error is None:
            out.print(Text(result.text), soft_wrap=not out.is_terminal)  # in a file, lines are the model's
        out.print()


def _as_json(llm: LLM, texts: list[str], results: list[Generation], seconds: float) -> dict[str, Any]:
    tokens = sum(len(result.token_ids) for result in results)
    rows = []
    for text, result in zip(texts, results, strict=True):
        row: dict[str, Any] = {
            "prompt": text,
            "text": result.text,
            "token_ids": result.token_ids,
            "prompt_tokens": len(result.prompt_ids),
            "slot": result.slot,
            "finish_reason": result.finish_reason,
            "error": None if result.error is None else str(result.error),
        }
        if result.logprobs:
            row["logprobs"] = [{"chosen": step.chosen, "top": step.top} for step in result.logprobs]
        rows.append(row)
    return {
        "model": llm.engine.checkpoint.name,
        "seconds": round(seconds, 4),
        "tokens": tokens,
        "tok_s": round(tokens / seconds, 2),
        "results": rows,
    }
