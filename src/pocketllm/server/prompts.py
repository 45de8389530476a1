"""Prompts in token ids. Templates and tokenizers run in a small pool of threads: a huge prompt delays nobody else."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pocketllm.errors import RequestError
from pocketllm.server.chat_job import ChatJob
from pocketllm.text.chat import ChatTemplate
from pocketllm.text.tokenizer import Tokenizer

T = TypeVar("T")

WORKERS = 2  # the tokenizer lets other threads run while it works; the template engine does not


class Prompts:
    """A tokenizer and a chat template (None: the model has none), and the threads they run in."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="pocketllm-text")

    async def run(self, function: Callable[[], T]) -> T:
        """`function()` in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    async def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return await self.run(lambda: self._tokenizer.encode(text, add_special=add_special))

    async def chat(self, job: ChatJob) -> tuple[str, list[int]]:
        """The conversation as the model's own text, and as token ids."""

        def render() -> tuple[str, list[int]]:
            text = render_chat(self._template, job)
            return text, self._tokenizer.encode(text, add_special=False)

        return await self.run(render)


def render_chat(template: ChatTemplate | None, job: ChatJob) -> str:
    """The conversation as text. With continue_final_message it ends where the last message ends: a mark at the message's
    end shows where the template would close it."""
    if template is None:
        raise RequestError("this model has no chat template: use /v1/completions")
    messages = [dict(message) for message in job.messages]
    mark = f"[{secrets.token_hex(8)}]"
    if job.continue_final_message:
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise RequestError("continue_final_message needs a last message whose content is a text")
        messages[-1]["content"] = content + mark
    text = template.render(
        messages,
        tools=[dict(tool) for tool in job.visible_tools] or None,
        add_generation_prompt=job.add_generation_prompt,
        **job.template_variables,
    )
    if not job.continue_final_message:
        return text
    if text.count(mark) != 1:
        raise RequestError("this chat template changes the last message, so it can't be continued")
    return text[: text.index(mark)]
