"""Scenarios of simulated texts: how easy they are, and what steps take.

Axes: W beam width, L beam length, N nodes of a tree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlx_redrafter.bench.chips import CURVES as PUBLISHED
from mlx_redrafter.bench.chips import VerifyCurve
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.policy.plans import SIZES, StepCosts

Floats = npt.NDArray[np.float64]

# Levels drawn at every position, and positions simulated after the end of a text.
LEVELS = 15
# Tokens of the first text and of the second, whose speed counts.
FIRST_TEXT, SECOND_TEXT = 50, 200


class Noise(NamedTuple):
    """What makes equal steps take unequal times.

    Attributes:
        jitter: Relative spread.
        stall_share: Share of the steps that wait for other work.
        stall: Mean time of waiting, relative to the step's.
    """

    jitter: float = 0.04
    stall_share: float = 0.01
    stall: float = 1.5

    @property
    def mean(self) -> float:
        """Mean time relative to that of an undisturbed step."""
        return float(np.exp(self.jitter**2 / 2)) * (1 + self.stall_share * self.stall)

    def draw(self, rng: np.random.Generator) -> float:
        """The time of one step, relative to an undisturbed one's."""
        took = float(np.exp(rng.normal(0.0, self.jitter)))
        return took * (1 + self.stall * (rng.random() < self.stall_share))


QUIET = Noise()


@dataclass(frozen=True)
class Scenario:
    """A text, a drafter and a machine, all simulated.

    Attributes:
        name: Short description.
        ease: Log-odds that the best continuation is right, by position of the text.
        score_scale: Factor of the drafter's logits; 1 where its probabilities are true.
        fade: Log-odds lost from one level of a draft to the next.
        costs: True seconds of steps.
        timed: Seconds as they were timed beforehand.
        seed: Seed of everything drawn.
        hidden: Seconds of the host's work that plain steps hide, but not a step whose drafts the
            host has read and of which nothing is verified; the costs of others include it.
    """

    name: str
    ease: Floats
    score_scale: float
    fade: float
    costs: StepCosts
    timed: StepCosts
    seed: int
    hidden: float = 0.0

    def seconds(
        self, position: int, shape: DraftShape | None, num_nodes: int, waits: bool
    ) -> float:
        """Time of an undisturbed step after a position; see `step_seconds`."""
        hidden = self.hidden if waits and num_nodes == 1 else 0.0
        return step_seconds(self.costs, shape, num_nodes, waits) + hidden


def step_seconds(costs: StepCosts, shape: DraftShape | None, num_nodes: int, waits: bool) -> float:
    """Add up the parts of a step's cost; no shape stands for no drafts, and for prompt lookup.

    ``num_nodes`` is 1 for the root alone, else a key of ``costs.verify``. ``waits`` is whether the
    host reads the drafts before the target verifies them.
    """
    verify = costs.plain if num_nodes == 1 else costs.verify[num_nodes]
    drafting = 0.0 if shape is None else costs.drafting(shape)
    return verify + drafting + waits * costs.wait


def _published(curve: VerifyCurve) -> Callable[[int], float]:
    """A measured curve, continued beyond its last measurement by its last slope."""
    (before, low), (last, high) = sorted(curve.ratios.items())[-2:]
    slope = (high - low) / (last - before)

    def ratio(num_nodes: int) -> float:
        known = curve.at(num_nodes)
        return high + slope * (num_nodes - last) if known is None else known

    return ratio


# Time of verifying N nodes relative to plain decoding, by kind of machine.
CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda n: 1 + 0.01 * (n - 1),
    "gentle": lambda n: 1.1 + 0.03 * (n - 1),
    "linear": lambda n: 1 + 0.12 * (n - 1),
    "steep": lambda n: 1 + 0.5 * (n - 1),
    "tiles": lambda n: 1.15 if n <= 8 else 1.3 if n <= 16 else 1.9,
    "kernel steps": lambda n: 1.2 + 0.03 * n if n <= 8 else 2.4 if n < 16 else 1.5 + 0.02 * n,
    **{f"{one.bits} bits on {one.chip}": _published(one) for one in PUBLISHED},
}
# Log-odds of the best draft by position, of a text of two parts.
EASES: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "even": lambda rng, n: np.full(n, rng.uniform(-2.5, 3.0)),
    "never right": lambda rng, n: np.full(n, -6.0),
    "phases": lambda rng, n: np.repeat(rng.uniform(-3.0, 3.0, n), rng.integers(15, 60))[:n],
    "hard beginning": lambda rng, n: np.where(np.arange(n) % 60 < 25, -4.0, rng.uniform(0, 3)),
    "drift": lambda rng, n: np.linspace(rng.uniform(-3.0, 3.0), rng.uniform(-3.0, 3.0), n),
    "restless": lambda rng, n: np.repeat(rng.choice([-4.0, 2.5], n), 6)[:n],
}
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def make_scenario(seed: int) -> Scenario:
    """Make the scenario of a number: every kind of text, drafter and machine in turn."""
    rng = np.random.default_rng(seed)
    ease = list(EASES)[seed % len(EASES)]
    # All machines in turn, each round with other texts.
    curve = list(CURVES)[(seed + seed // len(CURVES)) % len(CURVES)]
    scale = SCALES[int(rng.integers(len(SCALES)))]
    plain = 10 ** rng.uniform(-2.7, -1.0)
    level = plain * 10 ** rng.uniform(-2.5, -0.7)
    wait = plain * 10 ** rng.uniform(-2.5, -0.4)
    widths = {1: 1.0, 2: 1.1, 4: 1.3}
    costs = StepCosts(
        plain=plain,
        verify={size: plain * CURVES[curve](size) for size in range(2, SIZES[-1] + 1)},
        first=dict.fromkeys(widths, 0.0),
        level={width: level * factor for width, factor in widths.items()},
        wait=wait,
    )
    return Scenario(
        name=f"{seed}: {ease}, {curve}, scores x {scale:g}, level {level / plain:.3f}, "
        f"wait {wait / plain:.3f}",
        ease=EASES[ease](rng, FIRST_TEXT + SECOND_TEXT + LEVELS + 1),
        score_scale=scale,
        fade=rng.uniform(0.0, 0.3),
        costs=costs,
        timed=_disturbed(costs, rng),
        seed=seed,
        hidden=plain * rng.uniform(0.0, 0.2),
    )


def _disturbed(costs: StepCosts, rng: np.random.Generator) -> StepCosts:
    """Costs as a machine with some other work would have timed them."""

    def timed(seconds: float) -> float:
        stall = 1.5 if rng.random() < QUIET.stall_share else 1.0
        return float(seconds * stall * np.exp(rng.normal(0.0, QUIET.jitter)))

    return StepCosts(
        plain=timed(costs.plain),
        verify={size: timed(costs.verify[size]) for size in SIZES},
        first=dict(costs.first),
        level={width: timed(seconds) for width, seconds in costs.level.items()},
        wait=timed(costs.wait),
    )
