"""Drafters of any kind on one target and the same prompts, in interleaved runs.

Each drafts chains of one length, which every kind supports, and trees chosen by the default.

Axes: L beam length, root included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import mlx.nn as nn

from mlx_redrafter.bench.lab.arms import decode_in_turns, make_turns, part_of
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import Row, summarise
from mlx_redrafter.bench.runs import (
    PLAIN,
    STOCK,
    Arm,
    CommonSettings,
    EncodedPrompt,
    drafted_arm,
    plain_arm,
    stock_arm,
)
from mlx_redrafter.bench.timing import OnProgress
from mlx_redrafter.bench.turns import reference_arm, time_shapes
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.engine.stored_costs import step_costs
from mlx_redrafter.proposers.lookup import Lookup
from mlx_redrafter.target.target import Target

# Row name of a drafter's chains; the suffix keeps it apart from the reference, named alike or not.
CHAIN = "{}, chain"
# Row name of a drafter with the default.
DEFAULT = "{}, default"


@dataclass(frozen=True)
class Head:
    """A drafter to compare with others.

    Attributes:
        name: Its name in tables, unique among the drafters.
        drafter: The drafter, loaded for the target.
        trained_tokens: Maximum number of tokens that it was trained on; None if unknown.
        kind: Description that drafters share which differ only in seed and budget; empty if
            unknown.
    """

    name: str
    drafter: Proposer
    trained_tokens: int | None = None
    kind: str = ""


@dataclass(frozen=True)
class HeadCost:
    """Cost of drafting with a drafter.

    Attributes:
        name: Name of the drafter.
        trained_tokens: See `Head`.
        bytes: Bytes of its weights, without those of the target.
        plain: Seconds of a step of plain decoding.
        first: Seconds of a search for a chain, without its levels.
        level: Seconds of each level.
        verify: Seconds to verify the chain's nodes, root included.
        chain: Beam length of the chain, L.
        kind: See `Head`.
    """

    name: str
    trained_tokens: int | None
    bytes: int
    plain: float
    first: float
    level: float
    verify: float
    chain: int
    kind: str = ""

    @property
    def drafting(self) -> float:
        """Cost of drafting a chain, in plain steps."""
        return max(0.0, self.first + (self.chain - 1) * self.level) / self.plain


@dataclass(frozen=True)
class HeadRow:
    """A drafter at a temperature.

    Attributes:
        name: Name of the drafter.
        temp: The temperature.
        chain: Results with chains.
        default: Results with the default.
    """

    name: str
    temp: float
    chain: Row
    default: Row


@dataclass(frozen=True)
class Heads:
    """Results of a comparison of drafters: their costs, and rows by temperature and drafter."""

    costs: list[HeadCost]
    rows: list[HeadRow]


def compare_heads(
    setting: CommonSettings,
    heads: Sequence[Head],
    prompts: Sequence[EncodedPrompt],
    temps: Sequence[float],
    length: int,
    repeats: int,
    recording: Recording,
    cool_down: float = 0.0,
    max_repeated: float = 1.0,
    on_progress: OnProgress = lambda done, total: None,
) -> Heads:
    """Decode every prompt by stock mlx-lm, plainly, and with every drafter, in interleaved runs.

    Args:
        setting: Settings that all methods share, except the drafter and the temperature.
        heads: The drafters.
        prompts: The prompts.
        temps: Temperatures.
        length: Beam length of chains, L; a drafter that reaches less far drafts as far as it does.
        repeats: Rounds per prompt and temperature.
        recording: Record of the runs; turns that it already has are not repeated.
        cool_down: Seconds to rest before every run.
        max_repeated: See `summarise`.
        on_progress: Callback for the number of turns done and their total.

    Raises:
        CheckpointError: A drafter does not fit the target.
    """
    target = Target(setting.model)
    for head in heads:  # some were loaded with another copy of the target
        head.drafter.check_fit(target, setting.tokenizer)
    longest = max(len(prompt.ids) for prompt in prompts)
    plans = {head.name: _chain(head, length) for head in heads}
    per_temp = len(prompts) * repeats
    rows = []
    for number, temp in enumerate(temps):
        same = replace(setting, temp=temp)
        group = f"temperature {temp:g}"
        decode_in_turns(
            _arms(same, heads, plans),
            make_turns(prompts, repeats, group),
            recording,
            cool_down,
            part_of(on_progress, number * per_temp, len(temps) * per_temp),
            partial(_prepare, same, heads, longest, recording),
        )
        runs = [run for run in recording.runs if run.group == group]
        found = {row.arm: row for row in summarise(runs, reference_arm(same), max_repeated)}
        rows += [
            HeadRow(name, temp, found[CHAIN.format(name)], found[DEFAULT.format(name)])
            for name in plans
        ]
    costs = [_cost(setting, head, plans[head.name], longest) for head in heads]
    result = Heads(costs, rows)
    recording.finish(found=result, max_repeated=max_repeated)
    return result


def _chain(head: Head, length: int) -> DraftPlan:
    plan = DraftPlan.of(1, length, length)
    return plan.within(head.drafter.max_length)


def _arms(
    setting: CommonSettings, heads: Sequence[Head], plans: dict[str, DraftPlan]
) -> dict[str, Arm]:
    own = {head.name: replace(setting, drafter=head.drafter) for head in heads}
    drafted = (
        (
            (CHAIN.format(name), drafted_arm(mine, plans[name])),
            (DEFAULT.format(name), drafted_arm(mine, None)),
        )
        for name, mine in own.items()
    )
    reference = {STOCK: stock_arm(setting), PLAIN: plain_arm(setting)}
    return reference | dict(chain.from_iterable(drafted))


def _prepare(
    setting: CommonSettings, heads: Sequence[Head], longest: int, recording: Recording
) -> None:
    for head in heads:
        time_shapes(replace(setting, drafter=head.drafter), longest, recording)


def _cost(setting: CommonSettings, head: Head, plan: DraftPlan, longest: int) -> HeadCost:
    proposer = head.drafter
    network = None if isinstance(head.drafter, Lookup) else proposer
    costs = step_costs(Target(setting.model), network, longest)
    return HeadCost(
        name=head.name,
        trained_tokens=head.trained_tokens,
        bytes=sum(_size(module) for module in proposer.networks),
        plain=costs.plain,
        first=costs.first.get(1, 0.0),
        level=costs.level.get(1, 0.0),
        verify=costs.verify[min(size for size in costs.verify if size >= plan.num_nodes)],
        chain=plan.shape.length,
        kind=head.kind,
    )


def _size(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in named_parameters(module).values())
