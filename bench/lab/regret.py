"""Regret of the default on simulated texts: speed missed relative to the best fixed plan."""

from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from mlx_redrafter.bench.lab.scenarios import make_scenario
from mlx_redrafter.bench.lab.simulation import Outcome, play, play_first
from mlx_redrafter.bench.timing import OnProgress
from mlx_redrafter.policy.adaptive import AdaptivePolicy
from mlx_redrafter.policy.plans import StepCosts
from mlx_redrafter.policy.state import PolicyState

# Simulated time to update the estimates after one step, in seconds.
LEARNING_SECONDS = 0.25e-3


@dataclass(frozen=True)
class SimulatedRegret:
    """Outcomes of many scenarios.

    Attributes:
        median: Median regret, a share of the best fixed plan's speed.
        p95: Its 95th percentile.
        least_plain: Minimum speed relative to plain decoding in scenarios in which no fixed plan is
            faster than plain decoding; None without such scenarios.
        first_texts: Speed relative to the best fixed plan of the first text of a process that
            begins without estimates, and of one that begins with stored ones; one pair per
            scenario.
    """

    outcomes: list[Outcome]
    median: float
    p95: float
    worst: float
    least_plain: float | None
    first_texts: list[tuple[float, float]]


def simulate_regret(
    scenarios: int, first: int = 0, on_progress: OnProgress = lambda done, total: None
) -> SimulatedRegret:
    """Let the default decode the texts of simulated scenarios, from number ``first`` on."""
    outcomes, first_texts = [], []
    for done in range(scenarios):
        on_progress(done, scenarios)
        scenario = make_scenario(first + done)
        outcomes.append(play(scenario, begin_policy))
        first_texts.append(play_first(scenario, begin_policy, _store))
    on_progress(scenarios, scenarios)
    regrets = [outcome.regret for outcome in outcomes]
    plain = [outcome.speed for outcome in outcomes if outcome.best is None]
    return SimulatedRegret(
        outcomes,
        float(np.median(regrets)),
        float(np.quantile(regrets, 0.95)),
        max(regrets),
        min(plain, default=None),
        first_texts,
    )


def _store(policy: AdaptivePolicy) -> SimpleNamespace:
    """Return, in place of a policy, what its file gives to another process."""
    return SimpleNamespace(state=PolicyState.restored(policy.conclude().stored()))


def begin_policy(costs: StepCosts, before: Any) -> AdaptivePolicy:
    """Begin a sequence with the default policy; each time that it learns costs the host as much."""
    state = None if before is None else before.state
    return AdaptivePolicy(costs, state, count(0, LEARNING_SECONDS).__next__)
