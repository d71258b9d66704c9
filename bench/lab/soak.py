"""A server under load in a process of its own, killed and started again."""

from __future__ import annotations

import http.client
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mlx_redrafter.bench.lab.soak_requests import Case, Failed, ask, ask_badly

# Share of the requests whose client goes away.
SHARE_GONE = 0.15
# Share of the requests that must fail.
SHARE_BAD = 0.05
# Seconds until a server has started, on a slow machine.
START = 300.0


class ServedProcess:
    """``redrafter-mlx serve`` as a process, whose log goes to a file.

    Args:
        options: Options of the command.
        log: File of the log.

    Attributes:
        num_kills: Number of times that it was killed.
    """

    def __init__(self, options: Sequence[str], log: Path):
        self.log = log
        self._options = list(options)
        self.port = _free_port()
        self.num_kills = 0
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "mlx_redrafter", "serve", "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, *self._options], stderr=log, stdout=log)
        end = time.monotonic() + START
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end:
                raise Failed(f"the server has not started; its log: {self.log}")
            time.sleep(0.1)

    def kill_and_start(self) -> None:
        """Kill the server as the system would, and start it again at the same port."""
        self.num_kills += 1
        self.process.kill()
        self.process.wait()
        self._start()

    def end(self) -> int:
        """End the server by SIGTERM; return the exit code."""
        self.process.terminate()
        return self.process.wait(120)

    def measure(self) -> dict[str, int]:
        """Return the server's memory and log in bytes, and the number of its open files."""
        folder = Path(f"/proc/{self.process.pid}")
        found = {"log": self.log.stat().st_size}
        with suppress(OSError):  # only Linux has these
            status = (folder / "status").read_text()
            memory = re.search(r"VmRSS:\s+(\d+) kB", status)
            found["memory"] = 1024 * int(memory[1]) if memory else 0
            found["files"] = len(os.listdir(folder / "fd"))
        return found

    def _answers(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            with closing(connection):
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
        return False


@dataclass
class Outcome:
    """Results of requests.

    Attributes:
        counts: Requests that were right, refused as they must be, gone or lost in a kill.
        wrong: Descriptions of those that were wrong or failed.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def ask_alone(port: int, cases: Sequence[Case]) -> dict[int, list[str]]:
    """Return the texts of all cases by their index, each asked while nothing else runs."""
    return {number: ask(port, case, streams=False) for number, case in enumerate(cases)}


def run_clients(
    server: ServedProcess,
    cases: Sequence[Case],
    expected: dict[int, list[str]],
    num_requests: int,
    num_clients: int,
    seed: int,
    kill_after: float | None,
) -> Outcome:
    """Send requests from several threads, and kill the server once, if wanted.

    Args:
        server: The server.
        cases: Requests to draw from.
        expected: Their texts.
        num_requests: Number of requests.
        num_clients: Number of threads.
        seed: Seed of the choice of requests.
        kill_after: Share of the requests after which the server is killed; None for never.
    """
    outcome, lock = Outcome(), threading.Lock()
    numbers = iter(range(num_requests))
    back = threading.Event()
    back.set()

    def ask_all(draw: random.Random) -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            if kill_after is not None and number == int(kill_after * num_requests):
                back.clear()
                server.kill_and_start()
                back.set()
            back.wait()
            found, what = _ask_one(server, cases, expected, draw)
            with lock:
                outcome.counts[found] += 1
                if what:
                    outcome.wrong.append(what)

    clients = [
        threading.Thread(target=ask_all, args=(random.Random(1000 * seed + i),))
        for i in range(num_clients)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return outcome


def _ask_one(
    server: ServedProcess,
    cases: Sequence[Case],
    expected: dict[int, list[str]],
    draw: random.Random,
) -> tuple[str, str]:
    """Send one request; return its kind of end, and a description if that was wrong."""
    number, streams = draw.randrange(len(cases)), draw.random() < 0.5
    kind, case, before = draw.random(), cases[number], server.num_kills
    try:
        if kind < SHARE_BAD:
            ask_badly(server.port, draw)
            return "refused", ""
        if kind < SHARE_BAD + SHARE_GONE:
            ask(server.port, case, streams, random.Random(draw.random()))
            return "gone", ""
        found = ask(server.port, case, streams)
    except (OSError, http.client.HTTPException, Failed, ValueError) as error:
        if server.num_kills != before:
            return "lost", ""
        return "failed", f"{case}: {error!r}"
    if found == expected[number]:
        return "right", ""
    return "wrong", f"{case}: expected {expected[number]}, found {found}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])
