"""The chat page in a browser: its chats, its texts, its errors, and what people need to use it."""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from mlx_redrafter import generate
from mlx_redrafter.engine.prompt_encoding import encode_chat
from tests.server.serving import KEY, Served, wait_until

playwright: Any = pytest.importorskip("playwright.sync_api", reason="drives the browser")
from tests.server.scripted import MODEL, Scripted, scripting  # noqa: E402

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Root, as in containers, may not have Chromium's sandbox; the page is our own.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
# Seconds to wait for anything, on machines that are busy, too.
LIMIT = 90
# Script whose value are the texts of the chat on the page.
CONTENTS = "path(chat).map(turn => turn.content)"
Open = Callable[..., Any]
expect = playwright.expect
expect.set_options(timeout=1000 * LIMIT)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser of this machine, which plays no sound and shows no window."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    with scripting() as one:
        yield one


@pytest.fixture
def script(scripted: Scripted) -> Scripted:
    """The scripted server, as at its start."""
    scripted.say("Well.")
    scripted.models, scripted.key = [dict(MODEL)], ""
    scripted.refusals.clear()
    scripted.asked.clear()
    return scripted


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """A function that opens a page, none of whose scripts may fail and which asks no other host."""
    errors: list[str] = []
    asked: list[str] = []
    urls: list[str] = []

    def opening(url: str, context: Any = None, **options: Any) -> Any:
        page = (context or browser.new_context(**options)).new_page()
        page.set_default_timeout(1000 * LIMIT)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        urls.append(url)
        page.goto(url)
        return page

    yield opening
    for context in browser.contexts:
        context.close()
    assert not errors
    assert all(one.startswith((*urls, "data:image/svg", "blob:")) for one in asked)


@pytest.fixture
def page(open_page: Open, script: Scripted) -> Any:
    page = open_page(script.url)
    _until(page, "models.length > 0")
    return page


def _until(page: Any, condition: str) -> None:
    """Wait for a condition; the browser's own waiting needs what the page's policy forbids."""
    _expect(page, True, f"Boolean({condition})")


def _expect(page: Any, expected: Any, script: str = CONTENTS) -> None:
    """Wait until a script has a value: what a key or click begins may end after it."""
    end = time.monotonic() + LIMIT
    while (found := page.evaluate(script)) != expected:
        assert time.monotonic() < end, (script, found, expected)
        time.sleep(0.02)


def _enter(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def _begin(page: Any, text: str) -> None:
    _enter(page, text)
    page.locator("#send", has_text="Stop").wait_for()


def _ask(page: Any, text: str, alert: str) -> None:
    _enter(page, text)
    page.locator("#alert", has_text=alert).wait_for()


def _wait(page: Any) -> None:
    page.locator("#send", has_text="Send").wait_for()


def _send(page: Any, text: str) -> str:
    """Ask a question; return the text of the answer as the page keeps it."""
    _enter(page, text)
    _until(page, "running === null && find('text').value === ''")
    return str(page.evaluate("path(chat).at(-1).content"))


def _begin_held(page: Any, script: Scripted, question: str, text: str, held: int) -> None:
    script.say(text, held=held)
    _begin(page, question)
    _until(page, f"running.turn.tokens === {held}")


def _set(page: Any, name: str, value: str) -> None:
    page.click("#settings")
    page.fill(f"#{name}", value)
    page.keyboard.press("Escape")
    expect(page.locator("#text")).to_be_focused()


def _press(page: Any, name: str, index: int = -1) -> None:
    """Press the last button of a name, or another one."""
    page.get_by_role("button", name=name, exact=True).nth(index).click()


def _titles(page: Any) -> Any:
    return expect(page.locator("#chats li > :first-child"))


def _notes(page: Any) -> Any:
    return expect(page.locator("article p.note"))


# With a model


@pytest.fixture
def tiny(open_page: Open, served: Served) -> Any:
    page = open_page(f"{served.root}/")
    page.locator("#key").wait_for()
    page.fill("#key", KEY)
    page.fill("#max_tokens", "40")
    page.keyboard.press("Enter")
    _until(page, "models.length > 0")
    return page


def _expected(served: Served, messages: list[dict[str, str]]) -> str:
    engine = served.engine
    prompt = encode_chat(engine.tokenizer, messages)
    return generate(engine.target.model, engine.tokenizer, prompt, drafter=None, max_tokens=40)


def test_a_chat_has_the_texts_of_the_library(tiny, served):
    messages = [{"role": "user", "content": "HOW ARE YOU"}]
    first = _send(tiny, "HOW ARE YOU")
    assert first == _expected(served, messages)
    assert re.search(
        r"40 tokens, \d+ of them drafted, [\d.]+ tokens/s, [\d.]+ tokens/step",
        tiny.text_content(".speed"),
    )
    _notes(tiny).to_have_text(["Cut at the maximum number of tokens (40); raise it in Settings."])
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "AND <b>U"}]
    assert _send(tiny, "AND <b>U") == _expected(served, messages)
    _set(tiny, "system", "BE KIND")
    tiny.click("#new")
    messages = [{"role": "system", "content": "BE KIND"}, {"role": "user", "content": "ONE"}]
    assert _send(tiny, "ONE") == _expected(served, messages)


