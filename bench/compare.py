"""Comparison of decoding methods on the same prompts, in interleaved runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import Row, summarise
from mlx_redrafter.bench.runs import Arm, CommonSettings, EncodedPrompt
from mlx_redrafter.bench.timing import OnProgress, timed
from mlx_redrafter.bench.turns import decode_in_turns, make_turns, reference_arm
from mlx_redrafter.engine.profiling import time_steps
from mlx_redrafter.engine.stored_costs import contexts, step_costs
from mlx_redrafter.machines.leading import target_of
from mlx_redrafter.proposers.lookup import Lookup


@dataclass(frozen=True)
class MethodComparison:
    """Results of a comparison.

    Attributes:
        rows: One row per decoding method, over all prompts.
        by_category: The same over the prompts of each category; empty if there is only one.
    """

    rows: list[Row]
    by_category: dict[str, list[Row]]


def compare(
    arms: Mapping[str, Arm],
    settings: CommonSettings,
    prompts: Sequence[EncodedPrompt],
    repeats: int,
    recording: Recording,
    cool_down: float = 0.0,
    on_progress: OnProgress = lambda done, total: None,
) -> MethodComparison:
    """Decode every prompt with every method, ``repeats`` times, in interleaved runs.

    Turns that the recording already has are not repeated.
    """
    prepare = partial(time_shapes, settings, max(len(prompt.ids) for prompt in prompts), recording)
    decode_in_turns(arms, make_turns(prompts, repeats), recording, cool_down, on_progress, prepare)

    reference = reference_arm(settings)
    categories = dict.fromkeys(prompt.category for prompt in prompts)
    found = MethodComparison(
        summarise(recording.runs, reference),
        {
            category: summarise(
                [run for run in recording.runs if run.category == category], reference
            )
            for category in (categories if len(categories) > 1 else ())
        },
    )
    recording.finish(found=found)
    return found


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
