"""Clients of a running server, and whether each gets the text that it asked for."""

from __future__ import annotations

import http.client
import json
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.errors import DataError

# Maximum pause of a client before a request, in seconds.
PAUSE = 0.1
# Maximum time until a client disconnects, in seconds.
STAY = 0.3
# Share of the requests whose client disconnects.
SHARE_GONE = 0.25
_GAUGES = ("waiting_requests", "running_requests", "prompt_cache_bytes", "device_bytes")


@dataclass(frozen=True)
class ServingCase:
    """A request, and the text that belongs to it.

    Attributes:
        body: Body of the request.
        text: Text of `stream_generate` with the same options.
    """

    body: dict[str, Any]
    text: str


@dataclass
class ClientOutcomes:
    """Results of a run.

    Attributes:
        num_right: Requests answered with their text.
        num_gone: Requests whose client went away.
        wrong: Requests answered with something else, and the answers.
        seconds: Duration of the run.
        gauges: Gauges of the server at the end, when all texts have ended.
    """

    num_right: int = 0
    num_gone: int = 0
    wrong: list[tuple[ServingCase, str]] = field(default_factory=list)
    seconds: float = 0.0
    gauges: dict[str, int] = field(default_factory=dict)


def make_cases(engine: Engine, prompts: Sequence[str], max_tokens: int) -> list[ServingCase]:
    """Make a request per prompt, with greedy decoding and with sampling, and its expected text."""
    cases = []
    for seed, prompt in enumerate(prompts):
        for temp in (0.0, 1.0):
            text = engine.generate(prompt, max_tokens=max_tokens, temp=temp, seed=seed)
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temp, "seed": seed}
            cases.append(ServingCase(body, text))
    return cases


def run_clients(
    url: str,
    cases: Sequence[ServingCase],
    num_requests: int,
    num_clients: int,
    seed: int,
    on_progress: Callable[[int, int], None],
) -> ClientOutcomes:
    """Send requests from several threads; the clients of a quarter of them disconnect.

    Args:
        url: Address of a server without a key.
        cases: Requests to draw from.
        num_requests: Number of requests.
        num_clients: Number of threads.
        seed: Seed of the choice and timing of requests.
        on_progress: Callback for the number of requests done and their total.

    Raises:
        DataError: No server answers at that address.
    """
    address, outcome, lock = urlsplit(url).netloc, ClientOutcomes(), threading.Lock()
    try:
        read_gauges(address)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"no server answers at {url}: {error}; start one with serve") from error
    numbers = iter(range(1, num_requests + 1))

    def ask_all(draw: random.Random) -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            time.sleep(draw.random() * PAUSE)
            case, is_gone = draw.choice(cases), draw.random() < SHARE_GONE
            answer = ask(address, case.body, draw.random() * STAY if is_gone else None)
            with lock:
                if answer is None:
                    outcome.num_gone += 1
                elif answer == case.text:
                    outcome.num_right += 1
                else:
                    outcome.wrong.append((case, answer))
                on_progress(number, num_requests)

    start = time.perf_counter()
    clients = [
        threading.Thread(target=ask_all, args=(random.Random(seed + i),), daemon=True)
        for i in range(num_clients)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    outcome.seconds = time.perf_counter() - start
    while True:
        outcome.gauges = read_gauges(address)
        if not any(outcome.gauges[f"{kind}_requests"] for kind in ("waiting", "running")):
            return outcome
        time.sleep(0.05)


def ask(address: str, body: dict[str, Any], stay: float | None) -> str | None:
    """Send a request and return the answer; None if the client disconnects after ``stay`` s."""
    headers = {"Content-Type": "application/json"}
    with closing(http.client.HTTPConnection(address, timeout=600)) as connection:
        content = json.dumps({**body, "stream": stay is not None})
        connection.request("POST", "/v1/completions", content, headers)
        if stay is not None:
            time.sleep(stay)
            return None
        response = connection.getresponse()
        answer = response.read().decode()
    return json.loads(answer)["choices"][0]["text"] if response.status == 200 else answer


def read_gauges(address: str) -> dict[str, int]:
    """Read the gauges of the server, by the name of their metric."""
    with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    found = (re.search(rf"^redrafter_{name} (\d+)$", text, re.M) for name in _GAUGES)
    return {name: int(one[1]) for name, one in zip(_GAUGES, found, strict=True) if one}
