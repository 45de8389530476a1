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


def test_with_an_interval_steps_come_together(tmp_path: Path) -> None:
    """The first token and the end at once, what lies between in as few pieces as the interval says; nothing is lost."""

    async def outputs(interval: float) -> list[tuple[int, ...]]:
        server = AsyncEngine(engine("qwen3", tmp_path, kernels="reference"), interval=interval)
        pieces = [o.new_token_ids async for o in server.generate(prompt(5), GREEDY)]
        await server.close()
        return pieces

    async def main() -> None:
        each, together = await outputs(0.0), await outputs(3600.0)
        assert [len(piece) for piece in each] == [1] * 10
        assert len(together) <= 2  # the first token was told after 0 or after more seconds than the interval
        assert sum(together, ()) == sum(each, ())
        assert len(together[0]) == 1

    run(main())


def test_what_came_before_a_failure_is_told_apart(tmp_path: Path) -> None:
    async def main() -> None:
        running = engine("qwen3", tmp_path, kernels="reference")
        server = AsyncEngine(running, interval=3600.0)
        name, stream = await server.submit(prompt(5), SamplingParams(max_tokens=200, ignore_eos=True))
        first = await anext(stream)
        while await server.call(lambda e: e.stats.output_tokens) < 3:
            pass
        await server.end_request(name)
        rest = [output async for output in stream]
        assert len(first.new_token_ids) == 1
        assert [output.finish_reason for output in rest] == [None, "abort"]
        assert len(rest[0].new_token_ids) == rest[0].num_output_tokens - 1 >= 1
        assert rest[1].new_token_ids == ()
        await server.close()

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
