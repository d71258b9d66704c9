"""Simulated machines whose steps cost something else than was timed, and what a policy loses there.

    python -m mlx_redrafter.bench.lab simulate --hard machines --scenarios 30

prints, for each case, a policy's time as a multiple of plain decoding's: of first sequences of 250
tokens, and of later ones of 200.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np

from mlx_redrafter.bench.lab.regret import begin_policy
from mlx_redrafter.bench.lab.scenarios import FIRST_TEXT, SECOND_TEXT, Scenario, make_scenario
from mlx_redrafter.bench.lab.simulation import Begin, SimulatedText, run_fixed, run_policy
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.policy.plans import StepCosts

# Positions at which the cases with a jump cost five times as much.
JUMP = range(100, 150)
# Sequences per scenario.
SEEDS = 2


class Pass(NamedTuple):
    """A step of the policy on a hard machine.

    Attributes:
        usual: Its seconds if nothing is hard.
        verify: Part of those for verifying drafts.
        position: Position of the text.
        num_nodes: Number of nodes that it verifies.
        drafts: Whether it drafts.
        compiled: Pairs of a number of nodes and a position that the machine has met.
    """

    usual: float
    verify: float
    position: int
    num_nodes: int
    drafts: bool
    compiled: set[tuple[int, int]]


@dataclass(frozen=True)
class HardMachine(Scenario):
    """A scenario with another cost of steps, by a case of CASES; ``compiled`` is that of `Pass`."""

    case: str = ""
    compiled: set[tuple[int, int]] = field(default_factory=set)

    def seconds(
        self, position: int, shape: DraftShape | None, num_nodes: int, waits: bool
    ) -> float:
        usual = super().seconds(position, shape, num_nodes, waits)
        verify = self.costs.verify[num_nodes] if num_nodes > 1 else 0.0
        step = Pass(usual, verify, position, num_nodes, shape is not None, self.compiled)
        return usual + CASES[self.case](step)


def _compile(step: Pass) -> float:
    kernel = step.num_nodes, step.position
    is_new = step.num_nodes > 1 and kernel not in step.compiled
    step.compiled.add(kernel)
    return 0.05 * is_new


# Seconds that a step costs more than usual.
CASES: dict[str, Callable[[Pass], float]] = {
    "as timed": lambda step: 0.0,
    "a verify costs 9 times more than timed": lambda step: 9 * step.verify,
    "50 ms for each new size and length": _compile,
    "all steps cost 5 times as much for 50 tokens": lambda step: (
        4 * step.usual * (step.position in JUMP)
    ),
    "a verify costs 5 times as much for 50 tokens": lambda step: (
        4 * step.verify * (step.position in JUMP)
    ),
    "plain steps of 4 ms, decisions of 0.3 ms": lambda step: 0.3e-3 * step.drafts,
    "plain steps timed twice too long": lambda step: 0.0,
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
    def scaled(seconds: Mapping[int, float]) -> dict[int, float]:
        return {key: factor * value for key, value in seconds.items()}

    return StepCosts(
        plain=factor * costs.plain,
        verify=scaled(costs.verify),
        first=scaled(costs.first),
        level=scaled(costs.level),
        wait=factor * costs.wait,
    )


def times_by_plain(number: int, case: str, begin: Begin) -> list[tuple[float, float]]:
    """Play a scenario on the machine of a case, with policies that ``begin`` makes as in `play`.

    Return, per seed, the time of a first sequence of FIRST_TEXT + SECOND_TEXT tokens, and that of
    one of SECOND_TEXT tokens after one of FIRST_TEXT, as multiples of plain decoding's.
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
    """Print the mean, the 95th percentile and the maximum of some scenarios for each case."""
    for case in CASES:
        times = np.array([one for n in numbers for one in times_by_plain(n, case, begin_policy)])
        columns = [
            f"{column.mean():.3f} {np.quantile(column, 0.95):.3f} {column.max():.3f}"
            for column in times.T
        ]
        print(f"{case:<46} first {columns[0]}  later {columns[1]}", flush=True)
