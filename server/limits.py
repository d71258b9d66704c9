"""What clients may take of a server."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from mlx_redrafter.checks import check_int, is_number
from mlx_redrafter.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Limits of requests, checked; the description of a field is the help of its option.

    Raises:
        ConfigError: One is out of range.
    """

    max_running: Annotated[int, "Most requests whose texts are written at once."] = 8
    max_waiting: Annotated[int, "Most requests in the queue; further ones are refused."] = 64
    max_context: Annotated[
        int, "Most tokens of a prompt and its text; the model's own limit if that is less."
    ] = 1 << 17
    max_body_bytes: Annotated[int, "Most bytes of a request's body."] = 4 << 20
    prompt_cache_size: Annotated[
        int, "Most prompt caches kept for further requests; 0 keeps none."
    ] = 10
    prompt_cache_bytes: Annotated[int, "Most memory of those caches, in bytes."] = 4 << 30
    patience: Annotated[
        float, "Seconds that a client has to send a request, or to take what it is sent."
    ] = 30.0

    def __post_init__(self) -> None:
        for name in ("max_running", "max_body_bytes"):
            check_int(name, getattr(self, name), 1)
        check_int("max_context", self.max_context, 2)
        for name in ("max_waiting", "prompt_cache_size", "prompt_cache_bytes"):
            check_int(name, getattr(self, name), 0)
        if not is_number(self.patience) or not 0 < self.patience < math.inf:
            raise ConfigError(f"patience must be a number above 0, got {self.patience!r}")