def test_a_stopped_answer_ends(tiny, served, monkeypatch):
    served.slow_down(monkeypatch, 0.03)
    _set(tiny, "max_tokens", "480")
    _begin(tiny, "HOW")
    _until(tiny, "running.turn.tokens > 3")
    tiny.keyboard.press("Escape")
    _wait(tiny)
    served.wait_until_idle()
    wait_until(lambda: served.worker.counters.texts["cancelled"] > 0)
    _notes(tiny).to_have_text(["Stopped."])


def test_a_long_chat_goes_on(tiny):
    """Twice the context of 512 tokens; the server refuses none of it for good."""
    for i in range(10):
        _send(tiny, f"{i}{' WORDS AND MORE' * 4}")
        expect(tiny.locator("#alert")).to_be_empty()
    tiny.locator("article p.note", has_text="oldest messages were left out").first.wait_for()


def test_the_rules_for_the_browser(served):
    for path, kind in {"/": "text/html", "/page.js": "text/javascript"}.items():
        with urlopen(f"{served.root}{path}", timeout=60) as response:
            assert response.read()
        assert response.headers["Content-Type"] == f"{kind}; charset=utf-8"
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "trusted-types dompurify" in policy


# Nothing is lost


def test_a_reload_keeps_a_partial_answer(page, script):
    _begin_held(page, script, "ASK", "one two three four", 3)
    page.reload()
    _expect(page, ["ASK", "one two three "])
    _until(page, "document.querySelector('article p.note').textContent.includes('Unfinished')")
    script.go.set()
    _press(page, "Regenerate")
    _wait(page)
    _expect(page, ["ASK", "one two three four"])
    _press(page, "Earlier version")
    _expect(page, ["ASK", "one two three "])


def test_a_partial_answer_is_saved_meanwhile(open_page, page, script):
    """Another window sees it, as it would after a crash of this one."""
    _begin_held(page, script, "ASK", "one two three four", 3)
    other = open_page(script.url, page.context)
    _until(
        other,
        "load(find('chats') && Object.keys(localStorage)"
        ".find(name => name.startsWith(CHAT)).slice(CHAT.length)).turns.length == 2",
    )
    other.locator("#chats button", has_text="ASK").first.click()
    assert other.evaluate(CONTENTS)[0] == "ASK"
    script.go.set()
    _wait(page)
    _until(other, "path(chat).at(-1).content === 'one two three four'")
    _notes(other).to_have_text([])


def test_a_question_without_an_answer(page, script):
    script.refuse(503, "the server ends")
    _ask(page, "ASK", "the server ends")
    page.reload()
    _press(page, "Answer")
    page.locator(".speed").wait_for()
    _expect(page, ["ASK", "Well."])


