"""The page in a browser: a chat, its coloured drafts, its speed, and what goes wrong."""

from __future__ import annotations

import json
import re
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
    context = browser.new_context()
    page = context.new_page()
    errors: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"http://127.0.0.1:{served.port}/")
    page.locator("#temperature").evaluate("one => one.value = 0")
    yield page
    context.close()
    assert not errors
    assert all(url.startswith(f"http://127.0.0.1:{served.port}/") for url in asked)


def _send(page: Any, text: str, num_answers: int) -> str:
    page.fill("#text", text)
    page.press("#text", "Enter")
    answer = page.locator(".message.answer .text").nth(num_answers - 1)
    answer.wait_for()
    page.locator("#send", has_text="Send").wait_for()
    return str(answer.text_content())


def _fill(page: Any, name: str, value: str) -> None:
    page.evaluate("document.querySelector('.settings').open = true")
    page.fill(f"#{name}", value)


def _titles(page: Any) -> list[str]:
    page.evaluate("document.getElementById('menu').open = true")
    page.locator("#chats li").first.wait_for()
    return list(page.locator("#chats li button:first-child").all_text_contents())


def _open_chat(page: Any, title: str) -> None:
    _titles(page)
    page.locator("#chats button", has_text=title).click()


def _expected(served: Served, messages: list[dict[str, str]]) -> str:
    engine = served.engine
    prompt = encode_chat(engine.tokenizer, messages)
    model, tokenizer = engine.target.model, engine.tokenizer
    return "".join(
        one.text for one in stream_generate(model, tokenizer, prompt, drafter=None, max_tokens=40)
    )


def test_a_chat(page: Any, served: Served) -> None:
    _fill(page, "key", KEY)
    _fill(page, "most", "40")
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
    assert page.locator(".message.user .text").nth(1).text_content() == "AND <b>YOU</b>"
    assert page.locator("b").count() == 0
    drafts, colour = page.locator("span.draft"), "element => getComputedStyle(element).color"
    assert 0 < drafts.count() < page.locator(".answer span").count() == 80
    assert drafts.first.evaluate(colour) != page.locator(".answer").first.evaluate(colour)
    assert page.locator(".note").count() == 2  # both are cut
    page.click("#reset")
    assert page.locator(".message").count() == 0


def test_a_wrong_key_is_said(page: Any) -> None:
    _fill(page, "key", "wrong")
    page.fill("#text", "HOW")
    page.click("#send")
    error = page.locator(".message.error")
    error.wait_for()
    assert "the key is missing or wrong" in error.text_content()


