"""The HTTP server: the application at an address, and connections that do not wait for ever."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.application import Endpoints
from mlx_redrafter.server.limits import Limits
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.worker import Worker


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens.

    Args:
        host: Address.
        port: Port, 0 for a free one.

    Raises:
        ConfigError: The address does not exist, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {reason}; choose another --host or --port"
        ) from error


def make_server(
    worker: Worker,
    name: str,
    defaults: GenerationOptions,
    limits: Limits,
    *,
    key: str | None = None,
    origins: Sequence[str] = (),
    grace: int = 30,
) -> uvicorn.Server:
    """Create a server that runs at given sockets until the process gets a signal.

    Args:
        worker: Worker that writes the texts.
        name: Name of the model.
        defaults: Options of texts for requests that leave them out.
        limits: Limits of requests.
        key: Key that requests must send; None for none.
        origins: Origins whose pages may use the server, next to its own.
        grace: Seconds that running requests have to end after the signal.
    """

    class TimedConnection(Connection):
        timeout = limits.client_timeout

    config = uvicorn.Config(
        Endpoints(worker, name, defaults, limits, key).application(origins),
        http=TimedConnection,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=grace,
    )
    return uvicorn.Server(config)


class Connection(H11Protocol):
    """One connection, which ends if the client is slow to send headers or to read.

    Attributes:
        timeout: Seconds for either; `Endpoints` limits the time for a body.
    """

    timeout = Limits.client_timeout
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, and expect headers."""
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on; the headers of another request may begin."""
        if self.conn.their_state is h11.IDLE and self._deadline is None:
            self._set_deadline()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._clear_deadline()

    def pause_writing(self) -> None:
        """Expect the client to read the bytes already sent."""
        super().pause_writing()
        self._set_deadline()

    def resume_writing(self) -> None:
        """Go on writing after the client has read."""
        super().resume_writing()
        self._clear_deadline()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP, or headers that are too long, with OpenAI's error object."""
        body = json.dumps(Refusal(msg).to_json()).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            events: list[Any] = [
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ]
            self.transport.write(b"".join(filter(None, map(self.conn.send, events))))
        self.transport.close()

    def _set_deadline(self) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(self.timeout, self.transport.abort)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
