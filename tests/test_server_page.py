"""The status page in a real browser: nothing is refused or lost, slots move, the chat says what the API says."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from servers import LiveServer, eventually, held_request, live, with_template
from tiny_chat import make_chat

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HTML = "<img src=x onerror=alert(1)> & <b>bold</b>"
THINKING = (  # always
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        message = f"no Chromium is installed (looked for {', '.join(BROWSERS)}): the status page can't be tested"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with live(folder, served_names=("tiny",)) as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of a new session. `page.troubles`: what its console complained about, Content-Security-Policy included."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(60_000)
    expect.set_options(timeout=60_000)
    page = context.new_page()
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.troubles = troubles  # type: ignore[attr-defined]
    yield page
    context.close()


def test_what_slots_says_of_memory_and_time(server: LiveServer) -> None:
    state, plan = server.slots(), server.llm.engine.plan
    memory = state["memory"]
    assert memory["planned"] == plan.parts
    assert memory["total"] == plan.total == sum(memory["planned"].values())
    assert (memory["budget"], memory["device"]) == (plan.budget, "cpu")
    assert memory["used"] > plan.resident  # all of it has been written to
    assert state["model"] == "tiny"
    assert 0 < state["uptime"] < server.slots()["uptime"]


def test_the_page_loads_from_this_server_alone(page: Page, server: LiveServer) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    answer = page.goto(server.url)
    assert answer is not None
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    expect(page.get_by_role("status")).to_have_text("live")
    expect(page.locator("#facts")).to_contain_text("tiny · cpu · up ")
    expect(page.locator(".slot")).to_have_count(4)
    expect(page.locator(".slot .name")).to_have_text(["free"] * 4)
    plan = server.llm.engine.plan
    parts = [name for name, size in plan.parts.items() if size]
    expect(page.locator("#memory small")).to_have_text([*parts, "process"])
    expect(page.locator("#memory-bar i")).to_have_count(len(parts))
    assert page.troubles == []  # type: ignore[attr-defined]
    assert {url.removeprefix(server.url) for url in asked if not url.startswith("data:")} == {"/", "/slots"}


def test_the_policy_forbids_scripts_that_are_not_the_page_s(page: Page, server: LiveServer) -> None:
    page.goto(server.url)
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = true'}))")
    assert page.evaluate("window.ran") is None
    assert any("Content Security Policy" in text for text in page.troubles)  # type: ignore[attr-defined]


def test_slots_move_with_their_requests(page: Page, server: LiveServer) -> None:
    page.goto(server.url)
    expect(page.locator(".slot .name")).to_have_text(["free"] * 4)
    with held_request(server, 6):
        expect(page.locator(".slot .name")).to_have_text(["decode", "free", "free", "free"])
        state = server.slots()
        slot = state["slots"][0]
        cells = page.locator(".slot").first.locator("span")
        expect(cells.nth(2)).to_have_text(f"{slot['tokens']} / 512")
        expect(cells.nth(3)).to_have_text(f"+{slot['output_tokens']} / 400")
        expect(page.locator("#running")).to_have_text("1 running")
        expect(page.locator("#pages-note")).to_have_text(f"{state['pages_used']} of 128")
        widths = page.locator(".slot .bar").first.evaluate(
            "bar => [...bar.children].map(i => parseFloat(i.style.width))"
        )
        assert sum(widths) == pytest.approx(100 * slot["tokens"] / 512, abs=0.01)
        assert widths[0] == pytest.approx(100 * slot["prompt_tokens"] / 512, abs=0.01)
    expect(page.locator(".slot .name")).to_have_text(["free"] * 4)
    expect(page.locator("#decode-peak")).not_to_have_text("last two minutes, peak 0")
    assert "NaN" not in (page.locator("#decode-spark path").last.get_attribute("d") or "NaN")
    assert page.troubles == []  # type: ignore[attr-defined]


def ask(page: Page, text: str, max_tokens: int = 24) -> None:
    page.get_by_label("temperature").fill("0")
    page.get_by_label("max tokens").fill(str(max_tokens))
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def note(page: Page) -> Any:
    """Below the last answer: how it went."""
    return page.locator("#log article").last.locator("small")


def shown(page: Page) -> str:
    """The last answer's text, to the character."""
    return str(page.locator("#log article").last.locator(":scope > p").evaluate("p => p.textContent"))


def api(server: LiveServer, messages: list[dict[str, str]], max_tokens: int = 24) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return dict(server.post("/v1/chat/completions", body).json()["choices"][0]["message"])


