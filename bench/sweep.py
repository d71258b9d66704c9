"""Sweep over beam width and length, tree nodes, selection, dtype and temperature, like Apple's.

Stock mlx-lm is measured once per block of a few plans, in turns with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import Row, summarise
from mlx_redrafter.bench.result_file import write_csv
from mlx_redrafter.bench.runs import (
    PLAIN,
    STOCK,
    Arm,
    EncodedPrompt,
    Run,
    Setting,
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
from mlx_redrafter.draft_plan import DraftPlan, Selection
from mlx_redrafter.errors import ConfigError

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# Apple's columns in Apple's order, then those of options that Apple did not vary.
DRAFTED_COLUMNS = (
    "run",
    "beam_width",
    "beam_length",
    "dtype",
    "nmax_length",
    "greedy",
    "steps",
    "prompt_length",
    "prompt_and_generated_length",
    "comprehension_and_generation_time",
    "select",
    "tree_nodes",
    "temp",
    "prompt",
    "generation_time",
)
PLAIN_COLUMNS = (
    "run",
    "dtype",
    "comprehension_mlx",
    "generation_mlx",
    "comprehension_ours",
    "generation_ours",
    "temp",
    "prompt",
    "block",
)


@dataclass(frozen=True)
class Grid:
    """Values of every option swept.

    Attributes:
        widths: Beam widths.
        lengths: Beam lengths.
        nodes: Tree nodes with "top_n", None for the default; impossible ones are left out.
        selections: Selections, "top_n" and "beam".
        dtypes: Names of dtypes, None for the checkpoint's own.
        temps: Temperatures.
    """

    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    nodes: tuple[int | None, ...] = (None,)
    selections: tuple[Selection, ...] = ("top_n", "beam")
    dtypes: tuple[str | None, ...] = (None,)
    temps: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        for name in self.dtypes:
            if name is not None and name not in DTYPES:
                raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
        if not self.plans:
            raise ConfigError("no tree has as many nodes as asked for; give fewer nodes")

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
        plan: Plan of every step.
        row: Results.
    """

    dtype: str
    temp: float
    plan: DraftPlan
    row: Row


@dataclass(frozen=True)
class Block:
    """Plans that are measured in turns with one another and with stock mlx-lm.

    Attributes:
        dtype: Dtype of the weights.
        setting: Settings, the temperature among them.
        number: Number of the block of its dtype and temperature, from 0.
        plans: Plans of the block.
    """

    dtype: str
    setting: Setting
    number: int
    plans: list[DraftPlan]

    @property
    def group(self) -> str:
        """Name of dtype and temperature."""
        return group_name(self.dtype, self.setting.temp)

    @property
    def arms(self) -> dict[str, Arm]:
        """Stock mlx-lm and the plans; in the first block also plain decoding by this package."""
        arms: dict[str, Arm] = {STOCK: stock_arm(self.setting)}
        if self.number == 0:
            arms[PLAIN] = plain_arm(self.setting)
        return arms | {arm_name(plan): drafted_arm(self.setting, plan) for plan in self.plans}


def sweep(
    setting: Setting,
    grid: Grid,
    prompts: Sequence[EncodedPrompt],
    repeats: int,
    recording: Recording,
    shapes_per_block: int = 4,
    cool_down: float = 0.0,
    max_repeated: float = 1.0,
    on_progress: OnProgress = lambda done, total: None,
) -> list[Point]:
    """Measure every plan of the grid.

    Args:
        setting: Model, drafter and limits; the models are cast to each dtype in turn, in place.
        grid: The grid.
        prompts: The prompts.
        repeats: Rounds per prompt.
        recording: Record of the runs; turns that it has are not repeated.
        shapes_per_block: Plans per run of stock mlx-lm.
        cool_down: Seconds to rest before every run.
        max_repeated: See `summarise`.
        on_progress: Callback for the turns done and their number.
    """
    blocks = list(_blocks(setting, grid, shapes_per_block))
    total = len(blocks) * repeats * len(prompts)
    casts = [_Cast(one) for one in (setting.model, *setting.drafter.networks)]
    done = 0
    for block in blocks:
        turns = make_turns(prompts, repeats, block.group, block.number)
        decode_in_turns(
            block.arms, turns, recording, cool_down,
            part_of(on_progress, done, total), partial(_cast_all, casts, block.dtype),
        )  # fmt: skip
        done += len(turns)
    points = [p for block in blocks for p in _points(block, recording.runs, max_repeated)]
    recording.finish(points=points, max_repeated=max_repeated)
    return points


