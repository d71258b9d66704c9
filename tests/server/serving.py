"""A server on a free port of this machine, and requests to it."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.application import make_application
from mlx_redrafter.server.callers import Callers
from mlx_redrafter.server.limits import Limits
from mlx_redrafter.server.listening import Server, listen
from mlx_redrafter.server.models import Model, Models
from mlx_redrafter.server.protocols import service
from mlx_redrafter.server.worker import Worker
from tests.helpers.calls import at_call
from tests.helpers.models import chat_tokenizer, random_drafter, tiny_llama

KEY = "secret"
PATH = "/v1/completions"
DEFAULTS = GenerationOptions(max_tokens=30, prefill_step_size=16)
# As without --max-tokens.
UNLIMITED = GenerationOptions(max_tokens=-1, prefill_step_size=16)
# Arguments of a tool that tells of a city's weather.
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def make_engine(context: int = 512, **wrapping: Any) -> Engine:
    """A random model with a random drafter; ``wrapping`` are arguments of mlx-lm's wrapper."""
    model, tokenizer = tiny_llama(seed=4, context=context), chat_tokenizer(**wrapping)
    return Engine(model, tokenizer, random_drafter(64, 32))


@dataclass
class Served:
    """A server that runs."""

    port: int
    worker: Worker
    engine: Engine
    models: list[Any]

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Address for OpenAI's clients."""
        return f"{self.root}/v1"

    def send(
        self, path: str, body: Any = None, key: str | None = KEY, **headers: str
    ) -> tuple[int, Any]:
        """Status and content of the answer; bytes are sent as they are, all else as JSON."""
        given = {"Content-Type": "application/json", **headers}
        if key is not None:
            given["Authorization"] = f"Bearer {key}"
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            method = "GET" if body is None else "POST"
            connection.request(method, path, content, given)
            response = connection.getresponse()
            text = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(text) if is_json else text.decode()

    def text(self, **fields: Any) -> str:
        """The text after a prompt, which the server must write."""
        status, reply = self.send(PATH, fields)
        assert status == 200, reply
        return str(reply["choices"][0]["text"])

    def openai(self) -> Any:
        """OpenAI's client of this server."""
        import openai

        return openai.OpenAI(base_url=self.url, api_key=KEY, max_retries=0)

    def slow_down(self, patch: pytest.MonkeyPatch, seconds: float) -> None:
        """Let each step of a text take some seconds, so that clients can do something meanwhile."""
        at_call(patch, self.worker, "_step", lambda _: time.sleep(seconds))

    def wait_for(self, **gauges: int) -> None:
        """Wait until gauges of the worker have these values."""
        wait_until(lambda: gauges.items() <= self.worker.gauges().items())

    def wait_until_idle(self) -> None:
        """Wait until no text is written any more."""
        self.wait_for(waiting_requests=0, running_requests=0)

    def begin(self, **fields: Any) -> http.client.HTTPConnection:
        """Ask for a long text, which is not read."""
        return begin(self.port, {"prompt": "A", "max_tokens": 480, "stream": True, **fields})


def hold(
    patch: pytest.MonkeyPatch, is_held: Callable[[Any], bool]
) -> tuple[threading.Event, threading.Event]:
    """Hold some requests amid their preparation; return events: one has begun, and all go on."""
    begun, goes_on = threading.Event(), threading.Event()

    def wait(request: Any, *_: Any) -> None:
        if is_held(request):
            begun.set()
            assert goes_on.wait(60)

    at_call(patch, service, "fit", wait)
    return begun, goes_on


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 90
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def events(text: str) -> list[Any]:
    """JSON of the events of a stream."""
    lines = (line.removeprefix("data: ") for line in text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def begin(port: int, body: dict[str, Any]) -> http.client.HTTPConnection:
    """Ask a server for a text, which is not read."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", PATH, json.dumps(body), headers)
    return connection


@contextmanager
def sent(port: int, *lines: str) -> Iterator[socket.socket]:
    """A connection that has sent some lines of a request, the last one without its end."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall("\r\n".join(lines).encode())
        yield connection


def answer_on(connection: socket.socket) -> tuple[http.client.HTTPResponse, bytes]:
    """The response that comes on a connection, and its content."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response, response.read()


@contextmanager
def running(server: uvicorn.Server) -> Iterator[int]:
    """Run a server on a free port for this block."""
    listener = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(90)


@contextmanager
def serving(
    engine: Engine,
    limits: Limits | None = None,
    defaults: GenerationOptions = DEFAULTS,
    others: Sequence[Any] = (),
    is_strict: bool = False,
    grace: float = 5,
    folder: Path | None = None,
) -> Iterator[Served]:
    """A server for this block."""
    limits = Limits() if limits is None else limits
    worker = Worker(limits)
    served = [Model("tiny", lambda: engine), *others]
    models = Models(served, defaults, limits, worker.is_busy, is_strict, folder)
    callers = Callers(hosts=["named.example"], origins=["http://page.example"], key=KEY)
    application = make_application(service.Service(models, worker, callers))
    server = Server(application, limits.client_timeout, grace, worker)
    with running(server) as port:
        yield Served(port, worker, engine, served)
    assert not worker.is_alive()
