"""Ends of the server, by a signal, and of clients: all others get an answer, in bounded time."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import MagicMock
from urllib.request import urlopen

import pytest

from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.server.limits import Limits
from mlx_redrafter.server.parts import Part
from mlx_redrafter.server.protocols.anthropic import MessageWriter
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.replies import Reply
from tests.helpers.hostile import no_room
from tests.helpers.models import chat_tokenizer, tiny_llama
from tests.server.serving import KEY, PATH, begin, events, make_engine, serving, wait_until

LONG = {"prompt": "Once upon a time", "max_tokens": 100_000, "temperature": 1, "seed": 1}


@contextmanager
def process(*options: str, code: str = "") -> Iterator[subprocess.Popen[str]]:
    """The server's command with the bundled pair, after some lines of code."""
    program = f"import sys\n{code}\nfrom mlx_redrafter.cli.main import run\nrun()"
    command = [sys.executable, "-c", program, "serve", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            yield server
        finally:
            server.kill()


def port_of(server: Any) -> int:
    ports = (re.search(r"http://127.0.0.1:(\d+)", line) for line in server.stderr)
    return next(int(found[1]) for found in ports if found)


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(6) as pool:
        yield pool


def _ask(port: int, **fields: Any) -> tuple[int, str]:
    """Ask for a text; return the status and the answer."""
    with closing(begin(port, LONG | fields)) as connection:
        response = connection.getresponse()
        return response.status, response.read().decode()


def test_texts_that_outlast_the_grace(clients, monkeypatch):
    """Streams get an event, whole texts and those that wait a status, and the thread ends."""
    with serving(make_engine(context=4096), Limits(max_running=2), grace=0.3) as served:
        served.slow_down(monkeypatch, 0.01)
        long = partial(_ask, served.port, prompt="A", max_tokens=4000)
        asked = [clients.submit(long, stream=stream) for stream in (True, False) * 2]
        served.wait_for(waiting_requests=2)
        time.sleep(0.1)
    answers = [one.result() for one in asked]
    assert sorted(status for status, _ in answers) == [200, 200, 503, 503]
    for _, text in answers:  # the last event, or the whole
        assert events(text)[-1]["error"]["code"] == "shutting_down"


def test_no_part_follows_the_end():
    """A step may outlast the error that the end of the server sends."""

    async def read() -> list[str]:
        reply = Reply(MagicMock(), MagicMock(), [[0]], MessageWriter("tiny"), 0.0)
        reply.job.receive(Refusal("the server is shutting down"))
        reply.job.receive(Part(0, False, 1, 0, 0, 0, content="A"))
        return [text async for text in reply.events()]

    (text,) = asyncio.run(asyncio.wait_for(read(), 5))
    assert [one["type"] for one in events(text)] == ["error"]


def _num_running(port: int) -> int:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        gauges = re.findall(
            r"^redrafter_(?:running|waiting)_requests (\d+)", reply.read().decode(), re.M
        )
    return sum(map(int, gauges))


def test_sigterm_under_load(clients):
    """Texts that were begun are written to their end; nobody is left without an answer."""
    with process("--drafter", "none", "--max-running", "2") as server:
        port = port_of(server)
        short = partial(_ask, port, temperature=0, max_tokens=60)
        asked = [clients.submit(short, stream=number == 5) for number in range(6)]
        # All have come, and most have not ended.
        wait_until(lambda: sum(one.done() for one in asked) + _num_running(port) >= 6)
        server.send_signal(signal.SIGTERM)
        *wholes, (_, stream) = answers = [one.result() for one in asked]
        assert server.wait(60) == 0
        with pytest.raises(ConnectionError):
            socket.create_connection(("127.0.0.1", port))
    assert [status for status, _ in answers] == [200] * 6
    (text,) = {json.loads(whole)["choices"][0]["text"] for _, whole in wholes}
    assert "".join(one["choices"][0]["text"] for one in events(stream)) == text
    assert stream.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("signals", "code"),
    [([signal.SIGINT], 130), ([signal.SIGHUP, signal.SIGTERM], 0)],
    ids=["Ctrl-C", "SIGHUP and SIGTERM"],
)
def test_a_second_signal_ends_texts_at_once(clients, signals, code):
    with process("--drafter", "none") as server:
        port = port_of(server)
        asked = [clients.submit(_ask, port, stream=stream) for stream in (True, True, False)]
        wait_until(lambda: _num_running(port) == 3)
        for one in signals:
            server.send_signal(one)
            time.sleep(0.2)
        assert server.wait(25) == code  # after one signal the texts would have 30 seconds
        assert set(_statuses(server, asked)) <= {200, 503}


