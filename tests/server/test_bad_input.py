"""What is wrong gets OpenAI's error object and the right status, and disturbs nobody."""

import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any
from unittest.mock import MagicMock

import pytest

from mlx_redrafter.decoding import prefill
from mlx_redrafter.decoding.scheduler import Scheduler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.server import worker
from mlx_redrafter.server.fields import Fields, parse_json
from mlx_redrafter.server.limits import Limits
from mlx_redrafter.server.protocols.openai_chat import read as read_chat
from mlx_redrafter.server.protocols.openai_completions import read as read_completion
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.tools import read_tools
from tests.helpers.calls import at_call
from tests.server.serving import (
    DEFAULTS,
    KEY,
    PATH,
    answer_on,
    events,
    make_engine,
    sent,
    serving,
    wait_until,
)

CHAT = {"messages": [{"role": "user", "content": "A"}]}
TEXT = {"prompt": "A"}
DEEP = b'{"prompt": ' + b"[" * 100_000

LOOK = {"type": "function", "function": {"name": "look"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}
BAD_FIELDS: dict[str, list[Any]] = {
    "messages": [[]], "temperature": ["hot", 10**30], "top_p": [2], "top_k": [1.5],
    "min_p": [True], "seed": [2**32], "max_tokens": [0], "n": [17], "stop": [[""], ["A"] * 17],
    "stream": [1], "stream_options": [{}], "presence_penalty": [3], "repetition_penalty": [1e-300],
    "logit_bias": [{"A": 1}], "logprobs": [2], "top_logprobs": [2], "tool_choice": ["required"],
    "chat_template_kwargs": [{"chat_template": "{{ 1 }}"}], "colour": ["red"],
}  # fmt: skip
BAD_BODIES: list[tuple[str, dict[str, Any]]] = [
    *((name, {name: value}) for name, values in BAD_FIELDS.items() for value in values),
    ("messages[0]", {"messages": ["A"]}),
    ("messages[0].role", {"messages": [{"role": "boss", "content": "A"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("stream_options.colour", {"stream": True, "stream_options": {"colour": True}}),
    ("logit_bias.5", {"logit_bias": {"5": "much"}}),
    ("tool_choice", {"tools": [LOOK], "tool_choice": ALLOWED}),
    ("tools[0].type", {"tools": [{"function": {"name": "look"}}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
    ("response_format.type", {"response_format": {"type": "yaml"}}),
    ("response_format.json_schema.schema", {"response_format": {"type": "json_schema"}}),
    ("response_format.colour", {"response_format": {"type": "text", "colour": "red"}}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_BODIES)
def test_bad_fields_of_a_chat(param, fields):
    with pytest.raises(Refusal) as caught:
        read_chat({**CHAT, **fields}, DEFAULTS)
    error = caught.value.to_json()["error"]
    assert (error["param"], caught.value.status) == (param, 400)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param.partition(".")[0].partition("[")[0])


def test_messages_become_those_of_templates():
    answer = {"role": "assistant", "reasoning": "Hm.", "tool_calls": None}
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "A"}]},
        {**answer, "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    request, _ = read_chat({"messages": messages, "reasoning_effort": "none"}, DEFAULTS)
    assert [one["role"] for one in request.messages] == ["system", "user", "assistant"]
    assert [one["content"] for one in request.messages] == ["Be short.", "A", "No."]
    assert request.messages[2]["reasoning_content"] == "Hm."
    assert "tool_calls" not in request.messages[2], "templates would count them"
    assert (request.effort, request.template_options) == ("none", {"enable_thinking": False})


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"arguments": ""}, {}),
        ({"arguments": None}, {}),
        ({}, {}),
        ({"arguments": '{"a": 1}'}, {"a": 1}),
        ({"arguments": '{"a'}, {"arguments": '{"a'}),
    ],
)
def test_calls_have_an_object_of_arguments(given, found):
    """Templates list its members. ``max_tokens`` may have cut a call that a client sends back."""
    calls = [{"id": "1", "type": "function", "function": {"name": "look", **given}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    request, _ = read_chat({"messages": [message]}, DEFAULTS)
    assert request.messages[0]["tool_calls"][0]["function"]["arguments"] == found


def test_tools_that_are_left_out_have_one_line(caplog):
    tools = [{"type": f"web_search_{i % 50}"} for i in range(1000)]
    with caplog.at_level(logging.INFO, "mlx_redrafter"):
        assert read_tools(Fields({"tools": tools}), ("function",), ("web_search",)) == []
    (line,) = caplog.messages
    assert line.startswith("left out 1000 tools of the types 'web_search_0, web_search_1, ")
    assert len(line) < 300


def test_bad_prompts_and_bodies():
    for prompt in (None, [True], ["A", 5], [[]], ["A"] * 17):
        with pytest.raises(Refusal, match="prompt must be"):
            read_completion({"prompt": prompt}, DEFAULTS)
    for body in (b"{", DEEP, b'{"a": NaN}', b"\xff"):
        with pytest.raises(Refusal, match="the body must be JSON"):
            parse_json(body)
    with pytest.raises(Refusal, match="has 5000 digits") as caught:
        parse_json(b'{"seed": ' + b"1" * 5000 + b"}")
    assert "sys." not in str(caught.value)


CHATS = "/v1/chat/completions"
# Status, code, path, body and further arguments of `Served.send`.
BAD_REQUESTS: dict[str, tuple[int, str | None, str, Any, dict[str, Any]]] = {
    "no JSON": (400, None, PATH, b"{", {}),
    "no object": (400, None, PATH, [1], {}),
    "wrong key": (401, "invalid_api_key", PATH, TEXT, {"key": "no"}),
    "no key": (401, "invalid_api_key", "/v1/models", None, {"key": None}),
    "unknown model": (404, "model_not_found", PATH, {**TEXT, "model": "x"}, {}),
    "unknown path": (404, None, "/v1/embeddings", TEXT, {}),
    "wrong method": (405, None, PATH, None, {}),
    "form": (415, None, PATH, TEXT, {"Content-Type": "text/plain"}),
    "large body": (413, None, PATH, {"prompt": "A" * 200_000}, {}),
    "long prompt": (400, "context_length_exceeded", PATH, {"prompt": "A" * 512}, {}),
    "no such token": (400, None, PATH, {"prompt": [64]}, {}),
    "no such bias": (400, None, PATH, {**TEXT, "logit_bias": {"64": 1}}, {}),
    "surrogate": (400, None, PATH, b'{"prompt": "\\ud800"}', {}),
    "no calls": (400, None, CHATS, {**CHAT, "tools": [LOOK]}, {}),
}


@pytest.mark.parametrize(
    ("path", "headers", "keys"),
    [
        ("/v1/nothing", {}, ["error"]),
        ("/v1/messages/batches", {}, ["type", "error"]),
        ("/v1/models/x", {"anthropic-version": "2023-06-01"}, ["type", "error"]),
        ("/api/embed", {}, ["error"]),
        ("/api/chat", {}, ["error"]),
    ],
)
def test_errors_have_the_shape_of_the_paths_protocol(strict, path, headers, keys):
    """Wrong paths, methods and origins are found before any protocol reads the request."""
    for more in {}, {"Origin": "http://foreign.example"}:
        status, reply = strict.send(path, **headers, **more)
        assert status == (403 if more else 405 if path == "/api/chat" else 404)
        assert list(reply) == keys
        assert isinstance(reply["error"], str if path.startswith("/api/") else dict)


@pytest.mark.parametrize(
    ("path", "name", "length"),
    [
        (CHATS, "messages", 606),
        (PATH, "prompt", 600),
        ("/v1/responses", "input", 606),
        ("/api/generate", "prompt", 606),
    ],
)
def test_a_long_prompt_has_its_own_name_and_the_numbers(strict, path, name, length):
    text = "A" * 600
    body = {name: [{"role": "user", "content": text}] if name == "messages" else text}
    status, reply = strict.send(path, body)
    message = reply["error"] if path.startswith("/api") else reply["error"]["message"]
    assert status == 400
    assert f"is 512 tokens, prompt included, but {name} has {length} and 30 more" in message


@pytest.fixture(scope="module")
def strict() -> Any:
    limits = Limits(max_running=1, max_waiting=1, max_body_bytes=100_000)
    with serving(make_engine(), limits, is_strict=True) as one:
        yield one


@pytest.fixture(scope="module")
def hasty() -> Any:
    """A server that waits for no slow client: only for tests of just that, on busy machines."""
    with serving(make_engine(), Limits(client_timeout=0.5)) as one:
        yield one


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_requests(strict, name):
    status, code, path, body, how = BAD_REQUESTS[name]
    found, reply = strict.send(path, body, **how)
    assert (found, reply["error"]["code"]) == (status, code)
    assert reply["error"]["message"]


def test_the_queue_begins_behind_the_texts_that_may_run():
    """Even before the first of them does."""
    one = worker.Worker(Limits(max_running=2, max_waiting=1))
    for _ in range(3):
        one.submit(MagicMock(is_cancelled=False))
    with pytest.raises(Refusal, match="queue is full"):
        one.submit(MagicMock(is_cancelled=False))


def _reply(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    response, content = answer_on(connection)
    return response.status, json.loads(content)["error"]


HEAD = f"POST {PATH} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}"


def test_a_large_body_is_refused_before_it_is_sent(strict):
    lines = "Content-Length: 30000000", "Expect: 100-continue", "", ""
    with sent(strict.port, *HEAD, *lines) as connection:
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_a_large_header(strict):
    with sent(strict.port, "GET / HTTP/1.1", f"X-Bomb: {'a' * 20_000}") as connection:
        status, error = _reply(connection)
    assert (status, error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("head", [[], ["GET / HTTP/1.1", ""]], ids=["silent", "half a header"])
def test_slow_headers(hasty, head):
    with sent(hasty.port, *head) as connection, suppress(ConnectionError):
        assert connection.recv(1) == b""


def test_a_slow_body(hasty):
    lines = "Content-Type: application/json", "Content-Length: 100", "", "{"
    with sent(hasty.port, *HEAD, *lines) as connection:
        status, error = _reply(connection)
    assert status == 408
    assert "too long" in error["message"]


def test_a_full_queue_and_lost_clients(strict, monkeypatch):
    strict.slow_down(monkeypatch, 0.03)
    cancelled = strict.worker.counters.texts["cancelled"]
    totals, before = strict.worker.counters.totals, strict.worker.counters.totals.copy()
    with closing(strict.begin()):
        # A text that has not begun is not counted as cancelled.
        wait_until(lambda: totals["prompt_tokens_total"] > before["prompt_tokens_total"])
        with closing(strict.begin(stream=False)):
            strict.wait_for(waiting_requests=1)
            status, reply = strict.send(PATH, TEXT)
            assert (status, reply["error"]["code"]) == (429, "queue_full")
    strict.wait_until_idle()
    assert strict.worker.counters.texts["cancelled"] > cancelled
    assert strict.send(PATH, TEXT)[0] == 200


def test_a_client_that_vanishes_while_its_prompt_is_read(strict, monkeypatch):
    """The prompt has 30 chunks of 16 tokens; most of them are never read."""
    chunks: list[SequenceDecoder] = []

    def wait(sequence: SequenceDecoder, *_: Any, **options: Any) -> None:
        chunks.append(sequence)
        time.sleep(0.1)

    at_call(monkeypatch, prefill, "process_chunk", wait)
    with closing(strict.begin(prompt="VWXYZ" * 96, stream=False)):
        wait_until(lambda: len(chunks) > 0)
    strict.wait_until_idle()
    assert len(chunks) < 30 / 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_worker_that_has_ended(monkeypatch):
    """Its thread ends a moment after its replies."""

    @contextmanager
    def wire(*_: object) -> Iterator[None]:
        try:
            yield
        finally:
            time.sleep(0.5)

    monkeypatch.setattr(worker, "wire_memory", wire)
    with serving(make_engine()) as served:
        assert served.send(PATH, TEXT)[0] == 200

        monkeypatch.setattr(Scheduler, "advance", MagicMock(side_effect=Panic))
        for _ in range(2):
            status, reply = served.send(PATH, TEXT)
            assert (status, reply["error"]["code"]) == (503, "shutting_down")
        assert served.send("/health")[0] == 503


class Panic(BaseException):
    """Like a failed assertion in a library that is written in Rust."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_a_request_that_fails_in_the_worker(served, monkeypatch, caplog, kind):
    expected = served.text(**TEXT, max_tokens=200)

    def fail(prompt: list[int], **options: Any) -> None:
        if options["seed"] == 13:
            raise kind("no memory at /secret")

    at_call(monkeypatch, served.engine, "stream", fail)
    with closing(served.begin(max_tokens=200)) as other:
        status, reply = served.send(PATH, {**TEXT, "seed": 13})
        assert (status, reply["error"]["type"]) == (500, "server_error")
        assert "secret" not in reply["error"]["message"]
        found = events(other.getresponse().read().decode())
    texts = [one["choices"][0]["text"] for one in found]
    assert "".join(texts) == expected
    assert "no memory" in caplog.text


def test_a_panic_in_a_step_ends_its_texts_and_not_the_worker(served, monkeypatch, caplog):
    panics = [Panic("a bug at /secret")]

    def fail(scheduler: Scheduler, active: Any) -> None:
        if active and panics:
            raise panics.pop()

    at_call(monkeypatch, Scheduler, "_step_begun", fail)
    status, reply = served.send(PATH, TEXT)
    assert (status, reply["error"]["code"]) == (500, "failed")
    assert "secret" not in reply["error"]["message"]
    assert "a bug at" in caplog.text
    assert served.send(PATH, TEXT)[0] == 200
