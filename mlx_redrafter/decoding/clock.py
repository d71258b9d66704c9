"""Step times, from one outcome to the next."""

from __future__ import annotations

import time

# Maximum share of a step's time that the caller may spend with a token. The device goes on
# meanwhile, so the time of a step with more is unknown.
MAX_ABSENCE = 0.1


class Absence:
    """Adds up the time that the caller spends with tokens, in a ``with`` block each.

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
    """Times steps, leaving out those that tell nothing of their kind.

    The caller kept the decoder waiting, or the step prepared what later ones use again.

    Attributes:
        absence: Context to enter while the caller has a token.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self.absence = Absence()

    def skip(self) -> None:
        """Leave out the step that goes on."""
        self._last = None

    def lap(self) -> float | None:
        """Return the seconds since the last call.

        None the first time, after `skip` or after a long absence.
        """
        now = time.perf_counter()
        last, self._last = self._last, now
        away, self.absence.seconds = self.absence.seconds, 0.0
        if last is None or away > MAX_ABSENCE * (now - last):
            return None
        return now - last
