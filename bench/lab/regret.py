"""Regret of the default: speed missed relative to the best fixed plan, measured or simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from mlx_redrafter.bench.lab.arms import compared_arms, decode_in_turns, make_turns
from mlx_redrafter.bench.lab.scenarios import make_scenario
from mlx_redrafter.bench.lab.simulation import Outcome, play, play_first
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import Row, summarise
from mlx_redrafter.bench.runs import (
    AUTO,
    STOCK,
    CommonSettings,
    EncodedPrompt,
    TimedRun,
    repetition,
)
from mlx_redrafter.bench.timing import MedianEstimate, OnProgress, estimate
from mlx_redrafter.bench.turns import reference_arm, time_shapes
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.adaptive import AdaptivePolicy
from mlx_redrafter.policy.state import PolicyState
from mlx_redrafter.policy.step_costs import StepCosts

# Fixed plans to compare the default with, as well as plain decoding.
GRID = (
    *(DraftPlan.of(1, length, length) for length in (3, 4, 5, 6, 8)),
    *(DraftPlan.of(2, length, nodes) for length, nodes in ((4, 6), (5, 8), (6, 8), (8, 16))),
    *(DraftPlan.of(4, length, nodes) for length, nodes in ((5, 16), (8, 16))),
)
# Simulated time to update the estimates after one step, in seconds.
LEARNING_SECONDS = 0.25e-3


@dataclass(frozen=True)
class Regret:
    """The default and fixed plans on the same texts.

    Attributes:
        rows: One row per decoding method.
        best: Name of the fixed plan, or plain decoding, with the highest median speed.
        ratio: Speed of the default relative to the best, one ratio per prompt and repeat.
    """

    rows: list[Row]
    best: str
    ratio: MedianEstimate


def measure_regret(
    setting: CommonSettings,
    prompts: Sequence[EncodedPrompt],
    repeats: int,
    recording: Recording,
    cool_down: float = 0.0,
    max_repeated: float = 1.0,
    on_progress: OnProgress = lambda done, total: None,
) -> Regret:
    """Decode every prompt with the default, every fixed plan and plainly, in interleaved runs.

    Args:
        setting: Settings that all methods share.
        prompts: The prompts.
        repeats: Rounds per prompt.
        recording: Record of the runs; turns that it already has are not repeated.
        cool_down: Seconds to rest before every run.
        max_repeated: See `summarise`.
        on_progress: Callback for the number of turns done and their total.
    """
    prepare = partial(time_shapes, setting, max(len(prompt.ids) for prompt in prompts), recording)
    turns = make_turns(prompts, repeats)
    decode_in_turns(compared_arms(setting, GRID), turns, recording, cool_down, on_progress, prepare)
    found = find_regret(recording.runs, reference_arm(setting), max_repeated)
    recording.finish(found=found)
    return found


def find_regret(runs: Sequence[TimedRun], reference: str, max_repeated: float = 1.0) -> Regret:
    """Compute the regret of interleaved runs; see `summarise` for the arguments."""
    rows = summarise(runs, reference, max_repeated)
    speeds = {
        row.arm: row.speedup.median
        for row in rows
        if row.speedup is not None and row.arm not in (STOCK, AUTO)
    }
    best = max(speeds, key=speeds.__getitem__)
    seconds = {
        (one.turn, one.arm): one.seconds_per_token
        for one in runs
        if one.is_timed and repetition(one.tokens) <= max_repeated
    }
    ratios = [
        seconds[turn, best] / value
        for (turn, arm), value in seconds.items()
        if arm == AUTO and (turn, best) in seconds
    ]
    return Regret(rows, best, estimate(ratios))


@dataclass(frozen=True)
class SimulatedRegret:
    """Outcomes of many scenarios.

    Attributes:
        outcomes: One per scenario.
        median: Median regret, a share of the best fixed plan's speed.
        p95: Its 95th percentile.
        worst: Its maximum.
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
    scenarios: int,
    first: int = 0,
    is_shared: bool = False,
    on_progress: OnProgress = lambda done, total: None,
) -> SimulatedRegret:
    """Let the default decode the texts of simulated scenarios.

    Args:
        scenarios: Number of scenarios.
        first: Number of the first scenario, see `make_scenario`.
        is_shared: Whether other work disturbs the machines.
        on_progress: Callback for the number of scenarios done and their total.
    """
    outcomes, first_texts = [], []
    for done in range(scenarios):
        on_progress(done, scenarios)
        scenario = make_scenario(first + done, is_shared)
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
