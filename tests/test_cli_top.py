"""`pocketllm top`: figures from two looks at a server, errors of one line, a live view that ctrl-C ends."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from pocketllm.cli.main import app
from pocketllm.cli.top_view import Reading, picture
from servers import LiveServer, held_request, live
from tiny_chat import make_chat

QUICK = ("--once", "--interval", "0.05")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with live(folder, served_names=("tiny",)) as running:
        yield running


def top(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["top", *arguments], env={"COLUMNS": "110"})


def test_one_look_at_a_busy_server(server: LiveServer) -> None:
    with held_request(server, 5):
        result = top(server.url, *QUICK, "--json")
        assert result.exit_code == 0, result.stderr
        state = json.loads(result.stdout)
        text = top(server.url.removeprefix("http://"), *QUICK).stdout
    assert set(state) == set(server.slots()) | {"decode_tok_s", "prefill_tok_s"}
    assert (state["decode_tok_s"], state["prefill_tok_s"]) == (0, 0)  # it is held
    (slot,) = [slot for slot in state["slots"] if slot["use"] == "running"]
    assert slot["output_tokens"] >= 4
    row = next(line for line in text.splitlines() if " decode " in line and "tokens/s" not in line)
    assert f" {slot['tokens']} " in row
    assert f"{slot['output_tokens']} / 400" in row
    assert "tiny · cpu · up 0:00:" in text
    assert "1 running · 0 waiting" in text
    assert text.count(" free ") == 3


def state_of(uptime: float, output: int, prompt: int, slot: dict[str, Any]) -> dict[str, Any]:
    free = {"id": 1, "use": "free", "tokens": 0, "request_id": None, "state": None, "prompt_tokens": 0,
            "output_tokens": 0, "max_tokens": None}  # fmt: skip
    return {
        "model": "m", "uptime": uptime, "slots": [free | {"id": 0} | slot, free], "max_context": 4096, "kv_tokens": 8192,
        "page_size": 256, "pages_used": 8, "pages_total": 32, "snapshots": 0,
        "stats": {"steps": 9, "prompt_tokens": prompt, "output_tokens": output, "waiting": 3, "running": 1, "free_slots": 1},
        "memory": {"device": "cuda:0", "planned": {"weights": 3 << 30, "kv": 1 << 30, "tables": 1 << 20}, "total": 9 << 30,
                   "budget": 20 << 30, "used": 5 << 30},
    }  # fmt: skip


RUNNING = {"use": "running", "request_id": "a", "state": "decode", "prompt_tokens": 2000, "max_tokens": None}


def test_rates_are_differences_over_the_servers_own_time() -> None:
    first = Reading(state_of(10.0, 1000, 50, RUNNING | {"tokens": 2048, "output_tokens": 48}))
    second = Reading(state_of(12.5, 1100, 300, RUNNING | {"tokens": 2148, "output_tokens": 148}), first)
    assert (first.rate("output_tokens"), first.slot_rate(first.state["slots"][0])) == (None, None)
    assert (second.rate("output_tokens"), second.rate("prompt_tokens")) == (40, 100)
    assert [second.slot_rate(slot) for slot in second.state["slots"]] == [40, None]
    other = Reading(state_of(14.5, 1200, 300, RUNNING | {"request_id": "b", "tokens": 9, "output_tokens": 5}), second)
    assert (other.rate("output_tokens"), other.slot_rate(other.state["slots"][0])) == (50, None)
    restarted = Reading(state_of(0.5, 7, 7, {}), other)
    assert restarted.rate("output_tokens") is None


def test_the_picture() -> None:
    first = Reading(state_of(10.0, 1000, 50, RUNNING | {"tokens": 2048, "output_tokens": 48}))
    second = Reading(state_of(3661.0, 74020, 50, RUNNING | {"tokens": 2148, "output_tokens": 148}), first)
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(picture(second, "gone"))
    text = console.export_text()
    for piece in ("m · cuda:0 · up 1:01:01", "20.0 decode · 0.0 prefill", "1 running · 3 waiting", "8 of 32 (25%)", "gone",
                  "9.00 GiB planned of 20.00 GiB · tensors 5.00 GiB", "weights 3.00 GiB · kv 1.00 GiB · tables 1.0 MiB",
                  "of 4,096 tokens"):  # fmt: skip
        assert piece in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POCKETLLM_API_KEY", raising=False)
    with live(folder, api_keys=("secret",)) as server:
        for arguments, hint in (((), "give its key as --api-key"), (("--api-key", "x"), "its key is another one")):
            result = top(server.url, *QUICK, *arguments)
            assert result.exit_code == 2
            assert result.stderr.count("\n") == 1
            assert f"error: the server at {server.url} refuses: {hint}" in result.stderr
        assert top(server.url, *QUICK, "--api-key", "secret").exit_code == 0
        monkeypatch.setenv("POCKETLLM_API_KEY", "secret, other")
        assert top(server.url, *QUICK).exit_code == 0


class _Other(BaseHTTPRequestHandler):
    """Some other server: what it says of /slots is no JSON, no object, or another one's."""

    answers = iter((b"hello", b"[1, 2]", b'{"slots": []}'))

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(next(self.answers))

    def log_message(self, *arguments: Any) -> None:
        pass


def test_a_server_of_another_kind_or_none() -> None:
    with HTTPServer(("127.0.0.1", 0), _Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_address[1]}"
        for _ in range(3):
            result = top(url, *QUICK)
            assert (result.exit_code, result.stderr) == (
                2, f"error: {url}/slots is not what a PocketLLM server answers: check the URL\n",
            )  # fmt: skip
        other.shutdown()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        result = top(url, *QUICK)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: no server answers at {url} (")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json"], "error: --json prints one reading: give --once too"),
        (["--interval", "0", "--once"], "error: --interval 0.0: must be above 0"),
        ([], "error: the output is no terminal: give --once for one reading"),
    ],
)
def test_flags_that_do_not_go_together(arguments: list[str], message: str) -> None:
    result = top(*arguments)
    assert (result.exit_code, result.stderr) == (2, message + "\n")


def test_the_live_view_follows_the_server_until_ctrl_c(server: LiveServer) -> None:
    leader, follower = pty.openpty()
    command = [
        sys.executable,
        "-c",
        "from pocketllm.cli.main import main; main()",
        "top",
        server.url,
        "--interval",
        "0.1",
    ]
    process = subprocess.Popen(
        command,
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )  # fmt: skip
    os.close(follower)
    try:
        screen = _read_until(leader, b"free")
        assert b"tiny" in screen
        with held_request(server, 2):
            _read_until(leader, b" / 400")
        process.send_signal(signal.SIGINT)
        rest = _read_until(leader, b"\x1b[?1049l")  # back on the ordinary screen
        assert b"Traceback" not in rest
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def _read_until(terminal: int, wanted: bytes, seconds: float = 30) -> bytes:
    seen, end = b"", time.monotonic() + seconds
    while wanted not in seen:
        assert time.monotonic() < end, seen
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536)
    return seen
