"""Gain of speculative speculative decoding with a second engine: computed, not measured.

Axes: L beam length, K = L - 1 drafts of a chain. Times are in plain steps of the target.

While the target verifies, the second engine drafts for the most probable outcomes. If the outcome
is among them (a hit), drafting costs no time; on a miss the target's engine drafts as usual. The
decoder waits if the second engine needs longer than the verify, and a verify next to it is slower,
as both read the same memory. A recurrent drafter's early drafts start from a state that is older by
the tokens of the running pass, so fewer of them are accepted after a hit. The expected speed is
that of the stationary distribution over these ages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlx_redrafter.checks import check_int
from mlx_redrafter.errors import ConfigError

Floats = npt.NDArray[np.float64]

# Work of the host between two steps, in plain steps.
HOST = 0.03


@dataclass(frozen=True)
class Pairing:
    """A target and its drafter on a machine.

    Attributes:
        name: Name in tables.
        verify: Time of verifying a chain.
        level: Time of drafting a token on the target's engine.
        length: Beam length of the chain, L.
        accepted: Chance that a draft is accepted, by the age of the drafter's state in tokens, from
            0 on; the last one holds for all older states.
        is_recurrent: Whether early drafts start from an old state.
    """

    name: str
    verify: float
    level: float
    length: int
    accepted: tuple[float, ...]
    is_recurrent: bool = False

    def __post_init__(self) -> None:
        check_int("length", self.length, 2)
        for name, value in (("verify", self.verify), ("level", self.level)):
            if not 0 <= value < np.inf:
                raise ConfigError(f"{name} must be a number of plain steps, got {value!r}")

    @property
    def num_drafts(self) -> int:
        """Drafts of a chain, K."""
        return self.length - 1

    def outcomes(self, age: int) -> Floats:
        """Compute the chances to accept 0 to K drafts from a state of this age, shape (K + 1,)."""
        ages = np.minimum(age + np.arange(self.num_drafts), len(self.accepted) - 1)
        reached = np.cumprod([1.0, *np.array(self.accepted)[ages]])
        return reached - np.append(reached[1:], 0.0)

    def speed(self, engine: SecondEngine | None = None, hit_rate: float = 0.0) -> float:
        """Compute tokens per plain step's time, without early drafts if no engine is given."""
        drafting = self.num_drafts * self.level
        if engine is None:
            tokens = 1 + self.outcomes(0) @ np.arange(self.length)
            return float(tokens / (self.verify + drafting + HOST))
        # One pass over the tree in flight, then the levels of the chains.
        beside = self.length * self.level * engine.level
        seconds = max(self.verify * (1 + engine.slowdown), beside) + HOST
        seconds += (1 - hit_rate) * drafting
        weights = self._ages(hit_rate)
        accepted = [self.outcomes(age) @ np.arange(self.length) for age in range(len(weights))]
        return float((1 + weights @ np.array(accepted)) / seconds)

    def _ages(self, hit_rate: float) -> Floats:
        """Compute the shares of steps whose drafts start from a state of each age, 0 to L."""
        if not self.is_recurrent:
            return np.array([1.0])
        moves = np.zeros((self.length + 1, self.length + 1))
        moves[:, 0] = 1 - hit_rate
        for age in range(self.length + 1):
            moves[age, 1:] += hit_rate * self.outcomes(age)
        weights = np.linalg.matrix_power(moves, 1 << 12)[0]
        return np.asarray(weights / weights.sum())


@dataclass(frozen=True)
class SecondEngine:
    """A second engine that drafts while the target verifies.

    Attributes:
        name: Name in tables.
        level: Time of a level on it, relative to the target's own engine.
        slowdown: Share by which a verify next to it is slower.
    """

    name: str
    level: float
    slowdown: float


@dataclass(frozen=True)
class Gain:
    """Gain of one pairing by early drafts.

    Attributes:
        pairing: Name of the pairing.
        engine: Name of the engine.
        speed: Speed without early drafts, relative to plain decoding.
        gains: Speed with early drafts relative to without, by hit rate.
    """

    pairing: str
    engine: str
    speed: float
    gains: dict[float, float]


# Acceptance of the bundled drafter's most probable drafts by age, at temperature 0.8.
BY_AGE = (0.67, 0.64, 0.58, 0.58, 0.56, 0.53, 0.52, 0.51)
# Costs near those that others report for Macs: a 0.6B model drafts for one of 8B and one of 27B in
# 4 bits, and for one whose passes over several tokens cost hardly more than plain steps.
PAIRINGS = (
    Pairing("draft model of 0.6B, target of 8B", 1.45, 0.30, 5, (0.75,)),
    Pairing("draft model of 0.6B, target of 27B", 1.35, 0.11, 5, (0.75,)),
    Pairing("draft model, flat verify", 1.15, 0.06, 5, (0.75,)),
    Pairing("recurrent drafter", 1.25, 0.012, 6, BY_AGE, is_recurrent=True),
    Pairing("recurrent drafter, large head", 1.25, 0.06, 6, BY_AGE, is_recurrent=True),
)
ENGINES = (
    SecondEngine("CPU: 3 times the time, verify +15%", 3.0, 0.15),
    SecondEngine("neural engine: twice the time, verify +3%", 2.0, 0.03),
    SecondEngine("second GPU", 1.0, 0.0),
)


def simulate_predrafts(
    pairings: Sequence[Pairing],
    hit_rates: Sequence[float],
    engines: Sequence[SecondEngine] = ENGINES,
) -> list[Gain]:
    """Compute the gain of every pairing with every engine, by hit rate."""
    found = []
    for pairing in pairings:
        alone = pairing.speed()
        for engine in engines:
            gains = {rate: pairing.speed(engine, rate) / alone for rate in hit_rates}
            found.append(Gain(pairing.name, engine.name, alone, gains))
    return found
