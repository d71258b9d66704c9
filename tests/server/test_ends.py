"""The end of the server by a signal: every client gets an answer, in bounded time."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mlx_redrafter.server.limits import Limits
from tests.server.processes import port_of, process
from tests.server.serving import ABSENT, KEY, make_engine, serving

PATH = "/v1/completions"
LONG = {"prompt": "Once upon a time", "max_tokens": 100_000, "temperature": 1, "seed": 1}


def _ask(port: int, answers: list[Any], **fields: Any) -> threading.Thread:
    def ask() -> None:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("POST", PATH, json.dumps(LONG | fields), headers)
            response = connection.getresponse()
            answers.append((response.status, response.read().decode()))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_texts_that_outlast_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams get an event, whole texts and those that wait a status, and the thread ends."""
    answers: list[Any] = []
    with serving(make_engine(context=4096), Limits(max_running=2), grace=0.3) as served:
        served.slow_down(monkeypatch, 0.01)
        ways = [{"stream": True}, {"stream": False}, {"stream": True}, {"stream": False}]
        threads = [_ask(served.port, answers, prompt="A", max_tokens=4000, **way) for way in ways]
        while served.worker.gauges()["waiting_requests"] < 2:
            time.sleep(0.01)
        time.sleep(0.1)
    for thread in threads:
        thread.join(90)
    streams = [text for status, text in answers if status == 200]
    wholes = [(status, text) for status, text in answers if status != 200]
    assert len(streams) == len(wholes) == 2
    for text in streams:
        last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "shutting_down"
    for status, text in wholes:
        assert (status, json.loads(text)["error"]["code"]) == (503, "shutting_down")


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGINT], 130),
        ([signal.SIGINT, signal.SIGINT], 130),
        ([signal.SIGHUP, signal.SIGTERM], 0),
    ],
    ids=["Ctrl-C", "Ctrl-C twice", "SIGHUP and SIGTERM"],
)
def test_a_second_signal_ends_texts_at_once(
    tmp_path: Path, signals: list[signal.Signals], code: int
) -> None:
    with process(tmp_path, "--drafter", "none") as (server, port):
        answers: list[Any] = []
        threads = [_ask(port, answers, stream=stream) for stream in (True, True, False)]
        while _num_running(port) < 3:
            time.sleep(0.02)
        for one in signals:
            server.send_signal(one)
            time.sleep(0.2)
        assert server.wait(25) == code  # after one signal the texts would have 30 seconds
        for thread in threads:
            thread.join(90)
        assert server.stderr is not None
        log = server.stderr.read()
    assert "Traceback" not in log
    assert "terminate" not in log
    assert len(answers) == 3
    for status, text in answers:
        assert status in (200, 503)
        assert "shutting_down" in text


def _run(*options: str, code: str = "") -> subprocess.Popen[str]:
    """The command as a process, after a line of code."""
    pytest.importorskip("uvicorn", reason=ABSENT)
    program = f"{code}\nfrom mlx_redrafter.cli.main import run; run()"
    command = [sys.executable, "-c", program, "serve", "--port", "0", *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def _num_running(port: int) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    return int(text.partition("\nredrafter_running_requests ")[2].split()[0])


def _wait_until_refused(port: int) -> None:
    """Wait until a server has noticed its first signal."""
    with contextlib.suppress(ConnectionError):
        while True:
            socket.create_connection(("127.0.0.1", port), timeout=60).close()
            time.sleep(0.05)


# A chunk of a prompt that takes longer than anyone waits, as MLX may.
SLOW_CHUNK = """
import time
from mlx_redrafter.decoding import scheduler
scheduler.prefill_together = lambda *_: time.sleep(60)
"""


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_in_the_middle_of_a_prompt(first: signal.Signals) -> None:
    with _run("--drafter", "none", code=SLOW_CHUNK) as server:
        assert server.stderr is not None
        try:
            port = port_of(server)
            answers: list[Any] = []
            prompt = "Once upon a time " * 100
            threads = [_ask(port, answers, stream=one, prompt=prompt) for one in (True, False)]
            while _num_running(port) < 2:
                time.sleep(0.1)
            server.send_signal(first)
            _wait_until_refused(port)
            begin = time.monotonic()
            server.send_signal(first)
            code = server.wait(60)
            took = time.monotonic() - begin
            for thread in threads:
                thread.join(90)
        finally:
            server.kill()
        log = server.stderr.read()
    assert code == (130 if first == signal.SIGINT else 0)
    assert took < 25  # 1.5 s, and some for a machine that is busy; the grace is 30 s
    assert "Traceback" not in log
    assert sorted(status for status, _ in answers) == [200, 503]
    assert all("shutting_down" in text for _, text in answers)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_model_is_loaded(number: signal.Signals) -> None:
    slow = "import mlx_redrafter.cli.serve as serve, time, sys\n"
    slow += "serve._load = lambda pair: print('loading', file=sys.stderr) or time.sleep(60)"
    with _run(code=slow) as server:
        assert server.stderr is not None
        try:
            assert server.stderr.readline() == "loading\n"
            server.send_signal(number)
            assert server.wait(50) == 0
        finally:
            server.kill()
        assert server.stderr.read() == ""