@pytest.fixture
def slow(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the server write slowly enough to act meanwhile."""
    step = served.worker._step

    def slowly(job: Job) -> None:
        time.sleep(0.03)
        step(job)

    monkeypatch.setattr(served.worker, "_step", slowly)


def _begin(page: Any, text: str, most: str = "480", num_before: int = 0) -> None:
    _fill(page, "key", KEY)
    _fill(page, "most", most)
    page.fill("#text", text)
    page.press("#text", "Enter")
    page.locator(".answer").nth(num_before).locator(".text span").nth(3).wait_for()


def test_a_new_chat_while_it_writes(page: Any, served: Served, slow: None) -> None:
    _begin(page, "MY SECRET IS 42")
    page.click("#reset")
    assert page.locator(".message").count() == 0
    _fill(page, "most", "20")
    with page.expect_request("**/chat/completions") as asked:
        answer = _send(page, "HELLO", 1)
    messages = [{"role": "user", "content": "HELLO"}]
    assert asked.value.post_data_json["messages"] == messages
    assert answer == _expected(served, messages)[:20]
    served.wait_until_idle()
    assert page.locator(".message").count() == 2
    _open_chat(page, "MY SECRET IS 42")
    assert len(page.locator(".answer .text").text_content()) > 3  # as far as it was written


def test_composing_sends_nothing(page: Any) -> None:
    page.fill("#text", "HALF")
    for options in ("isComposing: true", "keyCode: 229"):
        page.evaluate(
            "document.getElementById('text').dispatchEvent(new KeyboardEvent('keydown', "
            f"{{key: 'Enter', bubbles: true, cancelable: true, {options}}}))"
        )
    assert page.locator(".message").count() == 0
    assert page.input_value("#text") == "HALF"


@pytest.mark.parametrize("size", [(1280, 600), (390, 844)])
def test_the_box_stays_in_view_and_scrolling_stays(
    page: Any, slow: None, size: tuple[int, int]
) -> None:
    width, height = size
    page.set_viewport_size({"width": width, "height": height})
    for turn in range(2):
        _begin(page, "A\nB\n" * 20, "100", turn)
        box = page.locator("#text").bounding_box()
        assert box["y"] + box["height"] <= height
        page.click("#send")
        page.locator("#send", has_text="Send").wait_for()
    assert page.locator("#reset").bounding_box()["height"] >= 44
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.fill("#text", "GO ON")
    page.press("#text", "Enter")
    page.locator(".answer").nth(2).locator("span").nth(3).wait_for()
    page.evaluate("document.getElementById('chat').scrollTop = 0")
    page.locator(".answer").nth(2).locator("span").nth(12).wait_for()
    assert page.evaluate("document.getElementById('chat').scrollTop") == 0


def test_a_refused_message_and_a_reload(page: Any, served: Served) -> None:
    _fill(page, "key", "wrong")
    page.fill("#text", "KEEP ME")
    page.click("#send")
    page.locator(".message.error").wait_for()
    assert page.input_value("#text") == "KEEP ME"
    assert page.locator(".message.user").count() == 0
    _fill(page, "key", KEY)
    _fill(page, "most", "40")
    answer = _send(page, "KEEP ME", 1)
    page.reload()
    assert page.locator(".answer .text").text_content() == answer
    assert page.input_value("#key") == KEY
    page.locator("#model", has_text="tiny").wait_for()
    messages = [
        {"role": "user", "content": "KEEP ME"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "MORE"},
    ]
    assert _send(page, "MORE", 2) == _expected(served, messages)


def test_edit_again_and_a_system_prompt(page: Any, served: Served) -> None:
    _fill(page, "key", KEY)
    _fill(page, "most", "40")
    first = _send(page, "ONE", 1)
    page.locator(".answer button", has_text="Again").click()
    page.locator("#send", has_text="Send").wait_for()
    assert page.locator(".answer .text").text_content() == first
    page.locator(".user button", has_text="Edit").click()
    assert page.input_value("#text") == "ONE"
    assert page.locator(".message").count() == 0
    _fill(page, "system", "BE KIND")
    messages = [{"role": "system", "content": "BE KIND"}, {"role": "user", "content": "ONE"}]
    assert _send(page, "ONE", 1) == _expected(served, messages)


def test_several_chats_are_kept(page: Any, served: Served) -> None:
    """The browser keeps chats and settings for the next tab; the key stays in its own."""
    assert page.locator("#temperature").get_attribute("value") == "0.7"
    _fill(page, "key", KEY)
    _fill(page, "most", "10")
    first = _send(page, "FIRST", 1)
    page.click("#reset")
    _send(page, "SECOND", 1)
    tab = page.context.new_page()
    tab.goto(page.url)
    assert tab.locator(".message").count() == 0
    assert (tab.input_value("#most"), tab.input_value("#key")) == ("10", "")
    assert _titles(tab) == ["SECOND", "FIRST"]
    _open_chat(tab, "FIRST")
    assert tab.locator(".answer .text").text_content() == first
    tab.reload()
    assert tab.locator(".answer .text").text_content() == first
    for title in ("SECOND", "FIRST"):
        _titles(tab)
        tab.locator("#chats li", has_text=title).locator("button", has_text="Delete").click()
    assert _titles(tab) == []
    assert tab.locator(".message").count() == 0
    tab.reload()
    assert _titles(tab) == []


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_the_list_of_chats_fits(page: Any, size: tuple[int, int]) -> None:
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.evaluate(
        "for (let i = 0; i < 40; i++) localStorage.setItem(`redrafter-chat-${i}`, JSON.stringify("
        "{id: String(i), changed: i, turns: [{role: 'user', content: 'LONG TITLE '.repeat(20)}]}))"
    )
    assert len(_titles(page)) == 40
    box = page.locator("#chats").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= size[0]
    assert box["y"] + box["height"] <= size[1]
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


def _stream(route: Any, *events: Any) -> None:
    lines = [*map(json.dumps, events), "[DONE]"]
    body = "".join(f"data: {line}\n\n" for line in lines)
    route.fulfill(body=body, content_type="text/event-stream")


def _fake(page: Any, model: dict[str, Any], *events: Any) -> None:
    """Let the page see another server's model and answer."""
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [model]}))
    page.route(
        re.compile("/v1/(chat/)?completions$"),
        lambda route: _stream(route, *events),
    )
    page.reload()


