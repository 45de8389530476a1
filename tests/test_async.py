"""`AsyncEngine`: many streams from asyncio on one engine thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from engines import drain, engine, prompt, tokens_of
from pocketllm import AsyncEngine, Engine, SamplingParams
from pocketllm.errors import PocketLLMError, RequestError

GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


async def collect(server: AsyncEngine, ids: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return [token async for output in server.generate(ids, params) for token in output.new_token_ids]


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("pocketllm-engine")}


def test_concurrent_streams_equal_single_ones(tmp_path: Path) -> None:
    prompts = [prompt(5 + 9 * i, i) for i in range(10)]
    want = []
    for ids in prompts:
        single = engine("qwen3", tmp_path / "one", max_batch_size=1, kernels="reference")
        name = single.add_request(ids, GREEDY)
        want.append(tokens_of(drain(single)[name]))

    async def main() -> None:
        running = engine("qwen3", tmp_path / "many", kernels="reference")
        server = AsyncEngine(running)
        assert await asyncio.gather(*(collect(server, ids) for ids in prompts)) == want
        await server.close()
        assert running.slots.num_free == 4
        assert not threads()

    run(main())


def test_leaving_a_stream_frees_its_slot(tmp_path: Path) -> None:
    async def main() -> None:
        running = engine("qwen3", tmp_path, max_batch_size=1, kernels="reference")
        server = AsyncEngine(running)
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        _, stream = await server.submit(prompt(5), long)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        assert len(await collect(server, prompt(6))) == 10  # waits for the one slot

        task = asyncio.create_task(collect(server, prompt(7), long))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(await collect(server, prompt(8))) == 10
        assert await server.call(lambda e: e.slots.num_free) == 1
        await server.close()

    run(main())


def test_ending_a_request_ends_its_stream(tmp_path: Path) -> None:
    async def main() -> None:
        server = AsyncEngine(engine("qwen3", tmp_path, kernels="reference"))
        request, stream = await server.submit(prompt(5), SamplingParams(max_tokens=200, ignore_eos=True))
        reasons = []
        async for output in stream:
            reasons.append(output.finish_reason)
            if len(reasons) == 3:
                await server.end_request(request, "stop")
        assert reasons[-1] == "stop"
        assert all(reason is None for reason in reasons[:-1])
        await server.close()

    run(main())


def test_errors_come_back_to_the_caller(tmp_path: Path) -> None:
    async def main() -> None:
        server = AsyncEngine(engine("qwen3", tmp_path, kernels="reference"))
        with pytest.raises(RequestError, match="no tokens"):
            await collect(server, [])
        assert len(await collect(server, prompt(5))) == 10
        _, stream = await server.submit(prompt(5), SamplingParams(max_tokens=200, ignore_eos=True))
        await server.close()
        assert [output.finish_reason async for output in stream][-1] == "abort"
        with pytest.raises(PocketLLMError, match="closed"):
            await collect(server, prompt(5))
        await server.close()

    run(main())


def test_a_broken_engine_ends_every_stream_with_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        running = engine("qwen3", tmp_path, kernels="reference")

        def broken(self: Engine) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(type(running.scheduler), "schedule", broken)
        server = AsyncEngine(running)
        with pytest.raises(PocketLLMError, match="a bug"):
            await collect(server, prompt(5))
        with pytest.raises(PocketLLMError, match="a bug"):
            await collect(server, prompt(5))
        await server.close()

    run(main())
