"""Simulated machines whose steps cost something else than was timed, and what a policy loses there.

    python -m mlx_redrafter.bench.lab simulate --hard machines --scenarios 30

prints, for each case, a policy's time as a multiple of plain decoding's: of first sequences of 250
tokens, and of later ones of 200.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from mlx_redrafter.bench.lab.regret import begin_policy
from mlx_redrafter.bench.lab.scenarios import FIRST_TEXT, SECOND_TEXT, Scenario, make_scenario
from mlx_redrafter.bench.lab.simulation import Begin, SimulatedText, run_fixed, run_policy
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.policy.step_costs import StepCosts

# Positions at which the cases with a jump cost five times as much.
JUMP = range(100, 150)
# Sequences per scenario.
SEEDS = 2


@dataclass(frozen=True)
class HardMachine(Scenario):
    """A scenario with another cost of steps.

    Attributes:
        case: Name of the case, a key of CASES.
        compiled: Pairs of a number of nodes and a position that have been met.
    """

    case: str = ""
    compiled: set[tuple[int, int]] = field(default_factory=set)

    def seconds(
        self, position: int, shape: DraftShape | None, num_nodes: int, waits: bool
    ) -> float:
        usual = super().seconds(position, shape, num_nodes, waits)
        return CASES[self.case](self, usual, position, shape, num_nodes)


Cost = Callable[[HardMachine, float, int, DraftShape | None, int], float]


def _verify(machine: HardMachine, num_nodes: int) -> float:
    """Cost of the verify of a step; 0 if it verifies nothing."""
    return machine.costs.verify[num_nodes] if num_nodes > 1 else 0.0


def _nine_times(
    machine: HardMachine, usual: float, position: int, shape: DraftShape | None, num_nodes: int
) -> float:
    return usual + 9 * _verify(machine, num_nodes)


def _new_kernels(
    machine: HardMachine, usual: float, position: int, shape: DraftShape | None, num_nodes: int
) -> float:
    if num_nodes == 1 or (num_nodes, position) in machine.compiled:
        return usual
    machine.compiled.add((num_nodes, position))
    return usual + 0.05


def _all_jump(
    machine: HardMachine, usual: float, position: int, shape: DraftShape | None, num_nodes: int
) -> float:
    return 5 * usual if position in JUMP else usual


def _verify_jumps(
    machine: HardMachine, usual: float, position: int, shape: DraftShape | None, num_nodes: int
) -> float:
    return usual + 4 * _verify(machine, num_nodes) * (position in JUMP)


def _deciding(
    machine: HardMachine, usual: float, position: int, shape: DraftShape | None, num_nodes: int
) -> float:
    return usual + (0.0 if shape is None else 0.3e-3)


def _as_usual(
    machine: HardMachine, usual: float, position: int, shape: DraftShape | None, num_nodes: int
) -> float:
    return usual


CASES: dict[str, Cost] = {
    "as timed": _as_usual,
    "a verify costs 9 times more than timed": _nine_times,
    "50 ms for each new size and length": _new_kernels,
    "all steps cost 5 times as much for 50 tokens": _all_jump,
    "a verify costs 5 times as much for 50 tokens": _verify_jumps,
    "plain steps of 4 ms, decisions of 0.3 ms": _deciding,
    "plain steps timed twice too long": _as_usual,
}


def make_hard_machine(number: int, case: str) -> HardMachine:
    """Return a scenario of `make_scenario` on the machine of a case."""
    scenario = make_scenario(number)
    if case == "plain steps of 4 ms, decisions of 0.3 ms":
        factor = 0.004 / scenario.costs.plain
        costs, timed = (_scaled(one, factor) for one in (scenario.costs, scenario.timed))
        scenario = replace(scenario, costs=costs, timed=timed)
    if case == "plain steps timed twice too long":
        timed = replace(scenario.timed, plain=2 * scenario.timed.plain)
        scenario = replace(scenario, timed=timed)
    known = {one.name: getattr(scenario, one.name) for one in fields(Scenario)}
    return HardMachine(**known, case=case)


def _scaled(costs: StepCosts, factor: float) -> StepCosts:
    def scaled(seconds: dict[int, float]) -> dict[int, float]:
        return {key: factor * value for key, value in seconds.items()}

    return StepCosts(
        plain=factor * costs.plain,
        verify=scaled(dict(costs.verify)),
        first=scaled(dict(costs.first)),
        level=scaled(dict(costs.level)),
        wait=factor * costs.wait,
    )


def times_by_plain(number: int, case: str, begin: Begin) -> list[tuple[float, float]]:
    """Play a scenario on the machine of a case.

    Args:
        number: Number of the scenario.
        case: A key of CASES.
        begin: Function that makes the policy of a sequence, as in `play`.

    Returns:
        Per seed, the time of a first sequence of FIRST_TEXT + SECOND_TEXT tokens, and that of one
        of SECOND_TEXT tokens after one of FIRST_TEXT, as multiples of plain decoding's.
    """
    stop, found = FIRST_TEXT + SECOND_TEXT, []
    for seed in range(SEEDS):
        # Each sequence meets all kernels for the first time.
        texts = [
            SimulatedText(replace(make_hard_machine(number, case), seed=3 * number + seed))
            for _ in range(2)
        ]
        alone = run_policy(texts[0], begin(texts[0].scenario.timed, None), 0, stop)
        first = begin(texts[1].scenario.timed, None)
        run_policy(texts[1], first, 0, FIRST_TEXT)
        later = begin(texts[1].scenario.timed, first)
        after = run_policy(texts[1], later, FIRST_TEXT, stop, seed=1)
        plain = [run_fixed(texts[0], None, start, stop) for start in (0, FIRST_TEXT)]
        found.append((alone / plain[0], after / plain[1]))
    return found


def report(numbers: Sequence[int]) -> None:
    """Print the mean, the 95th percentile and the maximum for each case.

    Args:
        numbers: Numbers of the scenarios.
    """
    for case in CASES:
        times = np.array([one for n in numbers for one in times_by_plain(n, case, begin_policy)])
        columns = [
            f"{column.mean():.3f} {np.quantile(column, 0.95):.3f} {column.max():.3f}"
            for column in times.T
        ]
        sys.stdout.write(f"{case:<46} first {columns[0]}  later {columns[1]}\n")
        sys.stdout.flush()