def _statuses(server: Any, asked: list[Future[tuple[int, str]]]) -> list[int]:
    """Statuses of the answers, all of which tell of the end; the log has no error."""
    log = server.stderr.read()
    assert "Traceback" not in log
    assert "terminate" not in log
    assert all("shutting_down" in one.result()[1] for one in asked)
    return [one.result()[0] for one in asked]


# A chunk of a prompt that takes longer than anyone waits, as MLX may.
SLOW_CHUNK = """
import time
from mlx_redrafter.decoding import scheduler
scheduler.prefill_together = lambda *_: time.sleep(60)
"""


def test_a_second_signal_in_the_middle_of_a_prompt(clients):
    with process("--drafter", "none", code=SLOW_CHUNK) as server:
        port = port_of(server)
        long = partial(_ask, port, prompt="Once upon a time " * 100)
        asked = [clients.submit(long, stream=stream) for stream in (True, False)]
        wait_until(lambda: _num_running(port) == 2)
        server.send_signal(signal.SIGINT)
        with suppress(ConnectionError):  # until it has noticed the first one
            while True:
                socket.create_connection(("127.0.0.1", port), timeout=60).close()
                time.sleep(0.05)
        begun = time.monotonic()
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 130
        # 1.5 s, and some for a machine that is busy; the grace is 30 s
        assert time.monotonic() - begun < 25
        assert _statuses(server, asked) == [200, 503]


def test_a_signal_while_the_model_is_loaded():
    slow = "import mlx_redrafter.cli.serve as serve, time, sys\n"
    slow += "serve._load = lambda pair: print('loading', file=sys.stderr) or time.sleep(60)"
    with process(code=slow) as server:
        assert server.stderr.readline() == "loading\n"
        server.send_signal(signal.SIGTERM)
        assert server.wait(50) == 0
        assert server.stderr.read() == ""


# Clients that end at once or do not read, and a full disk

OTHER = {"prompt": "THE OTHER CLIENT", "max_tokens": 30, "seed": 3, "temperature": 1.0}
STREAM = {"prompt": "ABC" * 100, "max_tokens": 200, "stream": True}


def _bytes(body: dict[str, Any]) -> bytes:
    path = PATH if "prompt" in body else "/v1/chat/completions"
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@contextmanager
def _lost_client(port: int, body: dict[str, Any], sent: int | None, read: int) -> Iterator[None]:
    """A client that has sent so many bytes, or all, has read some, and is gone after the block.

    The system closes the socket of a process that is killed in the same way.
    """
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(_bytes(body)[:sent])
        if read:
            connection.recv(read)
        yield


PHASES = {
    "half a header": [(STREAM, 40, 0)],
    "half a body": [(STREAM, len(_bytes(STREAM)) - 30, 0)],
    "in its prompt": [(STREAM, None, 0)],
    "waiting for a whole text": [({**STREAM, "stream": False}, None, 0)],
    "with several texts": [({**STREAM, "n": 4, "logprobs": 5}, None, 300)],
    "in streams and in the queue": [(STREAM, None, 300), (STREAM, None, 300), (STREAM, None, 0)],
}


def test_clients_end_at_once():
    """Others get their own texts meanwhile, and nothing of the dead ones' stays."""
    with serving(make_engine(), Limits(max_running=2)) as narrow:  # a third text waits
        expected = narrow.text(**OTHER)
        for phase, clients in PHASES.items():
            with ExitStack() as stack:
                for client in clients:
                    stack.enter_context(_lost_client(narrow.port, *client))
                if len(clients) == 1:
                    assert narrow.text(**OTHER) == expected, phase
            narrow.wait_until_idle()
            assert narrow.text(**OTHER) == expected, phase
            assert narrow.worker.counters.texts["failed"] == 0, phase


def test_a_client_that_does_not_read_is_cut_off():
    """The reply does not fit into the buffers between."""
    body = {
        "messages": [{"role": "user", "content": "AB"}],
        **{"max_tokens": 4000, "n": 2, "stream": True, "logprobs": True, "top_logprobs": 20},
    }
    limits = Limits(client_timeout=0.5, max_context=4096)
    with serving(make_engine(context=4096), limits) as served:
        with _lost_client(served.port, body, None, 100):
            texts = served.worker.counters.texts
            wait_until(lambda: texts["cancelled"] or texts["length"] == 2)
            assert texts["cancelled"], "it was never cut off"
            assert served.text(**OTHER)


def test_a_full_disk(tmp_path, monkeypatch):
    """No file can have a byte; texts do not need any."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = Engine(tiny_llama(), chat_tokenizer(), "lookup")
    with serving(engine, folder=tmp_path) as served, no_room():
        for _ in range(2):
            status, reply = served.send(PATH, {**STREAM, "max_tokens": 20, "stream": False})
            assert (status, reply["usage"]["completion_tokens"]) == (200, 20)
        served.worker.end()
    assert not any(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