EVIL = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>"
HOSTILE = f"{EVIL}\n```{EVIL}\n{EVIL}\n```\n**{EVIL}** `{EVIL}`\n# {EVIL}\n[a](javascript:hit=1)"


def test_a_model_cannot_write_html(page: Any) -> None:
    """Texts, thoughts, names of models, titles and errors are text, after a reload too."""
    delta = {"reasoning": HOSTILE, "content": HOSTILE}
    events = [{"choices": [{"delta": delta, "finish_reason": None}]}]
    events += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}]
    _fake(page, {"id": EVIL}, *events)
    _send(page, EVIL, 1)
    page.locator("#model", has_text="onerror").wait_for()
    page.reload()
    assert _titles(page) == [EVIL[:80]]
    _fake(page, {"id": EVIL}, {"error": {"message": EVIL}})
    page.fill("#text", "AGAIN")
    page.click("#send")
    page.locator(".error", has_text="onerror").wait_for()
    assert page.locator("img, main script, main a").count() == 0
    assert page.evaluate("window.hit") is None
    folded = page.locator("details.reasoning")
    assert not folded.evaluate("one => one.open")
    assert folded.locator("div").text_content() == HOSTILE


def test_a_model_without_a_chat_template(page: Any) -> None:
    events = [{"choices": [{"text": "MORE", "finish_reason": "stop"}]}]
    _fake(page, {"id": "base", "has_chat": False}, *events)
    page.locator("#alone", has_text="continues each message alone").wait_for()
    _send(page, "ONE", 1)
    with page.expect_request("**/v1/completions") as asked:
        assert _send(page, "TWO", 2) == "MORE"
    assert asked.value.post_data_json["prompt"] == "TWO"


def test_a_sign_of_waiting(page: Any) -> None:
    """It stands until the first token, and screen readers hear the answer."""
    held: list[Any] = []
    _fake(page, {"id": "slow"})
    page.route(re.compile("/v1/chat/completions$"), lambda route: held.append(route))
    page.fill("#text", "HOW")
    page.click("#send")
    waiting = page.locator(".answer .waiting")
    waiting.wait_for()
    assert "…" in waiting.evaluate("one => getComputedStyle(one, '::after').content")
    page.wait_for_function("document.getElementById('send').textContent === 'Stop'")
    while not held:  # the request may come after the page has changed
        page.wait_for_timeout(10)
    _stream(held[0], {"choices": [{"delta": {"content": "WELL"}, "finish_reason": "stop"}]})
    page.locator("#send", has_text="Send").wait_for()
    assert waiting.count() == 0
    assert page.locator("#chat").get_attribute("aria-live") == "polite"


def test_a_server_that_is_gone(page: Any) -> None:
    page.route("**/v1/**", lambda route: route.abort())
    page.fill("#text", "KEEP ME")
    page.click("#send")
    page.locator(".message.error").wait_for()
    assert page.text_content("#send") == "Send"
    assert page.input_value("#text") == "KEEP ME"


def test_markdown(page: Any) -> None:
    """Marks are drawn, HTML is not; every token keeps its colour."""
    text = "A **b** `c`\n```py\nx = '<b>'\n```\n# Head\n```\nopen"
    page.evaluate(
        "text => { const body = document.createElement('div'); body.id = 'body'; "
        "document.body.append(body); "
        "render(body, [[text.slice(0, 4), ''], [text.slice(4), 'draft']]) }",
        text,
    )
    found = page.locator("#body")
    assert found.locator("pre").all_text_contents() == ["x = '<b>'\n", "open"]
    assert found.locator("code").text_content() == "c"
    assert found.locator("strong").all_text_contents() == ["b", "Head"]
    assert found.locator("b").count() == 0
    assert found.locator("pre span.draft").count() == 2
    assert found.locator(".code button", has_text="Copy").count() == 2


def test_a_text_may_be_stopped(page: Any, served: Served, slow: None) -> None:
    _fill(page, "key", KEY)
    _fill(page, "most", "480")
    page.fill("#text", "HOW")
    page.click("#send")
    page.locator(".answer span").nth(3).wait_for()
    page.click("#send")
    page.locator("#send", has_text="Send").wait_for()
    served.wait_until_idle()
    assert served.worker.counters.texts["cancelled"] > 0
    assert page.locator(".error").count() == 0
    _fill(page, "most", "40")
    assert len(_send(page, "GO ON", 2)) == 40
