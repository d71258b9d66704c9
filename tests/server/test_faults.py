"""Clients that are killed or do not read, a full disk, and an end in the middle of work."""

from __future__ import annotations

import http.client
import json
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_redrafter.server.limits import Limits
from tests.server.processes import process
from tests.server.serving import KEY, Served, make_engine, serving

PATH = "/v1/completions"
OTHER = {"prompt": "THE OTHER CLIENT", "max_tokens": 30, "seed": 3, "temperature": 1.0}
LONG = {"prompt": "ABC" * 100, "max_tokens": 200, "stream": True}
# A client that sends so many bytes of its request, tells so, and waits, or reads its answer first.
CLIENT = """
import socket, sys, time
port, sent, read = map(int, sys.argv[1:])
request = sys.stdin.buffer.read()
connection = socket.socket()
connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
connection.connect(("127.0.0.1", port))
connection.sendall(request[:sent])
if read:
    connection.recv(read)
print("ready", flush=True)
time.sleep(600)
"""


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
    """A process that has got as far as that, killed at the end of the block."""
    command = [sys.executable, "-c", CLIENT, str(port), str(sent), str(read)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        try:
            assert client.stdin is not None
            assert client.stdout is not None
            client.stdin.write(_request(body))
            client.stdin.close()
            assert client.stdout.readline() == b"ready\n"
            yield
        finally:
            client.kill()


@pytest.fixture(scope="module")
def narrow() -> Iterator[Served]:
    """Two texts at once, so that a third waits."""
    with serving(make_engine(), Limits(max_running=2)) as one:
        yield one


WHOLE = 1 << 20
PHASES = {
    "half a header": (LONG, 40, 0),
    "half a body": (LONG, len(_request(LONG)) - 30, 0),
    "in its prompt": (LONG, WHOLE, 0),
    "in its stream": (LONG, WHOLE, 300),
    "waiting for a whole text": ({**LONG, "stream": False}, WHOLE, 0),
    "with several texts": ({**LONG, "n": 4, "logprobs": 5}, WHOLE, 300),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_is_killed(narrow: Served, phase: str) -> None:
    """Others get their own texts meanwhile, and nothing of the dead one's stays."""
    expected = narrow.send(PATH, OTHER)[1]["choices"][0]["text"]
    with _client(narrow.port, *PHASES[phase]):
        during = narrow.send(PATH, OTHER)[1]["choices"][0]["text"]
    narrow.wait_until_idle()
    assert [during, narrow.send(PATH, OTHER)[1]["choices"][0]["text"]] == [expected] * 2
    assert narrow.worker.counters.texts["failed"] == 0


def test_clients_are_killed_in_the_queue(narrow: Served) -> None:
    with (
        _client(narrow.port, LONG, WHOLE, 300),
        _client(narrow.port, LONG, WHOLE, 300),
        _client(narrow.port, LONG, WHOLE, 0),
    ):
        pass
    assert narrow.send(PATH, OTHER)[0] == 200
    narrow.wait_until_idle()


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


def _ask(port: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_a_full_disk(tmp_path: Path) -> None:
    """No file can have a byte; texts do not need any."""

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    with process(tmp_path, "--drafter", "lookup", preexec_fn=fill) as (server, port):
        status, reply = _ask(port, {"prompt": "Once upon a time", "max_tokens": 20})
        assert (status, reply["usage"]["completion_tokens"]) == (200, 20)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert server.stderr is not None
        assert "Traceback" not in server.stderr.read()


def test_sigterm_under_load(tmp_path: Path) -> None:
    """Texts that were begun are written to their end; nobody is left without an answer."""
    with process(tmp_path, "--drafter", "none", "--max-running", "2") as (server, port):
        body = {"prompt": "Once upon a time", "max_tokens": 60}
        expected = _ask(port, body)[1]["choices"][0]["text"]
        answers: list[tuple[int, dict[str, Any]]] = []

        def ask() -> None:
            answers.append(_ask(port, body))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        # All have come, and most have not ended.
        kinds = "running_requests", "waiting_requests"
        while len(answers) + sum(_gauge(port, kind) for kind in kinds) < 6:
            time.sleep(0.005)
        server.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert server.wait(60) == 0
    assert [status for status, _ in answers] == [200] * 6
    assert {reply["choices"][0]["text"] for _, reply in answers} == {expected}


def _gauge(port: int, name: str) -> float:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    found = re.search(rf"^redrafter_{name} (\d+)", text, re.MULTILINE)
    assert found is not None
    return float(found[1])