def test_edits_and_other_answers_keep_the_old_ones(page, script):
    _send(page, "ONE")
    _send(page, "TWO")
    _press(page, "Edit", 0)
    page.keyboard.press("Escape")
    _expect(page, ["ONE", "Well.", "TWO", "Well."])
    _press(page, "Edit", 0)
    assert page.input_value("article textarea") == "ONE"
    page.fill("article textarea", "THREE")
    page.press("article textarea", "Enter")
    _wait(page)
    _expect(page, ["THREE", "Well."])
    page.locator("article.user .note", has_text="2 of 2").wait_for()
    _press(page, "Earlier version")
    _expect(page, ["ONE", "Well.", "TWO", "Well."])
    _until(page, "document.activeElement.ariaLabel === 'Later version'")
    page.reload()
    _expect(page, ["ONE", "Well.", "TWO", "Well."])
    script.say("Better.")
    _press(page, "Regenerate", 0)
    _wait(page)
    _expect(page, ["ONE", "Better."])
    assert script.asked[-1]["messages"] == [{"role": "user", "content": "ONE"}]
    _press(page, "Earlier version")
    _expect(page, ["ONE", "Well.", "TWO", "Well."])
    script.refuse(503, "the server ends")
    _press(page, "Regenerate", 0)
    page.locator("#alert", has_text="the server ends").wait_for()
    _expect(page, ["ONE", "Well.", "TWO", "Well."])
    script.say("Best.", held=0)
    _press(page, "Regenerate", 0)
    page.locator("#send", has_text="Stop").wait_for()
    assert "of 2" not in page.inner_text("article.assistant")
    page.reload()
    _expect(page, ["ONE", "Better."])


def test_delete_can_be_undone(page, script):
    _send(page, "FIRST")
    page.click("#new")
    _send(page, "SECOND")
    _titles(page).to_have_text(["SECOND", "FIRST"])
    _press(page, "Delete SECOND")
    expect(page.locator("article")).to_have_count(0)
    _until(page, "document.activeElement.textContent === 'Undo'")
    page.keyboard.press("Enter")
    _expect(page, ["SECOND", "Well."])
    page.locator("#chats button", has_text="SECOND").first.wait_for()
    _titles(page).to_have_count(2)
    _press(page, "Delete FIRST")
    page.reload()
    _titles(page).to_have_text(["SECOND"])


def test_a_new_chat_while_it_writes(page, script):
    _begin_held(page, script, "SECRET", "one two three four", 2)
    page.click("#new")
    expect(page.locator("article")).to_have_count(0)
    script.say("Other.")
    assert _send(page, "HELLO") == "Other."
    assert script.asked[-1]["messages"] == [{"role": "user", "content": "HELLO"}]
    page.locator("#chats button", has_text="SECRET").first.click()
    _expect(page, ["SECRET", "one two "])
    _notes(page).to_have_text(["Stopped."])


def test_two_windows_of_one_chat(open_page, page, script):
    _send(page, "FIRST")
    other = open_page(script.url, page.context)
    other.locator("#chats button", has_text="FIRST").first.click()
    _begin_held(page, script, "HERE", "one two", 1)
    _begin(other, "THERE")
    script.go.set()
    _wait(page)
    _wait(other)
    _expect(page, ["FIRST", "Well.", "HERE", "one two"])
    _expect(other, ["FIRST", "Well.", "THERE", "one two"])
    _until(other, "load(chat.id).turns.filter(turn => turn.end).length === 3")
    stored = "load(chat.id).turns.map(turn => turn.content).sort()"
    contents = ["FIRST", "HERE", "THERE", "Well.", "one two", "one two"]
    _expect(other, contents, stored)
    other.reload()
    other.click("#new")
    _send(other, "NEW")
    page.locator("#chats button", has_text="NEW").first.wait_for()
    _press(other, "Delete FIRST")
    page.locator("#alert", has_text="deleted in another window").wait_for()
    expect(page.locator("article")).to_have_count(0)
    _press(other, "Undo")
    page.locator("#chats button", has_text="FIRST").first.wait_for()
    assert page.locator("#chats button", has_text="Undo").count() == 0


def test_a_chat_of_an_earlier_page(page, script):
    page.evaluate(
        "localStorage.setItem('redrafter-chat-17-x', JSON.stringify("
        "{id: '17-x', changed: 5, turns: [{role: 'user', content: 'OLD'}, "
        "{role: 'assistant', content: 'a bcd e', reasoning: 'r', "
        "parts: [['a ', ''], ['bc', 'draft'], ['d', 'draft'], [' e', '']], end: 'length'}]}));"
        "localStorage.setItem('redrafter-settings', JSON.stringify("
        "{system: 'BE KIND', temperature: '0.7', most: '2048'}))"
    )
    page.reload()
    page.locator("#chats button", has_text="OLD").first.click()
    _expect(page, ["OLD", "a bcd e"])
    assert page.locator(".thinking div").text_content() == "r"
    assert _drafts(page) == ["bcd"]
    _send(page, "MORE")
    body = script.asked[-1]
    assert [one["content"] for one in body["messages"]] == ["BE KIND", "OLD", "a bcd e", "MORE"]
    assert "temperature" not in body
    assert "max_tokens" not in body


