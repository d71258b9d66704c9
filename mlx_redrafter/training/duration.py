"""Duration of a training run, from its amounts of work and the pace of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mlx_redrafter.proposers.fit import ENOUGH
from mlx_redrafter.training.request import TrainingRequest

# Least share of the given minutes that is left for training, whatever the other stages take.
LEAST_SHARE = 0.25
# Share of the given minutes for evaluation, unless that would be fewer measurements than the least.
EVALUATION_SHARE = 0.25
LEAST_EVALUATIONS = 2
# Without minutes: least tokens trained on from one measurement to the next, by those it measures.
TRAINED_PER_MEASURED = 4


class Schedule(NamedTuple):
    """Length of the training.

    Attributes:
        total_steps: Number of optimiser steps.
        num_evaluations: Number of measurements, beside the first.
    """

    total_steps: int
    num_evaluations: int


@dataclass(frozen=True)
class Workload:
    """Amounts of work of a run.

    Attributes:
        given: Number of tokens of the texts from files.
        written: Number of tokens that the target writes for training.
        held_out: Number of tokens that the target writes for measuring.
        prompts: Number of tokens of the prompts of both.
        steps: Number of optimiser steps without a limit of minutes.
        batch_tokens: Number of tokens of a step.
        num_evaluations: Most measurements, beside the first.
    """

    given: int
    written: int
    held_out: int
    prompts: int
    steps: int
    batch_tokens: int
    num_evaluations: int

    @classmethod
    def of(
        cls, request: TrainingRequest, given: int, written: int, prompt: int, num_held_out: int
    ) -> Workload:
        """The work of a request.

        Args:
            request: The request.
            given: Number of tokens of the texts from files.
            written: Number of tokens that the target writes for training.
            prompt: Mean number of tokens of a prompt.
            num_held_out: Number of held-out texts.
        """
        answer, training = request.data_options.answer_tokens, request.training
        steps_per_epoch = -(-(given + written) // training.batch_tokens)
        return cls(
            given,
            written,
            num_held_out * answer,
            prompt * (written // answer + 1 + num_held_out),
            training.epochs * steps_per_epoch,
            training.batch_tokens,
            training.num_evaluations,
        )

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences."""
        return self.given + self.written + self.held_out + self.prompts


@dataclass(frozen=True)
class Pace:
    """Seconds that the parts of a run take on a machine.

    Attributes:
        writing: Seconds per token that the target writes, many texts at once.
        reading: Seconds per token that the target reads.
        rollout: Seconds per token whose greedy continuation is written; 0 for the recipes
            without rollouts.
        step: Seconds per optimiser step.
        chain: Seconds per held-out token of a measurement with a chain.
        tree: Seconds per held-out token of the other measurements of a finished drafter.
        calibration: Seconds per held-out token of the calibration, which stops at `ENOUGH`.
    """

    writing: float
    reading: float
    rollout: float
    step: float
    chain: float
    tree: float
    calibration: float


@dataclass(frozen=True)
class Timetable:
    """Seconds of a run by stage.

    Attributes:
        stages: Seconds by the name of the stage, in order.
        step: Seconds per optimiser step.
        num_evaluations: Number of measurements, beside the first.
    """

    stages: Mapping[str, float]
    step: float
    num_evaluations: int

    @classmethod
    def of(cls, work: Workload, pace: Pace, minutes: float | None) -> Timetable:
        """The timetable of a run.

        With ``minutes`` training gets what the other stages leave of them. There are fewer
        measurements where these would take too much; without ``minutes`` that is a matter of
        numbers of tokens, so that equal runs are equal.
        """
        given_and_written = work.tokens - work.held_out
        chain = pace.chain * work.held_out
        # Calibration looks at two drafts per token.
        calibration = pace.calibration * min(work.held_out, ENOUGH // 2)
        finishing = chain + pace.tree * work.held_out + calibration
        if minutes is not None:
            room = (EVALUATION_SHARE * 60 * minutes - finishing) / chain - 1
        else:
            room = work.steps * work.batch_tokens / (TRAINED_PER_MEASURED * work.held_out)
        num_evaluations = min(work.num_evaluations, max(LEAST_EVALUATIONS, int(room)))
        stages = {
            "writing": pace.writing * (work.written + work.held_out),
            "reading": pace.reading * work.tokens + pace.rollout * given_and_written,
            "training": work.steps * pace.step,
            "evaluation": (num_evaluations + 1) * chain + finishing,
        }
        if minutes is not None:
            others = sum(stages.values()) - stages["training"]
            stages["training"] = 60 * minutes - others
        return cls(stages, pace.step, num_evaluations)

    @property
    def total(self) -> float:
        """Seconds of the whole run."""
        return sum(self.stages.values())

    def __str__(self) -> str:
        return f"about {format_time(self.total)}: {format_stages(self.stages)}"

    def schedule(self, minutes: float, elapsed: float) -> Schedule:
        """The length of training that fits into the given minutes.

        Args:
            minutes: Time for the whole run.
            elapsed: Seconds that are gone before the first step.
        """
        left = 60 * minutes - elapsed - self.stages["evaluation"]
        steps = round(max(left, LEAST_SHARE * 60 * minutes) / self.step)
        return Schedule(max(1, steps), self.num_evaluations)


def format_stages(stages: Mapping[str, float]) -> str:
    """Render the seconds of stages, by name."""
    return ", ".join(f"{name} {format_time(seconds)}" for name, seconds in stages.items())


def format_time(seconds: float) -> str:
    """Render a time in seconds, minutes or hours, whichever is read best."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
