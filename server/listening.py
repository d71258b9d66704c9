"""The HTTP server: the application at an address, and connections that do not wait for ever."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import resource
import signal
import socket
from types import FrameType
from typing import Any, ClassVar

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.worker import Worker

logger = logging.getLogger(__name__)

# Seconds that texts have to end once the server ends them: a chunk of a prompt may take longer, and
# its client gets an answer before.
CHUNK_SECONDS = 0.5
# Seconds that clients have to read the ends of their replies, and then the process to end.
LAST_SECONDS = 1.2
# Seconds between two reports of errors of the event loop, such as too many open files.
REPORT_SECONDS = 10.0
# Number of open files that connections leave to others.
SPARE_FILES = 64
# Maximum number of connections, whatever number of files may be open.
MAX_CONNECTIONS = 1000


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens; port 0 stands for a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        # Python repeats the address in brackets.
        reason, *_ = str(getattr(error, "strerror", None) or error).split(" (while ")
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {reason}; choose another --host or --port"
        ) from error


class Server(uvicorn.Server):
    """A server that ends in bounded time after a signal, and sooner after a second one.

    Args:
        client_timeout: Seconds that a client has to send headers, or to read.
        grace: Seconds that running requests have after the first signal.
        worker: The thread that writes the texts.
        ends_process: Whether to end the process if its threads do not end in time: nothing can
            interrupt MLX while it processes a chunk of a prompt.
    """

    def __init__(
        self,
        application: Starlette,
        client_timeout: float,
        grace: float,
        worker: Worker,
        ends_process: bool = False,
    ):
        class TimedConnection(Connection):
            timeout = client_timeout
            max_connections = _max_connections()
            unasked: ClassVar[dict[Connection, None]] = {}

        config = uvicorn.Config(
            application,
            http=TimedConnection,
            ws="none",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
        )
        super().__init__(config)
        self._grace = grace
        self._worker = worker
        self._ends_process = ends_process
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_report = -math.inf

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and keep the log short if the loop has many errors."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._report)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, with `_end_now` once the time is over."""
        ending = asyncio.get_running_loop().call_later(self._grace, self._end_now)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; Ctrl-C and a second signal end the texts at once."""
        self._captured_signals.append(sig)
        if self._loop is not None and (self.should_exit or sig == signal.SIGINT):
            self._loop.call_soon_threadsafe(self._end_now)
        self.should_exit = True

    def _end_now(self) -> None:
        self._worker.end()
        loop = asyncio.get_running_loop()
        loop.call_later(CHUNK_SECONDS, self._worker.answer_all)
        loop.call_later(LAST_SECONDS, self._cut)

    def _cut(self) -> None:
        """Cut the connections of clients that do not read the ends of their replies."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self._ends_process:
            is_interrupted = signal.SIGINT in self._captured_signals
            code = 128 + signal.SIGINT if is_interrupted else 0
            asyncio.get_running_loop().call_later(CHUNK_SECONDS / 2, os._exit, code)

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the event loop, at most one per `REPORT_SECONDS`."""
        now = loop.time()
        if now - self._last_report >= REPORT_SECONDS:
            self._last_report = now
            error = context.get("exception")
            logger.error("%s: %s", context.get("message"), error or "no exception")


class Connection(H11Protocol):
    """One connection, which ends if the client is slow to send headers or to read.

    If there are too many connections, the oldest one ends whose request has not arrived whole.

    Attributes:
        timeout: Seconds for either; the application limits the time for a body.
        max_connections: Maximum number of connections.
        unasked: Connections without a whole request, the oldest first.
    """

    timeout: float
    max_connections: int
    unasked: ClassVar[dict[Connection, None]]
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()
        self.unasked[self] = None
        if len(self.connections) > self.max_connections:
            oldest = next(iter(self.unasked))
            del self.unasked[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self.unasked.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE and self._deadline is None:
            self._set_deadline()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and not self.flow.write_paused:
            self._clear_deadline()
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self.unasked.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            self.unasked[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._clear_deadline()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP, or headers that are too long, with OpenAI's error object."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(Refusal(msg).to_json())
            head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"
            end = f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
            self.transport.write(f"{head}{end}".encode())
        self.transport.close()

    def _set_deadline(self) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(self.timeout, self.transport.abort)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None


def _max_connections() -> int:
    """Return a number of connections for which the process may open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, limit - SPARE_FILES))