def _cast_all(casts: Sequence[_Cast], dtype: str) -> None:
    for one in casts:
        one.to(dtype)


def _points(block: Block, runs: Sequence[Run], max_repeated: float) -> Iterator[Point]:
    """Results of the plans of a block."""
    group = [run for run in runs if run.group == block.group]
    reference = reference_arm(block.setting)
    rows = {row.arm: row for row in summarise(group, reference, max_repeated)}
    for plan in block.plans:
        yield Point(block.dtype, block.setting.temp, plan, rows[arm_name(plan)])


def write_tables(
    folder: Path, runs: Sequence[Run], points: Sequence[Point], max_tokens: int
) -> None:
    """Write ``recurrent_drafting.csv`` and ``autoregression.csv`` as Apple did, times in ms."""
    settings = {
        (group_name(point.dtype, point.temp), arm_name(point.plan)): point for point in points
    }
    drafted = []
    plain = []
    ours = {run.turn: run for run in runs if run.arm == PLAIN}
    for run in runs:
        if (run.group, run.arm) in settings:
            point = settings[run.group, run.arm]
            drafted.append(_drafted_row(run, point, max_tokens))
        elif run.arm == STOCK:
            plain.append(_plain_row(run, ours.get(run.turn)))
    write_csv(folder / "recurrent_drafting.csv", DRAFTED_COLUMNS, drafted)
    write_csv(folder / "autoregression.csv", PLAIN_COLUMNS, plain)


def group_name(dtype: str, temp: float) -> str:
    """Name of dtype and temperature in runs."""
    return f"{dtype} temp {temp:g}"


class _Cast:
    """Casts of a module's floating-point weights, each from the original ones."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.original = dict(module.parameters())
        self.dtype = _dtype_name(module)

    def to(self, dtype: str) -> None:
        """Cast to a dtype, by name; a quantised module keeps its own."""
        if dtype == self.dtype:
            return
        if any("scales" in part for part in self.module.modules()):
            raise ConfigError("a quantised model cannot be cast; sweep it without --dtypes")
        self.module.update(self.original)
        self.module.set_dtype(DTYPES[dtype])
        mx.eval(self.module.parameters())
        self.dtype = dtype


def _blocks(setting: Setting, grid: Grid, size: int) -> Iterator[Block]:
    plans = grid.plans
    own = _dtype_name(setting.model)
    for dtype in grid.dtypes:
        for temp in grid.temps:
            for number, start in enumerate(range(0, len(plans), size)):
                few = plans[start : start + size]
                yield Block(dtype or own, replace(setting, temp=temp), number, few)


def _dtype_name(module: nn.Module) -> str:
    names = {value: name for name, value in DTYPES.items()}
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters()))
    for _, tensor in parameters:
        if tensor.dtype in names:
            return names[tensor.dtype]
    raise ConfigError("the model has no floating-point weights")


def _drafted_row(run: Run, point: Point, max_tokens: int) -> tuple[Any, ...]:
    plan = point.plan
    return (
        run.repeat,
        plan.shape.width,
        plan.shape.length,
        f"mlx.core.{point.dtype}",
        max_tokens,
        point.temp == 0,
        run.steps,
        run.prompt_tokens,
        run.prompt_tokens + len(run.tokens),
        1e3 * (run.prompt_seconds + run.decode_seconds),
        plan.shape.select,
        plan.options["tree_nodes"] or "",
        point.temp,
        run.prompt,
        1e3 * run.decode_seconds,
    )


def _plain_row(stock: Run, ours: Run | None) -> tuple[Any, ...]:
    dtype, _, temp = stock.group.partition(" temp ")
    return (
        stock.repeat,
        f"mlx.core.{dtype}",
        1e3 * stock.prompt_seconds,
        1e3 * stock.decode_seconds,
        "" if ours is None else 1e3 * ours.prompt_seconds,
        "" if ours is None else 1e3 * ours.decode_seconds,
        temp,
        stock.prompt,
        stock.block,
    )
