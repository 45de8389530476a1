"""What HTTP costs: tokens per second, time to the first token and gaps between tokens, served against offline.

    python benchmarks/server.py [MODEL] [--streams 1,8] [--many 64] [--prompt 64] [--tokens 64] [--rounds 5] [--json]

The server is `pocketllm serve` in a process of its own, the clients and the offline engine are in this one; all share the
machine, as a server and its clients on one host do. Both sides complete the same prompts greedily, and take turns.

streams: N streams of one prompt each, from the first byte sent to the last token. first token: one stream on an idle
server. gaps: between two events of a stream, with --many streams at once; offline, between two tokens of `LLM.stream`. An
event may bring several tokens (`--stream-interval`).

--json keys: benchmark, model, kernels, quantization, prompt, tokens, rounds, machine (cpu, cores, threads, load, date,
python, versions), rows, each with streams, server_tok_s, offline_tok_s, ratio (median over the rounds of server / offline);
first_token with server_ms, offline_ms, overhead_ms (medians; overhead: median of the differences in a round); and gaps with
streams, server_p50_ms, server_p99_ms, offline_p50_ms, offline_p99_ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from typing import Any

from common import (
    add_engine_arguments,
    engine_options,
    machine,
    machine_line,
    numbers,
    parser_of,
    print_json,
    ratio,
    show,
    take_turns,
)  # fmt: skip
from pocketllm.llm import LLM
from pocketllm.options import SamplingParams

Times = list[list[float]]  # of each stream's tokens, in seconds since the start


def prompts_of(llm: LLM, length: int, streams: int) -> list[list[int]]:
    """Different ones, of ordinary tokens."""
    vocabulary = llm.engine.config.vocab_size
    return [[vocabulary // 4 + (7 * i + 13 * stream) % 97 for i in range(length)] for stream in range(streams)]


def offline(llm: LLM, prompts: list[list[int]], tokens: int) -> Times:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0)  # as the clients ask
    times: Times = [[] for _ in prompts]
    begin = time.perf_counter()
    for delta in llm.stream(prompts, params):
        times[delta.generation.index] += [time.perf_counter() - begin] * len(delta.new_token_ids)
    return times


def served(port: int, prompts: list[list[int]], tokens: int) -> Times:
    async def main() -> Times:
        begin = time.perf_counter()
        return await asyncio.gather(*(_stream(port, prompt, tokens, begin) for prompt in prompts))

    return asyncio.run(main())


async def _stream(port: int, prompt: list[int], tokens: int, begin: float) -> list[float]:
    """One streamed completion through a bare socket, a client that costs little. A token's time is that of the event that
    brings its log-probability, because its text may be held back until a character is whole."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 0}
    data = json.dumps(body).encode()
    head = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close",
            f"Content-Length: {len(data)}", "", "")  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write("\r\n".join(head).encode() + data)
    times: list[float] = []
    while line := await reader.readline():
        if b'"token_logprobs":[' in line:
            news = json.loads(line.removeprefix(b"data: "))["choices"][0]["logprobs"]["token_logprobs"]
            times += [time.perf_counter() - begin] * len(news)
        elif b'"error"' in line:
            raise RuntimeError(line.decode())
    writer.close()
    if len(times) != tokens:
        raise RuntimeError(f"{len(times)} tokens came, {tokens} were asked for")
    return times


@contextlib.contextmanager
def server(args: Any, slots: int, context: int) -> Iterator[int]:
    """The port of a server that runs meanwhile."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--port", port, "--slots", slots, "--context", context, "--quantization", args.quantization]
    flags += ["--kernels", args.kernels, "--load-format", args.load_format]
    flags += ["--threads", args.threads] if args.threads is not None else []
    model = [args.model] if args.model is not None else []
    start = [sys.executable, "-c", "from pocketllm.cli.main import main; main()", "serve", *model, *map(str, flags)]
    process = subprocess.Popen(start, stderr=subprocess.DEVNULL)
    try:
        _wait(port, process)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError("the server ended before it listened: start `pocketllm serve` by hand to see why")


def rate(times: Times) -> float:
    return sum(map(len, times)) / max(stream[-1] for stream in times)


def gaps_ms(rounds: list[Times]) -> tuple[float, float]:
    """Median and 99th percentile."""
    gaps = sorted(b - a for times in rounds for stream in times for a, b in itertools.pairwise(stream) if b > a)
    return round(gaps[len(gaps) // 2] * 1e3, 2), round(gaps[len(gaps) * 99 // 100] * 1e3, 2)


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_engine_arguments(parser)
    parser.add_argument("--streams", type=numbers, default=[1, 8])
    parser.add_argument("--many", type=int, default=64, help="streams of which the gaps are measured")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each stream generates")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)

    facts: dict[str, Any] = {"benchmark": "server", "machine": machine(engine_options(args).num_threads())}
    slots, context = max(*args.streams, args.many), args.prompt + args.tokens
    llm = LLM(args.model, engine_options(args, max_batch_size=slots, max_context=context))
    with server(args, slots, context) as port:
        sides = {"server": partial(served, port), "offline": partial(offline, llm)}
        cases = {
            (side, n): partial(run, prompts_of(llm, args.prompt, n), args.tokens)
            for n in dict.fromkeys([1, *args.streams, args.many])
            for side, run in sides.items()
        }
        take_turns(cases, 1)  # warms up
        results = take_turns(cases, args.rounds)
    rows = []
    for n in args.streams:
        rates = {side: [rate(times) for times in results[side, n]] for side in sides}
        rows.append(
            {
                "streams": n,
                "server_tok_s": round(statistics.median(rates["server"]), 1),
                "offline_tok_s": round(statistics.median(rates["offline"]), 1),
                "ratio": ratio(rates["server"], rates["offline"]),
            }
        )
    first = {side: [times[0][0] * 1e3 for times in results[side, 1]] for side in sides}
    overheads = [a - b for a, b in zip(first["server"], first["offline"], strict=True)]
    facts |= {
        "model": llm.engine.checkpoint.name,
        "kernels": llm.engine.kernels.name,
        "quantization": args.quantization,
        "prompt": args.prompt,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "rows": rows,
        "first_token": {
            "server_ms": round(statistics.median(first["server"]), 2),
            "offline_ms": round(statistics.median(first["offline"]), 2),
            "overhead_ms": round(statistics.median(overheads), 2),
        },
        "gaps": {"streams": args.many},
    }
    for side in sides:
        facts["gaps"][f"{side}_p50_ms"], facts["gaps"][f"{side}_p99_ms"] = gaps_ms(results[side, args.many])
    if args.json:
        print_json(facts)
        return
    show(
        (
            f"{facts['model']}, {facts['kernels']} kernels, prompts of {args.prompt} tokens, {args.tokens} new ones",
            machine_line(facts["machine"]),
        ),
        ("streams", "server tok/s", "offline tok/s", "ratio"),
        [[row["streams"], row["server_tok_s"], row["offline_tok_s"], f"{row['ratio']:.3f}"] for row in rows],
    )
    print(
        "first token: {server_ms} ms, offline {offline_ms} ms; HTTP adds {overhead_ms} ms".format(
            **facts["first_token"]
        )
    )
    print(
        "gaps of {streams} streams: median {server_p50_ms} ms, 99% within {server_p99_ms} ms; "
        "offline {offline_p50_ms} and {offline_p99_ms} ms".format(**facts["gaps"])
    )


if __name__ == "__main__":
    main()