def test_a_full_storage_is_said(page, script):
    page.evaluate(
        "for (let size = 4e6; size > 1; size /= 2) { try { for (let i = 0; ; i++)"
        "localStorage.setItem(`fill-${size}-${i}`, 'x'.repeat(size)) } catch {} }"
    )
    _send(page, "KEEP ME")
    page.locator("#alert", has_text="storage is full").wait_for()
    with page.expect_download() as loading:
        _press(page, "Export")
    assert '"KEEP ME"' in Path(loading.value.path()).read_text()
    page.evaluate(
        "for (const name of Object.keys(localStorage)) "
        "if (name.startsWith('fill')) localStorage.removeItem(name)"
    )
    _send(page, "AGAIN")
    expect(page.locator("#alert")).to_be_empty()
    page.reload()
    _expect(page, ["KEEP ME", "Well.", "AGAIN", "Well."])


def test_a_chat_can_be_exported(page, script):
    script.say("A **b**.")
    _send(page, "WHY?")
    with page.expect_download() as loading:
        _press(page, "Markdown")
    assert loading.value.suggested_filename == "WHY-.md"
    text = Path(loading.value.path()).read_text()
    assert text == "# WHY?\n\n## You\n\nWHY?\n\n## org/scripted\n\nA **b**.\n"
    with page.expect_download() as loading:
        _press(page, "JSON")
    assert '"content": "A **b**."' in Path(loading.value.path()).read_text()


def test_settings_stay_but_keys_do_not(open_page, page, script):
    _set(page, "top_k", "7")
    _set(page, "key", "secret")
    page.fill("#text", "HALF")
    page.reload()
    fields = "['top_k', 'key', 'text'].map(id => find(id).value)"
    _expect(page, ["7", "secret", "HALF"], fields)
    other = open_page(script.url, page.context)
    _expect(other, ["7", "", ""], fields)


# Texts


def test_markdown_as_it_is_written(page, script):
    text = (
        "# Head\n\n- one\n  1. in *it*\n\n> quote\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n"
        "```python\nx = '<b>'\n``` \n\n- [x] done and ~~not~~ [link](http://a.example/)"
    )
    held = text.split(" ").index("'<b>'\n```")
    _begin_held(page, script, "DRAW", text, held)
    body = page.locator("article.assistant .text")
    page.locator("pre").wait_for()
    assert body.locator("h3").text_content() == "Head"
    assert body.locator("ul ol li em").text_content() == "it"
    assert body.locator("blockquote").text_content().strip() == "quote"
    assert body.locator("td").all_text_contents() == ["1", "2"]
    assert body.locator("pre").text_content() == "x = \n"  # still open
    assert body.locator(".bar span").text_content() == "python"
    page.evaluate("window.first = document.querySelector('.text .block')")
    script.go.set()
    page.locator("del").wait_for()
    kept = "window.first.isConnected || find('turns').querySelectorAll('h3').length"
    assert page.evaluate(kept) == 1
    _wait(page)
    assert body.locator("pre").text_content() == "x = '<b>'\n"
    assert body.locator("input[type=checkbox]").is_checked()
    assert body.locator("a").get_attribute("rel") == "noopener noreferrer"
    script.say("\n".join(["line"] * 800))  # a long paragraph keeps its lines
    _send(page, "POEM")
    assert page.locator("article.assistant p").last.bounding_box()["height"] > 800 * 16


EVIL = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>"
HOSTILE = (
    f"{EVIL}\n\n```{EVIL}\n{EVIL}\n```\n\n**{EVIL}** `{EVIL}`\n\n# {EVIL}\n\n| {EVIL} |\n|---|\n\n"
    "[a](javascript:window.hit=1) [b](JaVaScRiPt:window.hit=1) ![c](http://foreign.example/c.png)\n\n"
    "<a href='javascript:window.hit=1'>d</a> [e](data:text/html,<script>window.hit=1</script>)\n\n"
    "<iframe src='http://foreign.example'></iframe><style>* { display: none }</style>"
)