def test_the_chat_says_what_the_api_says(page: Page, server: LiveServer) -> None:
    """A random model's bytes are as odd as text can be. The conversation is kept, and nothing in it is taken for HTML."""
    page.goto(server.url)
    ask(page, HTML)
    expect(note(page)).to_contain_text("tokens · ")
    first = api(server, [{"role": "user", "content": HTML}])["content"]
    assert first
    assert shown(page) == first
    ask(page, "again")
    expect(page.locator("#log article")).to_have_count(4)
    expect(note(page)).to_contain_text("tokens · ")
    conversation = [{"role": "user", "content": HTML}, {"role": "assistant", "content": first},
                    {"role": "user", "content": "again"}]  # fmt: skip
    assert shown(page) == api(server, conversation)["content"]
    assert page.locator("#log img, #log b").count() == 0
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#log article")).to_have_count(0)
    ask(page, HTML)
    expect(note(page)).to_contain_text("tokens · ")
    assert shown(page) == first
    assert page.troubles == []  # type: ignore[attr-defined]


def test_stop_frees_the_slot(page: Page, server: LiveServer) -> None:
    page.goto(server.url)
    server.held = True
    for stop in (lambda: page.get_by_role("button", name="Stop").click(), lambda: page.keyboard.press("Escape")):
        server.allowed = 3
        ask(page, "hello", 400)
        eventually(lambda: server.allowed == 0)
        assert server.busy == 1
        expect(page.get_by_role("button", name="Send")).to_be_hidden()
        stop()
        expect(note(page)).to_contain_text("stopped after")
        eventually(lambda: server.busy == 0)
        expect(page.get_by_role("button", name="Send")).to_be_visible()
    server.held = False
    assert page.troubles == []  # type: ignore[attr-defined]


def test_errors_are_text_and_the_question_comes_back(page: Page, server: LiveServer) -> None:
    page.goto(server.url)
    ask(page, "hello", 100_000)
    expect(note(page)).to_have_class("error")
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100_000, "temperature": 0}
    expect(note(page)).to_have_text(server.post("/v1/chat/completions", body).json()["error"]["message"])
    expect(page.get_by_label("Message")).to_have_value("hello")
    ask(page, "hello")
    expect(note(page)).to_contain_text("tokens · ")
    assert shown(page) == api(server, [{"role": "user", "content": "hello"}])["content"]


def test_reasoning_is_folded(page: Page, tmp_path: Path) -> None:
    with live(with_template(make_chat("qwen3", tmp_path), THINKING)) as server:
        page.goto(server.url)
        ask(page, "hello")
        expect(note(page)).to_contain_text("tokens · ")
        answer = api(server, [{"role": "user", "content": "hello"}])
        assert answer["reasoning"]
        folded = page.locator("#log article").last.locator("details p")
        expect(folded).to_be_hidden()
        page.get_by_text("Reasoning").last.click()
        expect(folded).to_be_visible()
        assert folded.evaluate("p => p.textContent") == answer["reasoning"]


def test_keys_and_a_server_that_goes_away(page: Page, folder: Path) -> None:
    with live(folder, api_keys=("secret",)) as server:
        page.goto(server.url)
        status = page.get_by_role("status")
        expect(status).to_have_text("this server needs an API key")
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Use key").click()
        expect(status).to_have_text("this API key is not valid")
        ask(page, "hello")
        expect(note(page)).to_have_text("this API key is not valid")
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Use key").click()
        expect(status).to_have_text("live")
        page.reload()  # the tab remembers it
        expect(status).to_have_text("live")
        expect(page.get_by_label("API key")).to_have_value("secret")
    expect(status).to_have_text("the server does not answer")


def test_it_rests_while_nobody_looks(page: Page, server: LiveServer) -> None:
    polls: list[str] = []
    page.goto(server.url)
    expect(page.get_by_role("status")).to_have_text("live")
    hide = "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
    page.evaluate(hide + " document.dispatchEvent(new Event('visibilitychange')); }", True)
    page.wait_for_timeout(200)  # one that was under way
    page.on("request", lambda request: polls.append(request.url))
    page.wait_for_timeout(1500)
    assert polls == []
    with page.expect_request("**/slots"):
        page.evaluate(hide + " document.dispatchEvent(new Event('visibilitychange')); }", False)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_in_either_light(page: Page, server: LiveServer, scheme: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme=scheme)
    page.goto(server.url)
    expect(page.get_by_role("status")).to_have_text("live")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    colors = page.evaluate(
        "['color', 'backgroundColor'].map(name => getComputedStyle(document.body)[name].match(/\\d+/g))"
    )
    text, ground = (sum(map(int, color)) for color in colors)
    assert (text < ground) == (scheme == "light")


def test_every_field_and_button_has_a_name(page: Page, server: LiveServer) -> None:
    page.goto(server.url)
    for control in page.locator("input, textarea, button").all():
        name = control.evaluate("e => e.ariaLabel || e.labels?.[0]?.textContent || e.textContent")
        assert name.strip()
    expect(page.get_by_role("log")).to_have_attribute("aria-live", "polite")
