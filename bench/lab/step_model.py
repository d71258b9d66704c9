"""A model of steps on an NVIDIA H200, and what decoding methods would gain there.

    python -m mlx_redrafter.bench.lab simulate --gpu

prints speeds relative to plain decoding. Parts of steps are timed ones, but the host's: its work is
that of this package on another machine, scaled by the number of operations. No method is measured.

A step that verifies drafts takes V + max(D, h): while the device drafts for D, the host needs h to
read the outcome before and to build the verify. If the host waits for the drafts, it takes V + D +
h. If the host dispatches the verify before it reads, it takes V + D.

Apple's code (apple/ml-recurrent-drafter bd8586b, recurrent_drafting/mlx) builds a whole step before
it starts the device, V + D + h, and its attention has another number of K/V entries in each step.
It verifies whole beams, of which one is accepted. That it drafts as fast is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import harmonic_mean
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from mlx_redrafter.bench.lab.regret import begin_policy
from mlx_redrafter.bench.lab.scenarios import LEVELS, Scenario
from mlx_redrafter.bench.lab.simulation import FIXED, SimulatedText, run_fixed, run_policy
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
# Apple's host work relative to that build: its slices, gathers and writes of accepted K/V entries.
APPLES_BUILD = 1.3
# Milliseconds that 13.4 GB of weights in 4 bits, with scales 4.5, are read earlier at 4.8 TB/s.
SAVED_IN_4_BITS = 2.0
# Log-odds of the best draft by temperature, with which a chain of 4 has about its measured tokens
# per step.
EASES = {0: 1.4, 1: 0.25}
# Texts in a row, as measured.
TEXTS = 3
# Tokens of each text, as measured.
TOKENS = 128
# Number of such rows.
ROWS = 6
# Fixed plans beside the default; Apple's code has their beams.
PLANS = {"chain of 4": DraftPlan.of(1, 5, 5), "tree of 16": DraftPlan.of(4, 5, 16)}
# Fixed plans of which the best one is known afterwards; None for plain decoding.
KNOWN = (None, *(plan for plan in FIXED if plan.shape.width in DRAFTING))

# Computes the seconds of a text from one position to another.
Run = Callable[[SimulatedText, int, int], float]


class Ways(NamedTuple):
    """Means that make a step shorter."""

    has_buckets: bool = False
    is_warm: bool = False
    is_compiled: bool = False
    is_ahead: bool = False
    has_4_bits: bool = False


WAYS = {
    "a shape for every length": Ways(),
    "few shapes": Ways(True),
    "warm-up": Ways(True, True),
    "compiled passes": Ways(True, True, True),
    "verify dispatched ahead": Ways(True, True, True, True),
    "all that in 4 bits": Ways(True, True, True, True, True),
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
    saved = SAVED_IN_4_BITS if ways.has_4_bits else 0.0
    costs = StepCosts(
        plain=(plain - saved) / 1e3,
        verify=dict.fromkeys(range(2, 33), (verify - saved) / 1e3),
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


def find_speeds(
    machine: str, temp: int, ways: Ways, runs: Sequence[Run]
) -> list[tuple[float, float]]:
    """Compute each method's mean speed relative to plain decoding, and its lowest of a text."""
    speeds: list[list[float]] = [[] for _ in runs]
    for seed in range(ROWS):
        text = SimulatedText(make_text(machine, temp, ways, seed))
        for run, found in zip(runs, speeds, strict=True):
            text.scenario.used.clear()  # type: ignore[attr-defined]
            for start in range(0, TEXTS * TOKENS, TOKENS):
                span = start, start + TOKENS
                found.append(run_fixed(text, None, *span) / run(text, *span))
    return [(harmonic_mean(found), min(found)) for found in speeds]


def fixed(plan: DraftPlan | None) -> Run:
    """Decode by a fixed plan, or plainly."""
    return lambda text, start, stop: run_fixed(text, plan, start, stop)


def default() -> Run:
    """Decode by the default, which learns from the texts before in a row."""
    policy: Any = None

    def run(text: SimulatedText, start: int, stop: int) -> float:
        nonlocal policy
        policy = begin_policy(text.scenario.timed, policy if start else None)
        return run_policy(text, policy, start, stop, seed=text.scenario.seed)

    return run


def apples(plan: DraftPlan, has_graphs: bool) -> Run:
    """Decode as Apple's code does with the beams of a plan.

    Args:
        plan: The plan.
        has_graphs: Whether MLX builds a graph for each number of K/V entries.
    """
    shape = plan.shape

    def num_accepted(text: SimulatedText, position: int) -> int:
        drafts = text.drafts(position, shape.width)
        ends = [i for i, depth in enumerate(drafts.depths, 1) if depth == shape.levels]
        nodes = set()
        for node in ends[: shape.width]:
            while node:
                nodes.add(node)
                node = drafts.parents[node - 1]
        return sum(drafts.tokens[node - 1] > 0 for node in nodes)

    def run(text: SimulatedText, start: int, stop: int) -> float:
        costs, position, steps = text.scenario.costs, start, 0
        while position < stop:
            position += 1 + num_accepted(text, position)
            steps += 1
        host = BUILD * APPLES_BUILD + READ_AND_START + has_graphs * FIRST_USE
        step = costs.verify[plan.num_nodes] + costs.drafting(shape) + host / 1e3
        return text.scenario.noise.mean * step * steps * (stop - start) / (position - start)

    return run


def make_tables() -> Iterator[Table]:
    """Make a table of speeds for each machine and temperature."""
    for machine in MACHINES:
        for temp in EASES:
            table = Table("", *PLANS, "default", "best", title=f"{machine}, temperature {temp}")
            for name, ways in WAYS.items():
                runs = [*map(fixed, PLANS.values()), default(), *map(fixed, KNOWN)]
                chain, tree, own, *others = find_speeds(machine, temp, ways, runs)
                table.add_row(name, *map(as_text, (chain, tree, own, max(others))))
            for has_graphs in (True, False):
                runs = [apples(plan, has_graphs) for plan in PLANS.values()]
                name = "Apple's code" if has_graphs else "Apple's code without graphs"
                table.add_row(name, *map(as_text, find_speeds(machine, temp, Ways(), runs)))
            yield table


def as_text(found: tuple[float, float]) -> str:
    """Return a mean speed and a lowest one as text."""
    return "{:.2f} ({:.2f})".format(*found)