def test_a_model_cannot_write_html(page, script):
    """Texts, names of models, titles and errors are text; images are links."""
    script.models = [MODEL | {"id": EVIL, "drafter": EVIL}]
    script.say(HOSTILE)
    page.reload()
    page.locator("#start h2", has_text="onerror").wait_for()
    assert _send(page, EVIL) == HOSTILE
    script.refuse(400, EVIL)
    _ask(page, EVIL, "onerror")
    assert page.locator("img, main script, main style, iframe").count() == 0
    links = page.evaluate("[...document.querySelectorAll('main a')].map(one => one.href)")
    assert "http://foreign.example/c.png" in links
    assert all(not one or one.startswith("http:") for one in links)
    for link in page.locator("main a").all():
        if not link.get_attribute("href"):
            link.click()
    assert page.evaluate("window.hit") is None
    assert EVIL in page.locator("article.assistant .block").first.text_content()
    _titles(page).to_have_text([EVIL[:80]])


@pytest.mark.parametrize("text", ["_a" * 100_000, "> " * 100_000])
def test_a_text_of_200_kilobytes_in_one_line(page, script, text):
    script.pieces = [text, " end"]
    assert _send(page, text) == text + " end"
    shown = page.locator("article.assistant .text").text_content()
    assert shown.strip() == text + " end"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.reload()
    _expect(page, [text, text + " end"])


@pytest.mark.parametrize("is_secure", [True, False])
def test_copy_says_so(open_page, script, is_secure):
    """Over http from another machine, browsers have no clipboard object."""
    page = open_page(script.url, permissions=["clipboard-write"])
    script.say("Say\n\n```sh\nls -l\n```")
    if not is_secure:
        page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    _send(page, "COPY")
    _press(page, "Copy sh")
    page.locator(".bar button", has_text="Copied").wait_for()
    _until(page, "find('status').textContent === 'Copied'")
    page.focus("#text")
    page.keyboard.press("Control+V")
    expect(page.locator("#text")).to_have_value("ls -l\n")
    if not is_secure:
        page.evaluate("document.execCommand = () => false")
        _press(page, "Copy")
        page.locator(".actions button", has_text="Not copied").wait_for()


def _drafts(page: Any) -> list[str]:
    if page.locator("[aria-pressed=true]").count() == 0:
        _press(page, "Show drafts")
    return list(
        page.evaluate(
            "[...CSS.highlights.get('drafts')].map("
            "one => one.startContainer.data.slice(one.startOffset, one.endOffset))"
        )
    )


def test_drafts_are_shown_on_demand(page, script):
    """Underlined, in all Markdown, but not in code; every second word is a draft."""
    script.say(
        "One two **three four** five\n\n- six `code seven` eight\n\n```\nx y\n```\n\nlast one"
    )
    _send(page, "DRAFTS")
    assert page.evaluate("CSS.highlights.get('drafts').size") == 0
    assert [one.strip() for one in _drafts(page)] == ["two", "four", "six", "last"]
    style = page.evaluate(
        "[...document.styleSheets[0].cssRules].find("
        "one => one.selectorText === '::highlight(drafts)').style.textDecorationLine"
    )
    assert style == "underline"
    page.reload()
    page.locator("[aria-pressed=true]").wait_for()
    _press(page, "Show drafts")
    assert page.evaluate("CSS.highlights.get('drafts').size") == 0


# The server


def test_the_first_page(open_page, script):
    script.models = [dict(MODEL), MODEL | {"id": "second", "state": "not_loaded", "drafter": None}]
    page = open_page(script.url)
    start = page.locator("#start")
    page.locator("#start h2", has_text="Chat with org/scripted").wait_for()
    assert "keeps a draft only if it is what the model writes" in start.text_content()
    assert start.locator("dd").all_text_contents() == ["8,192 tokens", "org/drafter"]
    page.select_option("#models", "second")
    assert "The first message loads the model." in start.text_content()
    assert page.locator("h1").all_text_contents() == ["redrafter-mlx"]
    _send(page, "ASK")
    assert script.asked[-1]["model"] == "second"
    assert not start.is_visible()


def test_the_defaults_are_the_servers(page, script):
    _send(page, "ASK")
    assert set(script.asked[-1]) == {"path", "model", "messages", "stream", "stream_options"}
    assert page.get_attribute("#temperature", "placeholder") == "0.5"
    assert page.get_attribute("#max_tokens", "placeholder") == "256"
    _set(page, "temperature", "0")
    _send(page, "AGAIN")
    assert script.asked[-1]["temperature"] == 0
    assert "max_tokens" not in script.asked[-1]


