"""Simulated drafters whose scores of siblings mislead.

    python -m mlx_redrafter.bench.lab simulate --hard siblings --scenarios 60

prints, for each case, the median, 95th percentile and maximum of the default's regret, and its
least speed if nothing pays.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from mlx_redrafter.bench.lab.regret import begin_policy
from mlx_redrafter.bench.lab.scenarios import Scenario, make_scenario
from mlx_redrafter.bench.lab.simulation import SimulatedText, play

# Children of a node, as many as a search of four beams scores.
CHILDREN = 16

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# From the index of the right child of each level, and random numbers, to the index used instead.
Move = Callable[[Ints, np.random.Generator], Ints]


def _only_first(right: Ints, rng: np.random.Generator) -> Ints:
    return np.where(right == 0, 0, CHILDREN)


def _any_later(right: Ints, rng: np.random.Generator) -> Ints:
    anywhere = rng.integers(1, CHILDREN, len(right))
    later = np.where(rng.random(len(right)) < 0.2, anywhere, CHILDREN)
    return np.where(right == 0, 0, later)


def _shuffled(right: Ints, rng: np.random.Generator) -> Ints:
    order = np.concatenate([[0], rng.permutation(np.arange(1, CHILDREN)), [CHILDREN]])
    return order[right]


def _reversed(right: Ints, rng: np.random.Generator) -> Ints:
    is_later = (right > 0) & (right < CHILDREN)
    return np.where(is_later, CHILDREN - right, right)


# The change to the right child, and whether all scores are near log-odds of 14 and -14.
CASES: dict[str, tuple[Move, bool]] = {
    "siblings never right": (_only_first, False),
    "scores right for the first child only": (_shuffled, False),
    "ranks reversed": (_reversed, False),
    "log-odds at their bound": (_only_first, True),
    "log-odds at their bound, a sibling right now and then": (_any_later, True),
}


class MisleadingText(SimulatedText):
    """A text whose right children are others than the scores say, by a case of CASES."""

    children = CHILDREN

    def __init__(self, scenario: Scenario, case: str):
        super().__init__(scenario)
        self._move, self._at_bound = CASES[case]

    def _draw_levels(self, position: int) -> tuple[Floats, Ints, Floats]:
        on, right, off = super()._draw_levels(position)
        rng = np.random.default_rng((self.scenario.seed, position, 7))
        right = self._move(right, rng)
        if self._at_bound:
            on, off = (_at_bound(len(scores), rng) for scores in (on, off))
        return on, right, off


def _at_bound(levels: int, rng: np.random.Generator) -> Floats:
    first = np.full((levels, 1), -1e-6)
    later = -np.sort(rng.uniform(13, 15, (levels, CHILDREN - 1)), axis=1)
    return np.concatenate([first, later], axis=1)


def report(numbers: Sequence[int]) -> None:
    """Play some scenarios in every case."""
    for case in CASES:
        make_text = partial(MisleadingText, case=case)
        found = [play(make_scenario(n), begin_policy, make_text) for n in numbers]
        regret = [one.regret for one in found]
        plain = [one.speed for one in found if one.best is None]
        print(
            f"{case:<54} median {np.median(regret):.1%} p95 {np.quantile(regret, 0.95):.1%} "
            f"worst {max(regret):.1%} least plain {min(plain, default=1.0):.3f}",
            flush=True,
        )
