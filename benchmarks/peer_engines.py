"""The engines that `peers.py` compares, each in a process of its own that does what it is told, one line at a time.

    python benchmarks/peer_engines.py ENGINE '{"model": ..., "threads": ..., "slots": ..., "tokens": ..., "options": {...}}'

Reads a line of JSON, writes a line of JSON: first unasked what the engine is (`facts`), then for each
{"prompts": [[id, ...], ...], "steps": N}  {"seconds": median of N decode steps of all prompts, "tokens": [[id, ...], ...]}
{"prompt": [id, ...]}                      {"seconds": from the prompt to its first new token, the second time}

All choose greedily, and time the same thing: a decode step from the tokens of the last one to those of the next, for all
sequences in one batch, after the same number of steps that warm up.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

WARM_UP = 3  # as in `pocketllm.cli.bench_run`
Tokens = list[list[int]]


class PeerEngine(Protocol):
    """slots: most sequences of a decode; tokens: most tokens of a sequence, or of a prompt given to `prefill`."""

    def __init__(self, model: str, threads: int, slots: int, tokens: int, **options: Any) -> None: ...

    def facts(self) -> dict[str, Any]:
        """Keys: version, and the settings that matter."""
        ...

    def decode(self, prompts: Tokens, steps: int) -> tuple[list[float], Tokens]:
        """Seconds of each step, and each sequence's new tokens, those of warm-up steps included."""
        ...

    def prefill(self, prompt: list[int]) -> float: ...


class PocketLLM:
    """Options: kv_cache_dtype, kernels."""

    def __init__(self, model: str, threads: int, slots: int, tokens: int, **options: Any) -> None:
        from pocketllm.engine.engine import Engine

        self._engine = Engine(model, threads=threads, max_batch_size=slots, max_context=tokens, **options)

    def facts(self) -> dict[str, Any]:
        kv = self._engine.plan.kv.kv_format.name
        return {"kernels": self._engine.kernels.name, "kv": kv, "weights_bytes": self._engine.plan.weights}

    def decode(self, prompts: Tokens, steps: int) -> tuple[list[float], Tokens]:
        from pocketllm.cli.bench_run import timed_decode

        decode = timed_decode(self._engine, prompts, steps, "prefill")
        return decode.step_seconds, decode.tokens

    def prefill(self, prompt: list[int]) -> float:
        from pocketllm.cli.bench_run import timed_prefill

        return timed_prefill(self._engine, prompt)