def test_a_server_that_ends_amid_an_answer(page, script):
    script.say("one two three", end="broken")
    _enter(page, "ASK")
    _until(page, "running && running.turn.tokens === 3")
    script.go.set()
    page.locator("#alert", has_text="does not run any more").wait_for()
    _expect(page, ["ASK", "one two three"])
    _notes(page).to_have_text(["The connection to the server broke off here."])
    script.say("Back.")
    _press(page, "Try again")
    page.locator("article", has_text="Back.").wait_for()
    expect(page.locator("#alert")).to_be_empty()
    _expect(page, ["ASK", "Back."])


def test_a_server_that_fails(page, script):
    script.say("one two", end={"error": {"message": "the server ends"}})
    _ask(page, "ASK", "the server ends")
    _notes(page).to_have_text(["The server ended this answer."])
    page.click("#new")
    message = "This model's maximum context length is 64 tokens, but messages has 99; shorten it"
    script.refuse(400, message, "context_length_exceeded")
    _ask(page, "LONG", "64 tokens, but messages has 99")
    _press(page, "Edit")
    assert page.input_value("article textarea") == "LONG"
    page.keyboard.press("Escape")
    page.click("#new")
    page.route("**/v1/**", lambda route: route.abort())
    _ask(page, "KEEP ME", "does not run any more")
    _expect(page, ["KEEP ME"])


def test_a_missing_key_opens_settings(open_page, script):
    script.key = "sécret“".encode().decode("latin-1")
    page = open_page(script.url)
    page.locator("#refused").wait_for()
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.press("Escape")
    _enter(page, "ASK")
    page.locator("#refused").wait_for()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.locator("#refused").wait_for()
    page.fill("#key", "sécret“")
    page.keyboard.press("Enter")
    page.locator("article", has_text="Well.").wait_for()
    expect(page.locator("#alert")).to_be_empty()


def test_thinking_does_not_fill_the_context(page, script):
    """It is not sent again, however long it was."""
    script.say("Well.", thought=6000)
    _send(page, "ONE")
    _send(page, "TWO " * 20)
    assert len(script.asked[-1]["messages"]) == 3


def test_a_full_context_loses_the_oldest_turns(page, script):
    _set(page, "system", "SYSTEM")
    for i in range(4):
        _send(page, f"Q{i}")
    script.refuse(400, "context", "context_length_exceeded")
    _send(page, "Q4")
    sent = [one["content"] for one in script.asked[-1]["messages"]]
    assert sent == ["SYSTEM", "Q2", "Well.", "Q3", "Well.", "Q4"]
    note = "The model's context is full: the 4 oldest messages were left out of this answer."
    _notes(page).to_have_text([note])
    _send(page, "Q5")
    sent = [one["content"] for one in script.asked[-1]["messages"]]
    assert sent[:2] == ["SYSTEM", "Q2"]  # the server has computed these
    script.models[0]["context_length"] = 130  # the last prompt had 100 tokens
    page.reload()
    _until(page, "models.length > 0")
    num_asked = len(script.asked)
    _send(page, "Q6")
    assert len(script.asked) == num_asked + 1
    assert len(script.asked[-1]["messages"]) < 8


def test_an_answer_cut_by_the_context_says_so(page, script):
    script.say("one two three", end="length")
    _send(page, "ASK")
    page.locator("article p.note", has_text="context of 103 tokens is full").wait_for()
    _set(page, "max_tokens", "3")
    _press(page, "Regenerate")
    _wait(page)
    _notes(page).to_have_text(["Cut at the maximum number of tokens (3); raise it in Settings."])


def test_a_model_without_a_chat_template(page, script):
    script.models[0]["has_chat"] = False
    page.reload()
    page.locator("#start", has_text="continues each message alone").wait_for()
    _send(page, "ONE")
    assert _send(page, "TWO") == "Well."
    assert script.asked[-1]["path"] == "/v1/completions"
    assert script.asked[-1]["prompt"] == "TWO"


# Keyboard, screen readers and small screens


def test_the_focus_is_where_one_types(page, script):
    expect(page.locator("#text")).to_be_focused()
    page.click("#new")
    expect(page.locator("#text")).to_be_focused()
    _begin_held(page, script, "ASK", "one two three", 2)
    page.keyboard.press("Escape")
    _wait(page)
    expect(page.locator("#text")).to_be_focused()
    _notes(page).to_have_text(["Stopped."])
    _begin_held(page, script, "ASK", "one two three", 2)
    page.click("#send")
    _wait(page)
    expect(page.locator("#text")).to_be_focused()
    page.click("#settings")
    page.keyboard.press("Escape")
    expect(page.locator("#text")).to_be_focused()


