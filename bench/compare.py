"""Comparison of ways of decoding, on the same prompts, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import mlx.nn as nn

from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import Row, summarise
from mlx_redrafter.bench.runs import (
    AUTO,
    STOCK_DRAFT,
    UNCOUPLED,
    EncodedPrompt,
    Setting,
    drafted_arm,
    stock_arm,
)
from mlx_redrafter.bench.timing import OnProgress, timed
from mlx_redrafter.bench.turns import (
    arm_name,
    compared_arms,
    decode_in_turns,
    make_turns,
    reference_arm,
)
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.profiling import contexts, step_costs, time_steps
from mlx_redrafter.proposers.lookup import Lookup
from mlx_redrafter.proposers.speculate_ahead import Hits, SpeculateAhead
from mlx_redrafter.target.target import Target

# A way of decoding whose drafts are made ahead.
PREDRAFTED = "{}, predrafted"


@dataclass(frozen=True)
class Comparison:
    """Results of a comparison.

    Attributes:
        rows: One row per way of decoding, over all prompts.
        by_category: The same over the prompts of each category; empty if there is only one.
        hits: Counts of drafts made ahead, warming up included, by way of decoding; turns on record
            from an earlier run are not among them.
    """

    rows: list[Row]
    by_category: dict[str, list[Row]]
    hits: dict[str, Hits]


def compare(
    setting: Setting,
    plans: Sequence[DraftPlan],
    prompts: Sequence[EncodedPrompt],
    repeats: int,
    recording: Recording,
    draft_model: nn.Module | None = None,
    num_draft_tokens: int = 3,
    cool_down: float = 0.0,
    max_repeated: float = 1.0,
    on_progress: OnProgress = lambda done, total: None,
    predraft: int = 0,
) -> Comparison:
    """Decode every prompt in every way, ``repeats`` times, in turns.

    Args:
        setting: Settings that all ways share.
        plans: Fixed plans to compare.
        prompts: The prompts.
        repeats: Rounds per prompt.
        recording: Record of the runs; turns that it has are not repeated.
        draft_model: Draft model of mlx-lm's own speculative decoding, None to leave that out.
        num_draft_tokens: Drafts of that model per step.
        cool_down: Seconds to rest before every run.
        max_repeated: See `summarise`.
        on_progress: Callback for the turns done and their number.
        predraft: Outcomes that drafts are made ahead for, in further ways with the same plans; 0
            leaves these out.
    """
    arms = compared_arms(setting, plans)
    if draft_model is not None:
        arms[STOCK_DRAFT] = stock_arm(setting, draft_model, num_draft_tokens)
    if setting.temp:
        arms[UNCOUPLED] = drafted_arm(replace(setting, couple=False), None)
    hits: dict[str, Hits] = {}
    for plan in (*plans, None) if predraft else ():
        name = PREDRAFTED.format(AUTO if plan is None else arm_name(plan))
        assert not isinstance(setting.drafter, SpeculateAhead)
        ahead = SpeculateAhead(setting.drafter, predraft)
        arms[name], hits[name] = drafted_arm(replace(setting, drafter=ahead), plan), ahead.hits
    prepare = partial(time_shapes, setting, max(len(prompt.ids) for prompt in prompts), recording)
    decode_in_turns(arms, make_turns(prompts, repeats), recording, cool_down, on_progress, prepare)

    reference = reference_arm(setting)
    categories = dict.fromkeys(prompt.category for prompt in prompts)
    found = Comparison(
        summarise(recording.runs, reference, max_repeated),
        {
            category: summarise(
                [run for run in recording.runs if run.category == category], reference, max_repeated
            )
            for category in (categories if len(categories) > 1 else ())
        },
        hits,
    )
    recording.finish(found=found, max_repeated=max_repeated)
    return found


def time_shapes(setting: Setting, longest: int, recording: Recording) -> None:
    """Record the time of timing the plans of `auto`, for prompts of up to ``longest`` tokens.

    Plans are timed once per model and machine; the time is not part of any answer's.
    """
    target = Target(setting.model)
    network = None if isinstance(setting.drafter, Lookup) else setting.drafter
    seconds = sum(
        timed(partial(time_steps, target, network, context))
        for context in contexts(target, longest)
    )
    step_costs(target, network, longest)
    recording.result["calibration_seconds"] = seconds
