"""Sweep over beam width and length, tree nodes, selection and temperature, like Apple's.

Stock mlx-lm is measured once per block of a few plans, interleaved with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import Row, summarise
from mlx_redrafter.bench.runs import (
    PLAIN,
    STOCK,
    CommonSettings,
    EncodedPrompt,
    Turn,
    drafted_arm,
    plain_arm,
    stock_arm,
)
from mlx_redrafter.bench.timing import OnProgress
from mlx_redrafter.bench.turns import (
    Interleaving,
    Method,
    arm_name,
    decode_in_turns,
    one_by_one,
)
from mlx_redrafter.draft_plan import DraftPlan, Selection
from mlx_redrafter.errors import ConfigError

# Maximum number of plans in a grid; each one costs minutes.
MAX_PLANS = 1000
# Plans that share one run of stock mlx-lm, few enough that the machine does not change meanwhile.
PLANS_PER_BLOCK = 4


@dataclass(frozen=True)
class Grid:
    """Values of every option swept.

    Of ``nodes``, None is the default; numbers that no tree has are left out.
    """

    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    nodes: tuple[int | None, ...] = (None,)
    selections: tuple[Selection, ...] = ("top_n", "beam")
    temps: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        size = len(self.widths) * len(self.lengths) * len(self.nodes) * len(self.selections)
        if size > MAX_PLANS:
            raise ConfigError(
                f"expected a sweep of at most {MAX_PLANS} shapes, got {size}; give fewer widths, "
                "lengths or nodes"
            )
        if not self.plans:
            raise ConfigError(
                "no tree of these widths and lengths has so many nodes; give fewer nodes"
            )

    @property
    def plans(self) -> list[DraftPlan]:
        found: dict[DraftPlan, None] = {}
        for selection, width, length in product(self.selections, self.widths, self.lengths):
            most = DraftPlan.of(width, length, select=selection).shape.max_nodes
            for nodes in self.nodes if selection == "top_n" else (None,):
                if nodes is None or nodes <= most:
                    found[DraftPlan.of(width, length, nodes, selection)] = None
        return list(found)


@dataclass(frozen=True)
class Point:
    temp: float
    plan: DraftPlan
    row: Row


def sweep(
    settings: CommonSettings,
    grid: Grid,
    prompts: Sequence[EncodedPrompt],
    repeats: int,
    recording: Recording,
    cool_down: float = 0.0,
    on_progress: OnProgress = lambda done, total: None,
) -> list[Point]:
    """Measure every plan of the grid, ``repeats`` times per prompt; see `decode_in_turns`."""
    plans, parts = grid.plans, []
    rounds = [(prompt, repeat) for repeat in range(repeats) for prompt in prompts]
    for temp in grid.temps:
        for number, start in enumerate(range(0, len(plans), PLANS_PER_BLOCK)):
            make = partial(_methods, plans[start : start + PLANS_PER_BLOCK], number == 0)
            turns = [[Turn(f"temp {temp:g}", number, *one)] for one in rounds]
            parts.append(Interleaving(make, replace(settings, temp=temp), turns))
    decode_in_turns(parts, recording, cool_down, on_progress)
    points = []
    for temp in grid.temps:
        runs = [run for run in recording.runs if run.group == f"temp {temp:g}"]
        rows = {row.arm: row for row in summarise(runs, temp)}
        points += [Point(temp, plan, rows[arm_name(plan)]) for plan in plans]
    recording.finish(points=points)
    return points


def _methods(
    plans: Sequence[DraftPlan], has_plain: bool, settings: CommonSettings
) -> dict[str, Method]:
    arms = {STOCK: stock_arm(settings)}
    if has_plain:
        arms[PLAIN] = plain_arm(settings)
    arms |= {arm_name(plan): drafted_arm(settings, plan) for plan in plans}
    return {name: partial(one_by_one, name, arm) for name, arm in arms.items()}
