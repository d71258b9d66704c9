"""Several ways of decoding the same prompts, in turns, on record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.runs import (
    AUTO,
    PLAIN,
    STOCK,
    Arm,
    EncodedPrompt,
    Setting,
    Turn,
    drafted_arm,
    plain_arm,
    stock_arm,
    take_turn,
    warm_up,
)
from mlx_redrafter.bench.timing import OnProgress
from mlx_redrafter.draft_plan import DraftPlan


def compared_arms(setting: Setting, plans: Sequence[DraftPlan]) -> dict[str, Arm]:
    """Stock mlx-lm, decoding without drafts, fixed plans, and the default."""
    return {
        STOCK: stock_arm(setting),
        PLAIN: plain_arm(setting),
        **{arm_name(plan): drafted_arm(setting, plan) for plan in plans},
        AUTO: drafted_arm(setting, None),
    }


def arm_name(plan: DraftPlan) -> str:
    """Name of a plan in tables."""
    nodes = "" if plan.shape.select == "beam" else f" n{plan.num_nodes}"
    return f"{plan.shape.select} w{plan.shape.width} l{plan.shape.length}{nodes}"


def reference_arm(setting: Setting) -> str:
    """The way whose texts all others must equal: the noise of stock mlx-lm is another."""
    return STOCK if setting.temp == 0 else PLAIN


def make_turns(
    prompts: Sequence[EncodedPrompt], repeats: int, group: str = "", block: int = 0
) -> list[Turn]:
    """Every prompt in turn, ``repeats`` times."""
    return [Turn(group, block, prompt, repeat) for repeat in range(repeats) for prompt in prompts]


def decode_in_turns(
    arms: Mapping[str, Arm],
    turns: Sequence[Turn],
    recording: Recording,
    cool_down: float = 0.0,
    on_progress: OnProgress = lambda done, total: None,
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Decode every turn's prompt in every way.

    Args:
        arms: Ways of decoding by name.
        turns: The turns.
        recording: Gets the runs; turns that it has are not repeated.
        cool_down: Seconds to rest before every run.
        on_progress: Callback for the turns done and their number.
        prepare: Called before the first turn, if any is missing.
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
    """The callback of a part of a benchmark, given what is done before it and in all."""
    return lambda done, _: on_progress(before + done, total)
