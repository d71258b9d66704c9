"""Clients that end at once or do not read, and a full disk."""

import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.server.limits import Limits
from tests.server.serving import KEY, make_engine, serving

PATH = "/v1/completions"
OTHER = {"prompt": "THE OTHER CLIENT", "max_tokens": 30, "seed": 3, "temperature": 1.0}
LONG = {"prompt": "ABC" * 100, "max_tokens": 200, "stream": True}


def _request(body: dict[str, Any]) -> bytes:
    path = PATH if "prompt" in body else "/v1/chat/completions"
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@contextmanager
def _client(port: int, body: dict[str, Any], sent: int, read: int) -> Iterator[None]:
    """A client that has sent and read so many bytes, and is gone at the end of the block.

    The system closes the socket of a process that is killed in the same way.
    """
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(_request(body)[:sent])
        if read:
            connection.recv(read)
        yield


WHOLE = 1 << 20
PHASES = {
    "half a header": [(LONG, 40, 0)],
    "half a body": [(LONG, len(_request(LONG)) - 30, 0)],
    "in its prompt": [(LONG, WHOLE, 0)],
    "waiting for a whole text": [({**LONG, "stream": False}, WHOLE, 0)],
    "with several texts": [({**LONG, "n": 4, "logprobs": 5}, WHOLE, 300)],
    "in streams and in the queue": [(LONG, WHOLE, 300), (LONG, WHOLE, 300), (LONG, WHOLE, 0)],
}


def test_clients_end_at_once() -> None:
    """Others get their own texts meanwhile, and nothing of the dead ones' stays."""
    with serving(make_engine(), Limits(max_running=2)) as narrow:  # a third text waits
        expected = narrow.send(PATH, OTHER)[1]["choices"][0]["text"]
        for phase, clients in PHASES.items():
            with ExitStack() as stack:
                for client in clients:
                    stack.enter_context(_client(narrow.port, *client))
                if len(clients) == 1:
                    during = narrow.send(PATH, OTHER)[1]["choices"][0]["text"]
                    assert during == expected, phase
            narrow.wait_until_idle()
            assert narrow.send(PATH, OTHER)[1]["choices"][0]["text"] == expected, phase
            assert narrow.worker.counters.texts["failed"] == 0, phase


def test_a_client_that_does_not_read_is_cut_off() -> None:
    """What it is sent does not fit into the buffers between."""
    body = {
        "messages": [{"role": "user", "content": "AB"}],
        **{"max_tokens": 4000, "n": 2, "stream": True, "logprobs": True, "top_logprobs": 20},
    }
    limits = Limits(client_timeout=0.5, max_context=4096)
    with serving(make_engine(context=4096), limits) as served:
        begin = time.monotonic()
        with _client(served.port, body, WHOLE, 100):
            while not served.worker.counters.texts["cancelled"]:
                assert served.worker.counters.texts["length"] < 2, "it was never cut off"
                assert time.monotonic() < begin + 120
                time.sleep(0.05)
            assert served.send(PATH, OTHER)[0] == 200


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can have a byte; texts do not need any."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain = make_engine()
    engine = Engine(plain.target.model, plain.tokenizer, "lookup")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with serving(engine, folder=tmp_path) as served:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            for _ in range(2):
                status, reply = served.send(PATH, {**LONG, "max_tokens": 20, "stream": False})
                assert (status, reply["usage"]["completion_tokens"]) == (200, 20)
            served.worker.end()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not any(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
