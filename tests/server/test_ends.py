"""The end of the server by a signal: every client gets an answer, in bounded time."""

import contextlib
import http.client
import json
import signal
import socket
import threading
import time
from contextlib import closing
from typing import Any

import pytest

from mlx_redrafter.server.limits import Limits
from tests.server.processes import port_of, process
from tests.server.serving import begin, make_engine, serving

LONG = {"prompt": "Once upon a time", "max_tokens": 100_000, "temperature": 1, "seed": 1}


def _ask(port: int, answers: list[Any], **fields: Any) -> threading.Thread:
    def ask() -> None:
        with closing(begin(port, LONG | fields)) as connection:
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
        ways = [{"stream": True}, {"stream": False}] * 2
        threads = [_ask(served.port, answers, prompt="A", max_tokens=4000, **way) for way in ways]
        served.wait_for(waiting_requests=2)
        time.sleep(0.1)
    for thread in threads:
        thread.join(90)
    assert sorted(status for status, _ in answers) == [200, 200, 503, 503]
    for _, text in answers:  # the last event, or the whole
        last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "shutting_down"


def _num_running(port: int) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    return sum(
        int(text.partition(f"\nredrafter_{kind}_requests ")[2].split()[0])
        for kind in ("running", "waiting")
    )


def test_sigterm_under_load() -> None:
    """Texts that were begun are written to their end; nobody is left without an answer."""
    with process("--drafter", "none", "--max-running", "2") as server:
        port, answers = port_of(server), list[tuple[int, str]]()
        ways = [{}] * 5 + [{"stream": True}]
        threads = [_ask(port, answers, temperature=0, max_tokens=60, **way) for way in ways]
        # All have come, and most have not ended.
        while len(answers) + _num_running(port) < 6:
            time.sleep(0.005)
        server.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert server.wait(60) == 0
        with pytest.raises(ConnectionError):
            http.client.HTTPConnection("127.0.0.1", port).connect()
    assert [status for status, _ in answers] == [200] * 6
    (stream,) = (text for _, text in answers if text.startswith("data: "))
    wholes = [json.loads(text) for _, text in answers if text != stream]
    (text,) = {one["choices"][0]["text"] for one in wholes}
    events = [json.loads(one[6:]) for one in stream.split("\n\n") if one.startswith("data: {")]
    assert "".join(one["choices"][0]["text"] for one in events) == text
    assert stream.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("signals", "code"),
    [([signal.SIGINT], 130), ([signal.SIGHUP, signal.SIGTERM], 0)],
    ids=["Ctrl-C", "SIGHUP and SIGTERM"],
)
def test_a_second_signal_ends_texts_at_once(signals: list[signal.Signals], code: int) -> None:
    with process("--drafter", "none") as server:
        port, answers = port_of(server), list[Any]()
        threads = [_ask(port, answers, stream=stream) for stream in (True, True, False)]
        while _num_running(port) < 3:
            time.sleep(0.02)
        for one in signals:
            server.send_signal(one)
            time.sleep(0.2)
        assert server.wait(25) == code  # after one signal the texts would have 30 seconds
        _check_end(server, threads, answers)


def _check_end(server: Any, threads: list[threading.Thread], answers: list[Any]) -> None:
    for thread in threads:
        thread.join(90)
    log = server.stderr.read()
    assert "Traceback" not in log
    assert "terminate" not in log
    assert len(answers) == len(threads)
    assert {status for status, _ in answers} <= {200, 503}
    assert all("shutting_down" in text for _, text in answers)


# A chunk of a prompt that takes longer than anyone waits, as MLX may.
SLOW_CHUNK = """
import time
from mlx_redrafter.decoding import scheduler
scheduler.prefill_together = lambda *_: time.sleep(60)
"""


def test_a_second_signal_in_the_middle_of_a_prompt() -> None:
    with process("--drafter", "none", code=SLOW_CHUNK) as server:
        port, answers = port_of(server), list[Any]()
        prompt = "Once upon a time " * 100
        threads = [_ask(port, answers, stream=one, prompt=prompt) for one in (True, False)]
        while _num_running(port) < 2:
            time.sleep(0.05)
        server.send_signal(signal.SIGINT)
        with contextlib.suppress(ConnectionError):  # until it has noticed the first one
            while True:
                socket.create_connection(("127.0.0.1", port), timeout=60).close()
                time.sleep(0.05)
        begun = time.monotonic()
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 130
        # 1.5 s, and some for a machine that is busy; the grace is 30 s
        assert time.monotonic() - begun < 25
        _check_end(server, threads, answers)
    assert sorted(status for status, _ in answers) == [200, 503]


def test_a_signal_while_the_model_is_loaded() -> None:
    slow = "import mlx_redrafter.cli.serve as serve, time, sys\n"
    slow += "serve._load = lambda pair: print('loading', file=sys.stderr) or time.sleep(60)"
    with process(code=slow) as server:
        assert server.stderr is not None
        assert server.stderr.readline() == "loading\n"
        server.send_signal(signal.SIGTERM)
        assert server.wait(50) == 0
        assert server.stderr.read() == ""
