"""Step times, from one outcome to the next."""

from __future__ import annotations

import time

# Maximum share of a step's time that the caller may spend with a token. The device goes on
# meanwhile, so the time of a step with more is unknown.
MAX_ABSENCE = 0.1


class StepClock:
    """Times steps, leaving out those that tell nothing of their kind.

    The caller kept the decoder waiting, or the step prepared what later ones use again.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        # Seconds that the caller has spent with tokens since the last outcome.
        self._away = 0.0

    def leave_out(self, seconds: float) -> None:
        """Count seconds that the caller has spent with tokens."""
        self._away += seconds

    def skip(self) -> None:
        """Leave out the step that goes on."""
        self._last = None

    def lap(self) -> float | None:
        """Return the seconds since the last call.

        None the first time, after `skip` or after a long absence.
        """
        now = time.perf_counter()
        last, self._last = self._last, now
        away, self._away = self._away, 0.0
        if last is None or away > MAX_ABSENCE * (now - last):
            return None
        return now - last
