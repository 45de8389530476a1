"""A picture of the status page at work: a server with the embedded model, busy slots, and an answer in the chat.

    python benchmarks/screenshot.py [OUTPUT.png] [--dark] [--width 1200] [--height 640] [--chromium PATH]

Needs playwright (pip) and a Chromium browser, which is not downloaded.
"""

from __future__ import annotations

import argparse
import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from pocketllm import LLM
from pocketllm.options import ServerOptions
from pocketllm.server.run import Server
from pocketllm.server.service import Service

OUTPUT = Path(__file__).parent.parent / "docs" / "images" / "status-page.png"
STORY = "The ship left the harbour at dawn, and the captain wrote down what she saw. "
QUESTION = "What is a key-value cache in a language model? Answer in three sentences."
OTHERS = ((60, 900), (9, 700), (30, 800))  # sentences of the prompt, tokens to generate
NEXT = "Now write a long story about a lighthouse keeper."
ENOUGH = 250  # characters of its answer
WARM_UP = 60  # seconds that the page has watched before the question is asked


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, default=OUTPUT)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=640)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    args = parser.parse_args(arguments)
    if args.chromium is None:
        parser.error("no Chromium was found: give its path as --chromium")
    started = threading.Event()
    service = Service(LLM(max_batch_size=4, max_context=2048), ServerOptions(port=0, shutdown_timeout=0))
    server = Server(service, on_start=lambda url: started.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    started.wait()
    try:
        url = "http://{}:{}".format(*server.address)
        for other in OTHERS:
            threading.Thread(target=load, args=(url, *other), daemon=True).start()
            time.sleep(1)
        take(url, args)
    finally:
        server.should_exit = True
        thread.join()


def load(url: str, sentences: int, tokens: int) -> None:
    """Keeps a slot busy, one request after the other."""
    body = {"prompt": STORY * sentences, "max_tokens": tokens, "ignore_eos": True}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    while True:
        try:
            urllib.request.urlopen(request).read()
        except OSError:  # the server ends
            return


def take(url: str, args: Any) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": args.width, "height": args.height}, color_scheme="dark" if args.dark else "light"
        )
        page.goto(url)
        page.wait_for_timeout(1000 * WARM_UP)
        page.get_by_label("Message").fill(QUESTION)
        page.get_by_label("temperature").fill("0")
        page.get_by_role("button", name="Send").click()
        page.get_by_text("tokens/s · first").wait_for()
        page.get_by_label("Message").fill(NEXT)
        page.get_by_role("button", name="Send").click()
        answer = page.locator("#log article > p").last
        while len(answer.text_content() or "") < ENOUGH:
            page.wait_for_timeout(50)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=args.output)
        browser.close()


if __name__ == "__main__":
    main()
