"""How long steps take, from one outcome to the next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

# Of a step, at most so much with the caller: the device goes on meanwhile, for how long is unknown.
MOST_AWAY = 0.1


class StepClock:
    """Times steps, leaving out those in which the caller kept the decoder waiting."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._away = 0.0

    def lap(self) -> float | None:
        """Seconds since the last call; None the first time, and where the caller took its time."""
        now = time.perf_counter()
        last, self._last = self._last, now
        away, self._away = self._away, 0.0
        if last is None or away > MOST_AWAY * (now - last):
            return None
        return now - last

    @contextmanager
    def away(self) -> Iterator[None]:
        """While the caller has the token."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._away += time.perf_counter() - start
