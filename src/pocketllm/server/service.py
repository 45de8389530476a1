"""`Service`: an engine, its tokenizer and its template, for the routes to share. It knows no HTTP."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from pocketllm.engine.async_engine import AsyncEngine
from pocketllm.errors import ModelError, RequestError
from pocketllm.llm import LLM
from pocketllm.options import SamplingParams, ServerOptions
from pocketllm.server.chat_job import ChatJob
from pocketllm.server.errors import ApiError, shutting_down
from pocketllm.server.generation import Choice, Generation
from pocketllm.server.metrics import Metrics
from pocketllm.server.prompts import Prompts
from pocketllm.server.reading import Reading
from pocketllm.server.state import EngineState, read_state
from pocketllm.text.chat import ChatTemplate
from pocketllm.text.grammar import AnswerForm


class Service:
    """Owns the engine from construction to `close`. `model`: the name that answers carry."""

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        """ModelError if the model has no tokenizer (dummy weights)."""
        if llm.tokenizer is None:
            raise ModelError("a model of dummy weights has no tokenizer, so it can't be served")
        self.options, self.tokenizer = options, llm.tokenizer
        self.names = options.served_names or (llm.engine.checkpoint.name,)
        self.model = self.names[0]
        self.max_context = llm.engine.plan.max_context
        self.defaults: dict[str, float] = {"temperature": 1.0, **llm.engine.config.generation_defaults}
        if "top_k" in self.defaults:
            self.defaults["top_k"] = int(self.defaults["top_k"])
        self.metrics = Metrics(self.model)
        self.accepting = True
        template = ChatTemplate.of(llm.tokenizer) if llm.tokenizer.chat_template is not None else None
        self.prompts = Prompts(llm.tokenizer, template)
        self._reading = Reading(llm.tokenizer, template)
        self._num_slots = llm.engine.slots.num_slots
        self._engine = AsyncEngine(llm.engine, interval=options.stream_interval)

    # -- generations -------------------------------------------------------------------------------------------------

    async def start_chat(self, job: ChatJob, prefix: str) -> Generation:
        """Queue the answers to a conversation. `prefix`: begins the id of the generation.

        QueueFull, RequestError or ApiError if it is refused; nothing is queued then.
        """
        self._check_count(job.n)
        text, ids = await self.prompts.chat(job)
        build = partial(self._reading.chat, job, text, ids)
        choices = await self.prompts.run(partial(_choices, build, job.params, job.n))
        return await self._start(prefix, choices)

    async def start_completion(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams,
        *,
        n: int = 1,
        form: AnswerForm | None = None,
        add_special: bool = True,
    ) -> Generation:
        """Queue n continuations of each prompt: choices 0 to n - 1 are of the first. Errors as `start_chat`."""
        choices: list[Choice] = []
        self._check_count(len(prompts) * n)
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                ids = await self.prompts.encode(prompt, add_special=add_special)
            else:
                ids = list(prompt)
            build = partial(self._reading.completion, number, ids, form)
            choices += await self.prompts.run(partial(_choices, build, params, n))
        return await self._start("cmpl-", choices)

    async def _start(self, prefix: str, choices: Sequence[Choice]) -> Generation:
        if not self.accepting:
            raise shutting_down()
        generation = Generation(f"{prefix}{secrets.token_hex(12)}", self._engine, self.metrics)
        await generation.start(choices)
        return generation

    def _check_count(self, choices: int) -> None:
        if choices > self.options.max_choices:
            raise RequestError(f"{choices} choices: this server gives at most {self.options.max_choices} a request")

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {', '.join(self.names)}",
                type="not_found_error",
                param="model",
                code="model_not_found",
            )

    # -- the engine --------------------------------------------------------------------------------------------------

    async def state(self) -> EngineState:
        """PocketLLMError if the engine has failed or is closed."""
        return await self._engine.call(read_state)

    @property
    def healthy(self) -> bool:
        return self._engine.alive

    def retry_after(self) -> int:
        """Seconds after which a slot is likely to be free: the mean duration of a request over the number of slots."""
        return min(max(math.ceil(self.metrics.mean_seconds / self._num_slots), 1), 60)

    def stop_accepting(self) -> None:
        """New generations are refused from now on; those that run go on."""
        self.accepting = False

    async def close(self) -> None:
        """End what still runs, each with an error that says so, and the engine's thread."""
        self.stop_accepting()
        await self._engine.close()
        self.prompts.close()


def _choices(build: Callable[[SamplingParams], Choice], params: SamplingParams, n: int) -> list[Choice]:
    """n choices of one prompt: with a seed their seeds are seed, seed + 1, ..."""
    if params.seed is None:
        return [build(params) for _ in range(n)]
    return [build(replace(params, seed=(params.seed + i) % 2**63)) for i in range(n)]
