"""What is wrong gets OpenAI's error object and the right status, and disturbs nobody."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from mlx_redrafter.decoding import prefill
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.server.fields import parse_json
from mlx_redrafter.server.limits import Limits
from mlx_redrafter.server.protocols.openai_chat import read as read_chat
from mlx_redrafter.server.protocols.openai_completions import read as read_completion
from mlx_redrafter.server.refusals import Refusal
from tests.server.serving import DEFAULTS, KEY, Served, make_engine, serving

CHAT = {"messages": [{"role": "user", "content": "A"}]}
TEXT = {"prompt": "A"}
DEEP = b'{"prompt": ' + b"[" * 100_000

BAD_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": "A"}),
    ("messages[0]", {"messages": ["A"]}),
    ("messages[0].role", {"messages": [{"role": "boss", "content": "A"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
    (
        "messages[0].content",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
    ),
    (
        "messages",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
    ),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": 10**30}),
    ("top_p", {"top_p": 2}),
    ("top_k", {"top_k": 1.5}),
    ("min_p", {"min_p": True}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 2**32}),
    ("max_tokens", {"max_tokens": 0}),
    ("n", {"n": 17}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": ["A"] * 17}),
    ("stream", {"stream": 1}),
    ("stream_options", {"stream_options": {}}),
    ("stream_options.colour", {"stream": True, "stream_options": {"colour": True}}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("logit_bias", {"logit_bias": {"A": 1}}),
    ("logit_bias.5", {"logit_bias": {"5": "much"}}),
    ("logprobs", {"logprobs": 2}),
    ("top_logprobs", {"top_logprobs": 2}),
    (
        "tool_choice",
        {
            "tools": [{"type": "function", "function": {"name": "look"}}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": []},
            },
        },
    ),
    ("tools[0].type", {"tools": [{"function": {"name": "look"}}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("response_format.type", {"response_format": {"type": "yaml"}}),
    ("response_format.type", {"response_format": {}}),
    ("response_format.json_schema.schema", {"response_format": {"type": "json_schema"}}),
    ("response_format.colour", {"response_format": {"type": "text", "colour": "red"}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
    ("colour", {"colour": "red"}),
]


@pytest.mark.parametrize(
    ("param", "fields"), BAD_FIELDS, ids=[str(i) for i in range(len(BAD_FIELDS))]
)
def test_bad_fields_of_a_chat(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as caught:
        read_chat({**CHAT, **fields}, DEFAULTS)
    error = caught.value.to_json()["error"]
    assert (error["param"], caught.value.status) == (param, 400)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param.partition(".")[0].partition("[")[0])


def test_messages_become_those_of_templates() -> None:
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "A"}]},
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "No."}],
            "reasoning": "Hm.",
        },
    ]
    request, _ = read_chat({"messages": messages, "reasoning_effort": "none"}, DEFAULTS)
    assert [one["role"] for one in request.messages] == ["system", "user", "assistant"]
    assert [one["content"] for one in request.messages] == ["Be short.", "A", "No."]
    assert request.messages[2]["reasoning_content"] == "Hm."
    assert (request.effort, request.template_options) == ("none", {"enable_thinking": False})


@pytest.mark.parametrize("prompt", [None, 5, [True], ["A", 5], [[]], [1.5], ["A"] * 17], ids=repr)
def test_bad_prompts(prompt: object) -> None:
    with pytest.raises(Refusal, match="prompt must be"):
        read_completion({"prompt": prompt}, DEFAULTS)


@pytest.mark.parametrize("body", [b"{", DEEP, b'{"temperature": NaN}', b"1e999", b"\xff"])
def test_bad_json(body: bytes) -> None:
    with pytest.raises(Refusal, match="the body must be JSON"):
        parse_json(body)


Case = tuple[int, str | None, Callable[[Served], tuple[int, Any]]]
PATH = "/v1/completions"
BAD_REQUESTS: dict[str, Case] = {
    "no JSON": (400, None, lambda served: served.send(PATH, b"{")),
    "no object": (400, None, lambda served: served.send(PATH, [1])),
    "wrong key": (401, "invalid_api_key", lambda served: served.send(PATH, TEXT, key="no")),
    "no key": (401, "invalid_api_key", lambda served: served.send("/v1/models", key=None)),
    "unknown model": (
        404,
        "model_not_found",
        lambda served: served.send(PATH, {**TEXT, "model": "x"}),
    ),
    "unknown path": (404, None, lambda served: served.send("/v1/embeddings", TEXT)),
    "wrong method": (405, None, lambda served: served.send(PATH)),
    "form": (
        415,
        None,
        lambda served: served.send(PATH, TEXT, **{"Content-Type": "text/plain"}),
    ),
    "large body": (413, None, lambda served: served.send(PATH, {"prompt": "A" * 200_000})),
    "long prompt": (
        400,
        "context_length_exceeded",
        lambda served: served.send(PATH, {"prompt": "A" * 512}),
    ),
    "no such token": (400, None, lambda served: served.send(PATH, {"prompt": [64]})),
    "no such bias": (
        400,
        None,
        lambda served: served.send(PATH, {**TEXT, "logit_bias": {"64": 1}}),
    ),
    "surrogate": (400, None, lambda served: served.send(PATH, b'{"prompt": "\\ud800"}')),
    "no calls": (
        400,
        None,
        lambda served: served.send(
            "/v1/chat/completions",
            {**CHAT, "tools": [{"type": "function", "function": {"name": "look"}}]},
        ),
    ),
}


def test_an_integer_with_many_digits() -> None:
    with pytest.raises(Refusal, match="has 5000 digits") as caught:
        parse_json(b'{"seed": ' + b"1" * 5000 + b"}")
    assert "sys." not in str(caught.value)


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
def test_errors_have_the_shape_of_the_paths_protocol(
    strict: Served, path: str, headers: dict[str, str], keys: list[str]
) -> None:
    """Wrong paths, methods and origins are found before any protocol reads the request."""
    for more in {}, {"Origin": "http://foreign.example"}:
        status, reply = strict.send(path, **headers, **more)
        assert status == (403 if more else 405 if path == "/api/chat" else 404)
        assert list(reply) == keys
        assert isinstance(reply["error"], str if path.startswith("/api/") else dict)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A" * 600}]}),
        ("/v1/completions", {"prompt": "A" * 600}),
        ("/v1/responses", {"input": "A" * 600}),
        ("/api/generate", {"prompt": "A" * 600}),
        ("/api/generate", {"prompt": "A" * 600, "raw": True}),
    ],
)
def test_a_long_prompt_has_its_own_name_and_the_numbers(
    strict: Served, path: str, body: dict[str, Any]
) -> None:
    status, reply = strict.send(path, body)
    text = reply["error"] if path.startswith("/api") else reply["error"]["message"]
    length = {
        "messages": 606,
        "input": 606,
        "prompt": 600 if "raw" in body or "v1" in path else 606,
    }
    (name,) = body.keys() & length
    assert status == 400
    assert f"is 512 tokens, prompt included, but {name} has {length[name]} and 30 more" in text


def test_a_large_body_is_refused_before_it_is_sent(strict: Served) -> None:
    with socket.create_connection(("127.0.0.1", strict.port), timeout=60) as connection:
        head = f"POST {PATH} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}"
        lines = *head, "Content-Length: 30000000", "Expect: 100-continue", "", ""
        connection.sendall("\r\n".join(lines).encode())
        assert connection.recv(12) == b"HTTP/1.1 413"


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
def test_bad_requests(strict: Served, name: str) -> None:
    status, code, send = BAD_REQUESTS[name]
    found, reply = send(strict)
    assert (found, reply["error"]["code"]) == (status, code)
    assert reply["error"]["message"]


def test_a_large_header(strict: Served) -> None:
    with socket.create_connection(("127.0.0.1", strict.port), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX-Bomb: " + b"a" * 20_000)
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 400
        error = json.loads(response.read())["error"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\n"], ids=["silent", "half a header"])
def test_slow_headers(hasty: Served, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=60) as connection:
        connection.sendall(head)
        with pytest.raises(ConnectionError):
            raise ConnectionError if connection.recv(1) == b"" else AssertionError


def test_a_slow_body(hasty: Served) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", hasty.port, timeout=60)) as connection:
        connection.putrequest("POST", PATH)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Authorization", f"Bearer {KEY}")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        response = connection.getresponse()
        assert response.status == 408
        assert "too long" in json.loads(response.read())["error"]["message"]


def begin_text(served: Served, **fields: Any) -> Any:
    """A long text that is asked for and not read."""
    body = {**TEXT, "max_tokens": 480, "stream": True, **fields}
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", PATH, json.dumps(body), headers)
    return connection


def _wait_for(served: Served, **gauges: int) -> None:
    end = time.monotonic() + 60
    while not gauges.items() <= served.worker.gauges().items():
        assert time.monotonic() < end, (gauges, served.worker.gauges())
        time.sleep(0.002)


def test_a_full_queue_and_clients_that_vanish(
    strict: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict.slow_down(monkeypatch, 0.03)
    cancelled = strict.worker.counters.texts["cancelled"]
    totals, before = strict.worker.counters.totals, strict.worker.counters.totals.copy()
    with closing(begin_text(strict)):
        while totals["prompt_tokens_total"] == before["prompt_tokens_total"]:
            time.sleep(0.002)  # a text that has not begun is not counted as cancelled
        with closing(begin_text(strict, stream=False)):
            _wait_for(strict, waiting_requests=1)
            status, reply = strict.send(PATH, TEXT)
            assert (status, reply["error"]["code"]) == (429, "queue_full")
    strict.wait_until_idle()
    assert strict.worker.counters.texts["cancelled"] > cancelled
    assert strict.send(PATH, TEXT)[0] == 200


def test_a_client_that_vanishes_while_its_prompt_is_read(
    strict: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt has 30 chunks of 16 tokens; most of them are never read."""
    chunks = []
    process_chunk = prefill.process_chunk

    def slowly(sequence: SequenceDecoder, most: int | None = None) -> None:
        process_chunk(sequence, most)
        chunks.append(most)
        time.sleep(0.4)

    monkeypatch.setattr(prefill, "process_chunk", slowly)
    with closing(begin_text(strict, prompt="VWXYZ" * 96, stream=False)):
        while not chunks:
            time.sleep(0.01)
    strict.wait_until_idle()
    assert len(chunks) < 30 / 2


def test_a_request_that_fails_in_the_worker(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = served.send(PATH, {**TEXT, "max_tokens": 200})
    stream = served.engine.stream

    def fail(prompt: list[int], **options: Any) -> Any:
        if options["seed"] == 13:
            raise RuntimeError("no memory at /secret")
        return stream(prompt, **options)

    monkeypatch.setattr(served.engine, "stream", fail)
    with closing(begin_text(served, max_tokens=200)) as other:
        status, reply = served.send(PATH, {**TEXT, "seed": 13})
        assert (status, reply["error"]["type"]) == (500, "server_error")
        assert "secret" not in reply["error"]["message"]
        events = other.getresponse().read().decode().split("\n\n")
    texts = [json.loads(one[6:])["choices"][0]["text"] for one in events[:-2]]
    assert "".join(texts) == expected[1]["choices"][0]["text"]
    assert "no memory" in caplog.text