def test_composing_sends_nothing(page, script):
    page.fill("#text", "HALF")
    for options in ("isComposing: true", "keyCode: 229"):
        page.evaluate(
            "find('text').dispatchEvent(new KeyboardEvent('keydown', "
            f"{{key: 'Enter', bubbles: true, cancelable: true, {options}}}))"
        )
    page.press("#text", "Shift+Enter")
    assert page.input_value("#text") == "HALF\n"
    assert not script.asked


def test_a_screen_reader_hears_finished_answers(page, script):
    page.evaluate(
        "window.heard = []; for (const one of document.querySelectorAll("
        "'[aria-live], [role=status], [role=alert], [role=log]')) new MutationObserver(() => "
        "window.heard.push(one.textContent)).observe(one, {childList: true, subtree: true})"
    )
    script.say("one two three four five", pause=0.05)
    _send(page, "ASK")
    heard = ["The model is answering.", "one two three four five"]
    _expect(page, heard, "window.heard.filter(one => one)")
    script.say("one two", held=0)
    _begin(page, "ASK")  # others see a sign of waiting
    waiting = page.locator("article .waiting")
    waiting.wait_for()
    assert "…" in waiting.evaluate("one => getComputedStyle(one, '::after').content")
    script.go.set()
    waiting.wait_for(state="detached")


@pytest.mark.parametrize("size", [(1280, 600), (390, 844)])
def test_the_box_and_scrolling_stay(page, script, size):
    width, height = size
    page.set_viewport_size({"width": width, "height": height})
    for _ in range(2):
        _send(page, "A\nB\n" * 20)
        box = page.locator("#text").bounding_box()
        assert box["y"] + box["height"] <= height
    assert page.locator("#new").bounding_box()["height"] >= 44
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    _begin_held(page, script, "GO ON", "one\n\n " * 20, 9)
    page.evaluate("find('log').scrollTop = 0")
    script.go.set()
    _wait(page)
    assert page.evaluate("find('log').scrollTop") == 0


def test_the_list_of_chats_fits(page):
    width, height = 390, 844
    page.set_viewport_size({"width": width, "height": height})
    page.evaluate(
        "for (let i = 0; i < 40; i++) localStorage.setItem(`redrafter-chat-${i}`, JSON.stringify("
        "{id: String(i), changed: i, turns: [{role: 'user', content: 'LONG TITLE '.repeat(20)}]}))"
    )
    page.reload()
    page.click("#menu")
    _titles(page).to_have_count(40)
    box = page.locator("#side").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert box["y"] + box["height"] <= height
    assert page.evaluate("document.documentElement.scrollWidth") <= width


AXE = (Path(__file__).parent / "axe.min.js").read_text(encoding="utf-8")


def _findings(page: Any, theme: str) -> list[Any]:
    """Return what axe-core finds, with elements; only colours depend on the theme."""
    page.evaluate(AXE)
    rules = "" if theme == "light" else ", runOnly: ['color-contrast']"
    run = f"axe.run({{resultTypes: ['violations']{rules}}}).then(found => found.violations)"
    found = page.evaluate(run)  # all that axe-core tells would take seconds to get here
    return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(open_page, script, theme):
    page = open_page(script.url, color_scheme=theme, viewport={"width": 1280, "height": 844})
    _until(page, "models.length > 0")
    assert _findings(page, theme) == []
    script.say(
        "# A\n\n### B\n\n- [ ] c `d`\n\n> e\n\n| f | g |\n|---|---|\n| [h](http://h.example) | 2 |"
        "\n\n```py\nx\n```"
    )
    _send(page, "ASK")
    _press(page, "Show drafts")
    assert _findings(page, theme) == []
    page.click("#settings")
    assert _findings(page, theme) == []
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 390, "height": 844})
    _press(page, "Regenerate")
    _wait(page)
    _press(page, "Edit")
    assert _findings(page, theme) == []
    page.keyboard.press("Escape")
    script.refuse(500, "the server failed")
    _enter(page, "MORE")
    page.locator("#alert button").wait_for()
    assert _findings(page, theme) == []
