"""Interleaved runs of several decoding methods on the same prompts, recorded in a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import Row, summarise
from mlx_redrafter.bench.runs import (
    AUTO,
    PLAIN,
    STOCK,
    Arm,
    CommonSettings,
    EncodedPrompt,
    Turn,
    drafted_arm,
    plain_arm,
    stock_arm,
    take_turn,
    warm_up,
)
from mlx_redrafter.bench.timing import OnProgress, timed
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.engine.profiling import time_steps
from mlx_redrafter.engine.stored_costs import contexts, step_costs
from mlx_redrafter.machines.leading import target_of
from mlx_redrafter.proposers.lookup import Lookup


def compared_arms(settings: CommonSettings, plans: Sequence[DraftPlan]) -> dict[str, Arm]:
    """Return stock mlx-lm, plain decoding, one method per fixed plan, and the default, by name."""
    return {
        STOCK: stock_arm(settings),
        PLAIN: plain_arm(settings),
        **{arm_name(plan): drafted_arm(settings, plan) for plan in plans},
        AUTO: drafted_arm(settings, None),
    }


def arm_name(plan: DraftPlan) -> str:
    """Name a plan for tables and result files, such as "top_n w4 l5 n9"."""
    nodes = "" if plan.shape.select == "beam" else f" n{plan.num_nodes}"
    return f"{plan.shape.select} w{plan.shape.width} l{plan.shape.length}{nodes}"


def reference_arm(settings: CommonSettings) -> str:
    """Name the method whose texts all others must equal.

    With sampling that is this package's plain decoding: stock mlx-lm draws other random numbers.
    """
    return STOCK if settings.temp == 0 else PLAIN


def make_turns(
    prompts: Sequence[EncodedPrompt], repeats: int, group: str = "", block: int = 0
) -> list[Turn]:
    """Make a turn for every prompt, then for every prompt again, ``repeats`` times."""
    return [Turn(group, block, prompt, repeat) for repeat in range(repeats) for prompt in prompts]


def decode_in_turns(
    arms: Mapping[str, Arm],
    turns: Sequence[Turn],
    recording: Recording,
    cool_down: float = 0.0,
    on_progress: OnProgress = lambda done, total: None,
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Decode every turn's prompt with every method.

    Turns that the recording already has are not repeated. ``prepare`` is called before the first
    turn, if any is missing.
    """
    missing = [turn for turn in turns if not recording.has(turn.key)]
    if missing:
        prepare()
        warm_up(arms, missing[0].prompt)
    for done, turn in enumerate(missing, start=len(turns) - len(missing)):
        on_progress(done, len(turns))
        recording.add(take_turn(arms, turn, cool_down))
    on_progress(len(turns), len(turns))


def part_of(on_progress: OnProgress, before: int, total: int) -> OnProgress:
    """Return the progress callback of a part, before which some of ``total`` units are done."""
    return lambda done, _: on_progress(before + done, total)


def compare(
    arms: Mapping[str, Arm],
    settings: CommonSettings,
    prompts: Sequence[EncodedPrompt],
    repeats: int,
    recording: Recording,
    cool_down: float = 0.0,
    on_progress: OnProgress = lambda done, total: None,
) -> tuple[list[Row], dict[str, list[Row]]]:
    """Decode every prompt with every method, ``repeats`` times, in interleaved runs.

    Return a row per method over all prompts, and the same by category if there are several.

    Turns that the recording already has are not repeated.
    """
    prepare = partial(time_shapes, settings, max(len(prompt.ids) for prompt in prompts), recording)
    decode_in_turns(arms, make_turns(prompts, repeats), recording, cool_down, on_progress, prepare)

    reference = reference_arm(settings)
    categories = dict.fromkeys(prompt.category for prompt in prompts)
    rows = summarise(recording.runs, reference)
    by_category = {
        category: summarise([run for run in recording.runs if run.category == category], reference)
        for category in (categories if len(categories) > 1 else ())
    }
    recording.finish(found={"rows": rows, "by_category": by_category})
    return rows, by_category


def time_shapes(settings: CommonSettings, longest: int, recording: Recording) -> None:
    """Time the steps that `auto` chooses from, and record the seconds of that.

    The library does this once per model and machine; no answer's time includes it. ``longest`` is
    the length of the longest prompt, in tokens.
    """
    target = target_of(settings.model)
    is_lookup = isinstance(settings.drafter, Lookup)
    network = None if is_lookup else settings.drafter
    seconds = sum(
        timed(partial(time_steps, target, network, context))
        for context in contexts(target, longest)
    )
    step_costs(target, network, longest)
    recording.result["calibration_seconds"] = seconds
