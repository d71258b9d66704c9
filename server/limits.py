"""Limits of a server's clients, which are options of the command line, too."""

from dataclasses import dataclass
from typing import Annotated

from mlx_redrafter.checks import check_int, check_number


@dataclass(frozen=True)
class Limits:
    """Limits of requests; raises `ConfigError` if one is out of range."""

    max_running: Annotated[int, "Maximum number of requests that are written at the same time."] = 8
    max_waiting: Annotated[
        int, "Maximum number of requests in the queue; others get HTTP status 429."
    ] = 64
    max_context: Annotated[
        int, "Maximum number of tokens of a prompt and its text, if the model allows as many."
    ] = 1 << 17
    max_body_bytes: Annotated[int, "Maximum size of a request's body, in bytes."] = 4 << 20
    prompt_cache_bytes: Annotated[
        int, "Maximum size of the prompts kept in memory, in bytes; 0 keeps none at all."
    ] = 4 << 30
    prompt_disk_bytes: Annotated[
        int,
        "Maximum size of the prompts kept on the disk for the next start, in bytes; 0 spares "
        "the disk.",
    ] = 8 << 30
    max_model_bytes: Annotated[
        int,
        "Maximum total size of the loaded models, in bytes; the model used least recently is "
        "unloaded first. 0 stands for three quarters of the device's memory.",
    ] = 0
    keep_alive: Annotated[
        float, "Seconds without requests after which a model is unloaded; 0 keeps it."
    ] = 0.0
    client_timeout: Annotated[
        float, "Seconds that a client has to send a request, or to read the bytes sent to it."
    ] = 30.0

    def __post_init__(self) -> None:
        for name in ("max_running", "max_body_bytes"):
            check_int(name, getattr(self, name), 1)
        check_int("max_context", self.max_context, 2)
        for name in ("max_waiting", "prompt_cache_bytes", "prompt_disk_bytes", "max_model_bytes"):
            check_int(name, getattr(self, name), 0)
        check_number("keep_alive", self.keep_alive, 0, 1e9)  # some 30 years
        check_number("client_timeout", self.client_timeout, 1e-3, 1e9)
