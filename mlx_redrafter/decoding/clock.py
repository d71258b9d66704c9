"""How long steps take, from one outcome to the next."""

from __future__ import annotations

import time

# Of a step, at most so much with the caller: the device goes on meanwhile, for how long is unknown.
MOST_AWAY = 0.1


class Absence:
    """Adds up how long the caller has the token, in a ``with``.

    Attributes:
        seconds: The sum.
    """

    def __init__(self) -> None:
        self.seconds = self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._start


class StepClock:
    """Times steps, leaving out those in which the caller kept the decoder waiting.

    Attributes:
        absence: To be entered while the caller has a token.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self.absence = Absence()

    def lap(self) -> float | None:
        """Seconds since the last call; None the first time, and where the caller took its time."""
        now = time.perf_counter()
        last, self._last = self._last, now
        away, self.absence.seconds = self.absence.seconds, 0.0
        if last is None or away > MOST_AWAY * (now - last):
            return None
        return now - last
