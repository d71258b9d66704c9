"""A model of steps on an NVIDIA H200, and what decoding methods would gain there.

    python -m mlx_redrafter.bench.lab simulate --gpu

prints speeds relative to plain decoding. Parts of steps are timed ones, but the host's: its work is
that of this package on another machine, scaled by the number of operations. No method is measured.

A step that verifies drafts takes V + max(D, h): while the device drafts for D, the host needs h to
read the outcome before and to build the verify. If the host waits for the drafts, it takes V + D +
h. If the host dispatches the verify before it reads, it takes V + D.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import harmonic_mean
from typing import NamedTuple

import numpy as np
from rich.table import Table

from mlx_redrafter.bench.lab.regret import begin_policy
from mlx_redrafter.bench.lab.scenarios import LEVELS, Scenario
from mlx_redrafter.bench.lab.simulation import SimulatedText, run_fixed, run_policy
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.engine.profiling import DRAFT, PLAIN, READ, SEARCH, VERIFY
from mlx_redrafter.engine.stored_costs import by_parts
from mlx_redrafter.policy.step_costs import StepCosts

# Milliseconds of a plain step and of a verify, and a factor of the times of drafting, of a model of
# 6.7B float16 parameters, by the day of the timing in 2026.
MACHINES = {"26 November": (6.84, 9.6, 1.0), "27 November": (4.1, 6.8, 2.2)}
# Milliseconds of drafting without its levels and of each level, by width, on 26 November.
DRAFTING = {1: (0.32, 0.27), 4: (0.55, 0.42)}
# Milliseconds of the host to build the verify of 32 layers.
BUILD = 3.4
# Milliseconds of the host to read an outcome and to start the device.
READ_AND_START = 0.4
# Part of that build which a compiled pass takes.
COMPILED = 0.25
# Milliseconds of the first pass of a shape.
FIRST_USE = 55.0
# Log-odds of the best draft by temperature, with which a chain of 4 has about its measured tokens
# per step.
EASES = {0: 1.4, 1: 0.25}
# Texts in a row, as measured.
TEXTS = 3
# Tokens of each text, as measured.
TOKENS = 128
# Number of such rows.
ROWS = 6
# Fixed plans beside the default.
PLANS = {"chain of 4": DraftPlan.of(1, 5, 5), "tree of 16": DraftPlan.of(4, 5, 16)}


class Ways(NamedTuple):
    """Means that make a step shorter."""

    has_buckets: bool = False
    is_warm: bool = False
    is_compiled: bool = False
    is_ahead: bool = False


WAYS = {
    "a shape for every length": Ways(),
    "few shapes": Ways(True),
    "warm-up": Ways(True, True),
    "compiled passes": Ways(True, True, True),
    "verify dispatched ahead": Ways(True, True, True, True),
}


@dataclass(frozen=True)
class GpuText(Scenario):
    """A text on that machine; ``used`` holds the shapes that its steps have used."""

    ways: Ways = WAYS["few shapes"]
    used: set[tuple[int, int]] = field(default_factory=set)

    def seconds(
        self, position: int, shape: DraftShape | None, num_nodes: int, waits: bool
    ) -> float:
        drafting = 0.0 if shape is None else self.costs.drafting(shape)
        if num_nodes == 1:
            return self.costs.plain + drafting
        host = (BUILD * (COMPILED if self.ways.is_compiled else 1) + READ_AND_START) / 1e3
        together = drafting if self.ways.is_ahead else max(drafting, host)
        key = num_nodes, 0 if self.ways.has_buckets else position
        is_new = not self.ways.is_warm and key not in self.used
        self.used.add(key)
        seconds = self.costs.verify[num_nodes] + (drafting + host if waits else together)
        return seconds + is_new * FIRST_USE / 1e3


def make_text(machine: str, temp: int, ways: Ways, seed: int) -> GpuText:
    """Make the text of all methods; its steps are timed beforehand as this package times them."""
    plain, verify, slower = MACHINES[machine]
    costs = StepCosts(
        plain=plain / 1e3,
        verify=dict.fromkeys(range(2, 33), verify / 1e3),
        first={width: slower * first / 1e3 for width, (first, _) in DRAFTING.items()},
        level={width: slower * level / 1e3 for width, (_, level) in DRAFTING.items()},
    )
    ease = np.full(TEXTS * TOKENS + LEVELS + 1, EASES[temp])
    text = GpuText("", ease, 1.0, 0.0, costs, costs, seed=seed, ways=ways)
    warm = replace(text, ways=ways._replace(is_warm=True), used=set())
    timed = {PLAIN: costs.plain}
    for kind in (*VERIFY.values(), *SEARCH.values(), READ, DRAFT):
        assert kind.plan is not None
        num_nodes = kind.plan.num_nodes if kind.verifies else 1
        timed[kind] = warm.seconds(0, kind.plan.shape, num_nodes, kind.waits)
    return replace(text, timed=by_parts(timed, timed, None))


def find_speeds(machine: str, temp: int, ways: Ways) -> Iterator[tuple[float, float]]:
    """Yield each fixed plan's mean speed and its lowest of a text, then the default's."""
    for plan in (*PLANS.values(), None):
        speeds = []
        for seed in range(ROWS):
            text, policy = SimulatedText(make_text(machine, temp, ways, seed)), None
            for start in range(0, TEXTS * TOKENS, TOKENS):
                span = start, start + TOKENS
                if plan is None:
                    policy = begin_policy(text.scenario.timed, policy)
                    seconds = run_policy(text, policy, *span, seed=seed)
                else:
                    seconds = run_fixed(text, plan, *span)
                speeds.append(run_fixed(text, None, *span) / seconds)
        yield harmonic_mean(speeds), min(speeds)


def make_tables() -> Iterator[Table]:
    """Make a table of speeds for each machine and temperature."""
    for machine in MACHINES:
        for temp in EASES:
            table = Table("", *PLANS, "default", title=f"{machine}, temperature {temp}")
            for name, ways in WAYS.items():
                found = find_speeds(machine, temp, ways)
                table.add_row(name, *(f"{mean:.2f} ({least:.2f})" for mean, least in found))
            yield table
