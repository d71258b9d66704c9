"""The page in a browser: a chat, its coloured drafts, its speed, and what goes wrong."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_redrafter import stream_generate
from mlx_redrafter.engine.prompt_encoding import encode_chat
from mlx_redrafter.server.job import Job
from tests.server.serving import KEY, Served

playwright: Any = pytest.importorskip("playwright.sync_api", reason="drives the browser")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser of this machine, which plays no sound and shows no window."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as driver:
        # Root, as in containers, may not have Chromium's sandbox; the page is our own.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    """The page, none of whose scripts may fail and which asks nobody but the server."""
    page = browser.new_page()
    errors: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"http://127.0.0.1:{served.port}/")
    yield page
    page.close()
    assert not errors
    assert all(url.startswith(f"http://127.0.0.1:{served.port}/") for url in asked)


def _send(page: Any, text: str, num_answers: int) -> str:
    page.fill("#text", text)
    page.press("#text", "Enter")
    answer = page.locator(".message.answer").nth(num_answers - 1)
    answer.wait_for()
    page.locator("#send", has_text="Send").wait_for()
    return str(answer.text_content())


def _expected(served: Served, messages: list[dict[str, str]]) -> str:
    engine = served.engine
    prompt = encode_chat(engine.tokenizer, messages)
    model, tokenizer = engine.target.model, engine.tokenizer
    return "".join(
        one.text for one in stream_generate(model, tokenizer, prompt, drafter=None, max_tokens=40)
    )


def test_a_chat(page: Any, served: Served) -> None:
    page.fill("#key", KEY)
    page.fill("#most", "40")
    first = _send(page, "HOW ARE YOU", 1)
    messages = [{"role": "user", "content": "HOW ARE YOU"}]
    assert first == _expected(served, messages)
    assert page.text_content("#model") == "tiny"
    assert "tokens/s" in page.text_content("#speed")
    second = _send(page, "AND <b>YOU</b>", 2)
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "AND <b>YOU</b>"},
    ]
    assert second == _expected(served, messages)
    assert page.locator(".message.user").nth(1).text_content() == "AND <b>YOU</b>"
    assert page.locator("b").count() == 0
    drafts, colour = page.locator("span.draft"), "element => getComputedStyle(element).color"
    assert 0 < drafts.count() < page.locator(".answer span").count() == 80
    assert drafts.first.evaluate(colour) != page.locator(".answer").first.evaluate(colour)
    page.click("#reset")
    assert page.locator(".message").count() == 0


def test_a_wrong_key_is_said(page: Any) -> None:
    page.fill("#key", "wrong")
    page.fill("#text", "HOW")
    page.click("#send")
    error = page.locator(".message.error")
    error.wait_for()
    assert "the key is missing or wrong" in error.text_content()


def test_a_text_may_be_stopped(page: Any, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    step = served.worker._step

    def slowly(job: Job) -> None:
        time.sleep(0.05)  # else the text ends first
        step(job)

    monkeypatch.setattr(served.worker, "_step", slowly)
    page.fill("#key", KEY)
    page.fill("#most", "480")
    page.fill("#text", "HOW")
    page.click("#send")
    page.locator(".answer span").nth(3).wait_for()
    page.click("#send")
    page.locator("#send", has_text="Send").wait_for()
    served.wait_until_idle()
    assert served.worker.counters.texts["cancelled"] > 0
    assert page.locator(".error").count() == 0
    page.fill("#most", "40")
    assert len(_send(page, "GO ON", 2)) == 40
