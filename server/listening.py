"""The application at an address."""

from __future__ import annotations

from collections.abc import Sequence

import uvicorn

from mlx_redrafter.config import GenerationOptions
from mlx_redrafter.server.application import Front
from mlx_redrafter.server.connection import Connection
from mlx_redrafter.server.limits import Limits
from mlx_redrafter.server.worker import Worker


def make_server(
    worker: Worker,
    name: str,
    defaults: GenerationOptions,
    limits: Limits,
    *,
    host: str,
    port: int,
    key: str | None = None,
    origins: Sequence[str] = (),
    grace: int = 30,
) -> uvicorn.Server:
    """A server that runs until it gets a signal.

    Args:
        worker: Worker that writes the texts.
        name: Name of the model.
        defaults: Options of texts where a request says nothing.
        limits: Limits of requests.
        host: Address to listen at.
        port: Port to listen at, 0 for a free one.
        key: Key that requests must have; None for none.
        origins: Origins whose pages may use the server, beside its own.
        grace: Time that texts have to end once the server is told to, in seconds.
    """
    patient = type("PatientConnection", (Connection,), {"patience": limits.patience})
    config = uvicorn.Config(
        Front(worker, name, defaults, limits, key).application(origins),
        host=host,
        port=port,
        http=patient,
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=grace,
    )
    return uvicorn.Server(config)
