"""Interleaved runs of methods that decode one text each; `turns` has those of batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import islice

from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.runs import (
    AUTO,
    PLAIN,
    STOCK,
    Arm,
    CommonSettings,
    EncodedPrompt,
    TimedRun,
    Turn,
    drafted_arm,
    plain_arm,
    stock_arm,
)
from mlx_redrafter.bench.timing import OnProgress, rotated
from mlx_redrafter.bench.turns import WARM_UP_PROMPT, WARM_UP_TOKENS, arm_name, one_by_one
from mlx_redrafter.draft_plan import DraftPlan


def compared_arms(settings: CommonSettings, plans: Sequence[DraftPlan]) -> dict[str, Arm]:
    """Return stock mlx-lm, plain decoding, one method per fixed plan, and the default, by name."""
    return {
        STOCK: stock_arm(settings),
        PLAIN: plain_arm(settings),
        **{arm_name(plan): drafted_arm(settings, plan) for plan in plans},
        AUTO: drafted_arm(settings, None),
    }


def make_turns(
    prompts: Sequence[EncodedPrompt], repeats: int, group: str = "", block: int = 0
) -> list[Turn]:
    """Make a turn for every prompt, then for every prompt again, ``repeats`` times."""
    return [Turn(group, block, prompt, repeat) for repeat in range(repeats) for prompt in prompts]


def run(name: str, arm: Arm, turn: Turn) -> TimedRun:
    """Decode one text and time it."""
    ((found, _),) = one_by_one(name, arm)([turn])
    return found


def take_turn(arms: Mapping[str, Arm], turn: Turn, cool_down: float = 0.0) -> list[TimedRun]:
    """Run every decoding method once, on one prompt; each repeat starts with another method."""
    runs = []
    for name in rotated(list(arms), turn.repeat + turn.block):
        time.sleep(cool_down)
        runs.append(run(name, arms[name], turn))
    return runs


def warm_up(arms: Mapping[str, Arm], prompt: EncodedPrompt) -> None:
    """Let every decoding method compile and allocate; record nothing."""
    for arm in arms.values():
        with closing(arm(prompt.ids[:WARM_UP_PROMPT])) as responses:  # type: ignore[type-var]
            for _ in islice(responses, WARM_UP_TOKENS):
                pass


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
