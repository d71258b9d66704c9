"""Who may use the server: hosts, origins and keys, names of models and paths, and rude clients."""

import asyncio
import http.client
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import h11
import pytest
from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from mlx_redrafter.engine.prompt_encoding import LongPromptError, encode_prompt
from mlx_redrafter.server import listening
from mlx_redrafter.server.callers import Callers
from mlx_redrafter.server.limits import Limits
from mlx_redrafter.server.listening import Server
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.worker import Worker
from tests.server.serving import KEY, PATH, answer_on, hold, make_engine, sent, serving

TEXT = {"prompt": "A", "max_tokens": 2}


@pytest.fixture(scope="module")
def quick() -> Any:
    """A strict server that does not wait long for bodies that it does not need."""
    with pytest.MonkeyPatch.context() as patch, serving(make_engine(), is_strict=True) as one:
        patch.setattr("mlx_redrafter.server.callers.DRAIN_SECONDS", 0.2)
        yield one


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("LocalHost:1234", None, 200),
        ("[::1]:8080", None, 200),
        ("named.example:80", "https://named.example:80", 200),
        ("127.0.0.1:8080", "http://127.0.0.1:8080", 200),
        ("localhost", "http://page.example", 200),
        ("evil.example", "http://evil.example", 403),
        ("localhost.evil.example", None, 403),
        ("127.0.0.1@evil.example", None, 403),
        ("localhost", "http://evil.example", 403),
        ("localhost:80", "http://localhost:81", 403),
        ("localhost", "null", 403),
    ],
)
def test_hosts_and_origins(quick, host, origin, status):
    headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
    for path, body in (("/", None), ("/v1/models", None), (PATH, TEXT)):
        found, reply = quick.send(path, body, **headers)
        assert found == status
        if status == 403:
            assert reply["error"]["type"] == "permission_error"
            assert reply["error"]["code"] in ("host_not_allowed", "origin_not_allowed")


def test_a_server_for_all_addresses():
    callers = Callers(host="0.0.0.0")
    callers.check_host(Headers({"host": "192.168.1.5:8080"}))
    with pytest.raises(Refusal):
        callers.check_host(Headers({"host": "evil.example"}))


def test_keys_of_both_protocols(quick):
    assert quick.send("/v1/models", key=None, **{"x-api-key": KEY})[0] == 200
    assert quick.send("/v1/models", key=None, **{"x-api-key": "other"})[0] == 401
    for scheme, status in (("bearer", 200), ("BEARER", 200), ("Basic", 401), ("", 401)):
        headers = {"Authorization": f"{scheme} {KEY}"}
        assert quick.send("/v1/models", key=None, **headers)[0] == status


def test_names_and_paths(served, caplog, quick):
    with caplog.at_level(logging.INFO, "mlx_redrafter"):
        for name in ("gpt-4o", "gpt-4o", "", "default_model", "tiny"):
            status, reply = served.send("/completions", {**TEXT, "model": name})
            assert (status, reply["model"]) == (200, "tiny")
    assert caplog.text.count("answers requests for the model") == 1
    assert served.send("/v1/models/tiny")[1]["id"] == "tiny"
    assert served.send("/models")[1] == served.send("/v1/models")[1]
    assert quick.send("/v1/models/org/other")[0] == 404
    assert quick.send(PATH, {**TEXT, "model": "default_model"})[0] == 200
    status, reply = served.send("/v1/nothing", TEXT)
    assert status == 404
    assert "/v1/chat/completions" in reply["error"]["message"]
    assert "docs/" not in reply["error"]["message"]
    # No redirect to the host that a client names.
    for path in f"{PATH}/", f"http://127.0.0.1:{served.port}{PATH}":
        assert served.send(path, TEXT)[0] == 200


@pytest.mark.parametrize(
    ("head", "status"), [(f"POST {PATH}", 401), ("POST /nothing", 404), ("GET /health", 200)]
)
def test_a_body_that_never_comes(quick, head, status):
    """The connection ends with the early answer, and one more byte does not keep it open."""
    lines = f"{head} HTTP/1.1", "Host: localhost", "Content-Length: 1000", "", ""
    with sent(quick.port, *lines) as connection:
        response, _ = answer_on(connection)
        assert response.status == status
        assert response.getheader("Connection") == "close"
        with suppress(ConnectionError):
            connection.sendall(b"x")
            assert connection.recv(1) == b""


def test_a_body_that_comes_late_keeps_the_connection(quick):
    with closing(http.client.HTTPConnection("127.0.0.1", quick.port, timeout=60)) as connection:
        for _ in range(2):
            connection.request("POST", PATH, b"x" * 300_000, {"Content-Type": "text/plain"})
            response = connection.getresponse()
            assert (response.status, response.getheader("Connection")) == (401, None)
            response.read()


def test_connections_beyond_the_maximum(monkeypatch):
    """The oldest silent ones make room."""
    monkeypatch.setattr(listening, "MAX_CONNECTIONS", 10)
    with serving(make_engine()) as served:
        silent = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(30)]
        assert served.send("/health", key=None)[0] == 200
        with suppress(ConnectionError):
            assert silent[0].recv(1) == b""
        for one in silent:
            one.close()


def test_a_client_that_writes_and_does_not_read(monkeypatch):
    """Data that it sends is no sign that it reads."""
    monkeypatch.setattr(H11Protocol, "data_received", lambda *_: None)

    async def talk() -> None:
        server = Server(lambda *_: None, 30, 1, Worker(Limits()))  # type: ignore[arg-type, return-value]
        server.config.load()
        make: Any = server.config.http_protocol_class
        one = make(server.config, ServerState(), {})
        one.connection_made(MagicMock())
        one.conn = SimpleNamespace(their_state=h11.DONE)
        one.data_received(b"")
        assert one._deadline is None
        one.pause_writing()
        one.data_received(b"G")
        assert one._deadline is not None
        one.resume_writing()
        assert one._deadline is None

    asyncio.run(talk())


def test_errors_of_the_loop_are_logged_seldom(caplog):
    server = Server(lambda *_: None, 1, 1, Worker(Limits()))  # type: ignore[arg-type, return-value]
    loop = asyncio.new_event_loop()
    for _ in range(1000):
        server._report(loop, {"message": "accept failed", "exception": OSError("too many files")})
    loop.close()
    assert caplog.text.count("too many files") == 1


def test_long_prompts_are_not_encoded_whole(quick):
    tokenizer = MagicMock(bos_token=None)
    tokenizer.encode.side_effect = lambda text, **_: [0] * len(text)
    with pytest.raises(LongPromptError, match="has 400000 tokens"):
        encode_prompt(tokenizer, "AB" * 200_000, limit=512)
    assert max(len(call.args[0]) for call in tokenizer.encode.call_args_list) < 100_000
    status, reply = quick.send(PATH, {"prompt": "AB" * 200_000})
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    message = reply["error"]["message"].lower()
    assert "this model's maximum context length is 512 tokens" in message
    assert "prompt has 400000 and 30 more are asked for" in message


def test_no_prompt_waits_for_a_long_one(quick, monkeypatch):
    """The encoding of a large body lasts until the small one has its answer."""
    began, goes_on = hold(monkeypatch, lambda request: len(request.prompts[0]) > 1000)
    with ThreadPoolExecutor(1) as clients:
        large = clients.submit(quick.send, PATH, {"prompt": "A" * 300_000})
        assert began.wait(60)
        assert quick.send(PATH, TEXT)[0] == 200
        goes_on.set()
        assert large.result()[0] == 400
