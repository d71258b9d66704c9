"""The application at an address."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import uvicorn

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.server.application import Front
from mlx_redrafter.server.connection import Connection
from mlx_redrafter.server.limits import Limits
from mlx_redrafter.server.worker import Worker


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Args:
        host: Address.
        port: Port, 0 for a free one.

    Raises:
        ConfigError: It cannot.
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
    """A server that runs at given sockets until it gets a signal.

    Args:
        worker: Worker that writes the texts.
        name: Name of the model.
        defaults: Options of texts where a request says nothing.
        limits: Limits of requests.
        key: Key that requests must have; None for none.
        origins: Origins whose pages may use the server, beside its own.
        grace: Time that texts have to end once the server is told to, in seconds.
    """

    class PatientConnection(Connection):
        patience = limits.patience

    config = uvicorn.Config(
        Front(worker, name, defaults, limits, key).application(origins),
        http=PatientConnection,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=grace,
    )
    return uvicorn.Server(config)