class LlamaCpp:
    """llama.cpp through the C functions that llama-cpp-python binds: its batches, its own KV cache per sequence.

    Weights are read into memory (no mmap), so that they can be repacked for this CPU; flash attention is on if a short
    trial says that it is the faster.
    """

    def __init__(self, model: str, threads: int, slots: int, tokens: int) -> None:
        import llama_cpp

        self._api = api = llama_cpp
        self._silence = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._silence, None)
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mode = api.LLAMA_LOAD_MODE_NONE
        self._model = api.llama_model_load_from_file(model.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp can't load {model}")
        self._num_ids = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(tokens, 0, 1)
        self._threads, self._slots, self._tokens = threads, slots, tokens
        trials = {}
        prompts = [[1] * min(tokens // 2, 128)] * min(slots, 4)
        for flash in (True, False):
            self._context = self._new_context(flash)
            trials[flash] = statistics.median(self.decode(prompts, 8)[0])
            api.llama_free(self._context)
        self._flash = trials[True] <= trials[False]
        self._context = self._new_context(self._flash)

    def facts(self) -> dict[str, Any]:
        system = self._api.llama_print_system_info().decode()
        return {
            "flash_attention": self._flash,
            "kv": "f16",
            "system": [part.strip() for part in system.split("|") if part.strip()],
        }

    def decode(self, prompts: Tokens, steps: int) -> tuple[list[float], Tokens]:
        self._forget()
        last = [self._advance([(slot, 0, prompt)])[0] for slot, prompt in enumerate(prompts)]
        new = [[token] for token in last]
        times = []
        for i in range(WARM_UP + steps):
            at = len(prompts[0]) + i
            start = time.perf_counter()
            last = self._advance([(slot, at, [token]) for slot, token in enumerate(last)])
            times.append(time.perf_counter() - start)
            for tokens, token in zip(new, last, strict=True):
                tokens.append(token)
        return times[WARM_UP:], new

    def prefill(self, prompt: list[int]) -> float:
        self._forget()
        start = time.perf_counter()
        self._advance([(0, 0, prompt)])
        return time.perf_counter() - start

    def _new_context(self, flash: bool) -> Any:
        api = self._api
        params = api.llama_context_default_params()
        params.n_ctx = self._slots * -(-self._tokens // 256) * 256  # each sequence's share is a multiple of 256
        params.n_batch, params.n_ubatch = max(512, self._tokens), 512
        params.n_seq_max = self._slots
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.no_perf = True
        context = api.llama_init_from_model(self._model, params)
        if not context:
            raise SystemExit(f"llama.cpp makes no context of {params.n_ctx} tokens")
        return context

    def _forget(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)

    def _advance(self, parts: list[tuple[int, int, list[int]]]) -> list[int]:
        """Appends tokens to sequences (sequence, position, tokens); the most likely next token of each."""
        batch, row, outputs = self._batch, 0, []
        for sequence, position, tokens in parts:
            for i, token in enumerate(tokens):
                batch.token[row], batch.pos[row] = token, position + i
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                batch.logits[row] = i == len(tokens) - 1
                row += 1
            outputs.append(row - 1)
        batch.n_tokens = row
        if status := self._api.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode: status {status}")
        logits = (self._api.llama_get_logits_ith(self._context, row) for row in outputs)
        return [int(np.ctypeslib.as_array(values, (self._num_ids,)).argmax()) for values in logits]


class Transformers:
    """transformers, bfloat16, weights decoded from the GGUF file (or a model folder), its default attention and cache."""

    def __init__(self, model: str, threads: int, slots: int, tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        path = Path(model)
        where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = str(path.parent if where else path)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **where).eval()

    def facts(self) -> dict[str, Any]:
        return {"dtype": "bfloat16", "attention": self._model.config._attn_implementation}

    def decode(self, prompts: Tokens, steps: int) -> tuple[list[float], Tokens]:
        with self._torch.inference_mode():
            last, cache = self._advance(self._torch.tensor(prompts), None)
            new, times = [last], []
            for _ in range(WARM_UP + steps):
                start = time.perf_counter()
                last, cache = self._advance(last, cache)
                times.append(time.perf_counter() - start)
                new.append(last)
            return times[WARM_UP:], self._torch.cat(new, 1).tolist()

    def prefill(self, prompt: list[int]) -> float:
        start = time.perf_counter()
        with self._torch.inference_mode():
            self._advance(self._torch.tensor([prompt]), None)
        return time.perf_counter() - start

    def _advance(self, ids: Any, cache: Any) -> tuple[Any, Any]:
        """Next tokens [B, 1] after ids [B, T]."""
        out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values


ENGINES: dict[str, Callable[..., PeerEngine]] = {
    "pocketllm": PocketLLM,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not come between the answers
    settings = json.loads(sys.argv[2])
    options = settings.pop("options")
    engine = ENGINES[sys.argv[1]](**settings, **options)
    print(json.dumps(engine.facts()), file=answers)
    for line in sys.stdin:
        task = json.loads(line)
        if "prompt" in task:
            engine.prefill(task["prompt"])  # the processor's caches were another engine's
            answer: dict[str, Any] = {"seconds": engine.prefill(task["prompt"])}
        else:
            seconds, tokens = engine.decode(**task)
            answer = {"seconds": statistics.median(seconds), "tokens": tokens}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
