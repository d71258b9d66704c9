"""Sweep over beam width and length, tree nodes, selection and temperature, like Apple's.

Stock mlx-lm is measured once per block of a few plans, interleaved with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import Row, summarise
from mlx_redrafter.bench.runs import (
    PLAIN,
    STOCK,
    Arm,
    CommonSettings,
    EncodedPrompt,
    TimedRun,
    drafted_arm,
    plain_arm,
    stock_arm,
)
from mlx_redrafter.bench.timing import OnProgress
from mlx_redrafter.bench.turns import (
    arm_name,
    decode_in_turns,
    make_turns,
    part_of,
    reference_arm,
)
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.draft_plan import DraftPlan, Selection
from mlx_redrafter.errors import ConfigError

# Maximum number of plans in a grid; each one costs minutes.
MAX_PLANS = 1000
# Plans that share one run of stock mlx-lm, few enough that the machine does not change meanwhile.
PLANS_PER_BLOCK = 4


@dataclass(frozen=True)
class Grid:
    """Values of every option swept.

    Attributes:
        widths: Beam widths.
        lengths: Beam lengths.
        nodes: Tree nodes with "top_n", None for the default; impossible numbers are left out.
        selections: Selections, "top_n" and "beam".
        temps: Temperatures.
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
        """All plans, without repetitions."""
        found: dict[DraftPlan, None] = {}
        for selection in self.selections:
            for width in self.widths:
                for length in self.lengths:
                    for nodes in self.nodes if selection == "top_n" else (None,):
                        most = DraftPlan.of(width, length, select=selection).shape.max_nodes
                        if nodes is None or nodes <= most:
                            found[DraftPlan.of(width, length, nodes, selection)] = None
        return list(found)


@dataclass(frozen=True)
class Point:
    """Results of one plan of a sweep.

    Attributes:
        dtype: Dtype of the weights.
        temp: Temperature.
        plan: Draft plan of every step.
        row: Results.
    """

    dtype: str
    temp: float
    plan: DraftPlan
    row: Row


@dataclass(frozen=True)
class Block:
    """Plans measured in runs that alternate with one another and with stock mlx-lm.

    Attributes:
        dtype: Dtype of the weights.
        settings: Settings, including the temperature.
        number: Number of the block of its dtype and temperature, from 0.
        plans: Plans of the block.
    """

    dtype: str
    settings: CommonSettings
    number: int
    plans: list[DraftPlan]

    @property
    def group(self) -> str:
        """Name of dtype and temperature."""
        return group_name(self.dtype, self.settings.temp)

    @property
    def arms(self) -> dict[str, Arm]:
        """Stock mlx-lm and the plans; in the first block also plain decoding by this package."""
        arms: dict[str, Arm] = {STOCK: stock_arm(self.settings)}
        if self.number == 0:
            arms[PLAIN] = plain_arm(self.settings)
        return arms | {arm_name(plan): drafted_arm(self.settings, plan) for plan in self.plans}


def sweep(
    settings: CommonSettings,
    grid: Grid,
    prompts: Sequence[EncodedPrompt],
    repeats: int,
    recording: Recording,
    cool_down: float = 0.0,
    max_repeated: float = 1.0,
    on_progress: OnProgress = lambda done, total: None,
) -> list[Point]:
    """Measure every plan of the grid.

    Args:
        settings: Model, drafter and limits.
        grid: The grid.
        prompts: The prompts.
        repeats: Rounds per prompt.
        recording: Record of the runs; turns that it already has are not repeated.
        cool_down: Seconds to rest before every run.
        max_repeated: See `summarise`.
        on_progress: Callback for the number of turns done and their total.
    """
    blocks = list(_blocks(settings, grid))
    total = len(blocks) * repeats * len(prompts)
    done = 0
    for block in blocks:
        turns = make_turns(prompts, repeats, block.group, block.number)
        part = part_of(on_progress, done, total)
        decode_in_turns(block.arms, turns, recording, cool_down, part)
        done += len(turns)
    points = [p for block in blocks for p in _points(block, recording.runs, max_repeated)]
    recording.finish(points=points, max_repeated=max_repeated)
    return points


def _points(block: Block, runs: Sequence[TimedRun], max_repeated: float) -> Iterator[Point]:
    """Yield the results of a block's plans."""
    group = [run for run in runs if run.group == block.group]
    reference = reference_arm(block.settings)
    rows = {row.arm: row for row in summarise(group, reference, max_repeated)}
    for plan in block.plans:
        yield Point(block.dtype, block.settings.temp, plan, rows[arm_name(plan)])


def group_name(dtype: str, temp: float) -> str:
    """Name dtype and temperature, for runs."""
    return f"{dtype} temp {temp:g}"


def _blocks(settings: CommonSettings, grid: Grid) -> Iterator[Block]:
    plans = grid.plans
    dtype = _dtype_name(settings.model)
    for temp in grid.temps:
        for number, start in enumerate(range(0, len(plans), PLANS_PER_BLOCK)):
            few = plans[start : start + PLANS_PER_BLOCK]
            yield Block(dtype, replace(settings, temp=temp), number, few)


def _dtype_name(model: nn.Module) -> str:
    """Name the floating-point dtype of a model, such as "float16"."""
    for tensor in named_parameters(model).values():
        if mx.issubdtype(tensor.dtype, mx.floating):
            return str(tensor.dtype).removeprefix("mlx.core.")
    raise ConfigError("the model has no floating-point weights")
