"""Duration of a training run, from its amounts of work and the pace of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlx_redrafter.proposers.fit import ENOUGH
from mlx_redrafter.training.training_request import TrainingRequest

# Minimum share of the given minutes for training, however slow the other stages are.
LEAST_SHARE = 0.25
# Share of the given minutes for evaluation, unless that allows fewer than `LEAST_EVALUATIONS`.
EVALUATION_SHARE = 0.25
# Minimum number of measurements, the first one left out.
LEAST_EVALUATIONS = 2
# Minimum number of tokens trained on between two measurements, by the tokens of a measurement;
# without minutes only.
TRAINED_PER_MEASURED = 4


@dataclass(frozen=True)
class Workload:
    """Amounts of work of a run, in tokens and, without a limit of minutes, in optimiser steps.

    The target reads ``given`` tokens of texts and ``prompts`` tokens of prompts. It generates
    ``generated`` tokens for training, ``held_out`` for measuring, in texts that have
    ``text_tokens`` with their prompts, and ``written`` for prompts. ``num_evaluations`` is the
    maximum number of measurements, the first one left out.
    """

    given: int
    generated: int
    held_out: int
    prompts: int
    steps: int
    batch_tokens: int
    num_evaluations: int
    text_tokens: int
    written: int = 0

    @classmethod
    def of(
        cls, request: TrainingRequest, given: int, generated: int, prompt: int, num_held_out: int
    ) -> Workload:
        """Compute the work of a request; ``prompt`` is the mean number of tokens of a prompt."""
        answer, training = request.data_options.answer_tokens, request.training
        steps_per_epoch = -(-(given + generated) // training.batch_tokens)
        return cls(
            given,
            generated,
            num_held_out * answer,
            prompt * (generated // answer + 1 + num_held_out),
            training.epochs * steps_per_epoch,
            training.batch_tokens,
            training.num_evaluations,
            prompt + answer,
        )

    @property
    def tokens(self) -> int:
        return self.given + self.generated + self.held_out + self.prompts

    def left(self, stored: int, unread: int, is_full: bool) -> Workload:
        """Return the work on texts that is left, with a cache of ``stored`` tokens of them.

        Given texts come first. The target reads ``unread`` of the tokens again, for the inputs of
        its layers. A cache that ``is_full`` has all texts, however many tokens they are.
        """
        new = self.generated + self.prompts
        share = 0.0 if is_full else 1 - min(1, max(0, stored - self.given) / new)
        return replace(
            self,
            given=unread + (0 if is_full else max(0, self.given - stored)),
            generated=round(share * self.generated),
            held_out=0 if is_full else self.held_out,
            prompts=round(share * self.prompts),
            written=0 if stored else self.written,
        )


@dataclass(frozen=True)
class Pace:
    """Times of the parts of a run on a machine, in seconds.

    ``generating`` is per token, many texts at once, ``reading`` per token of given texts and
    prompts, ``step`` per optimiser step. ``measuring`` and ``calibration`` are per held-out token;
    calibration stops at `ENOUGH`.
    """

    generating: float
    reading: float
    step: float
    measuring: float
    calibration: float


@dataclass(frozen=True)
class Timetable:
    """Seconds of a run by the name of the stage, in order, and seconds per optimiser step.

    ``num_evaluations`` is the number of measurements, the first one left out.
    """

    stages: Mapping[str, float]
    step: float
    num_evaluations: int

    @classmethod
    def of(
        cls, work: Workload, pace: Pace, minutes: float | None, left: Workload | None = None
    ) -> Timetable:
        """Plan a run, of whose work on texts a part is ``left``, by default all.

        With ``minutes``, training fills the time that the other stages leave, and slow measurements
        are made less often. Otherwise the numbers of tokens decide how often, so that equal runs
        are equal.
        """
        # One half of the held-out texts chooses the weights; the other is measured at the end.
        half = work.held_out / 2
        measuring = pace.measuring * half
        # Calibration reads two predictions per token.
        calibration = pace.calibration * min(half, ENOUGH // 2)
        finishing = measuring + calibration
        if minutes is not None:
            room = (EVALUATION_SHARE * 60 * minutes - finishing) / measuring - 1
        else:
            room = work.steps * work.batch_tokens / (TRAINED_PER_MEASURED * half)
        num_evaluations = min(work.num_evaluations, max(LEAST_EVALUATIONS, int(room)))
        left = left or work
        generated = left.generated + left.held_out + left.written
        stages = {
            "reading": pace.reading * left.given,
            "generating": pace.generating * generated + pace.reading * left.prompts,
            "training": work.steps * pace.step,
            "evaluation": (num_evaluations + 1) * measuring + finishing,
        }
        if minutes is not None:
            others = sum(stages.values()) - stages["training"]
            stages["training"] = 60 * minutes - others
        return cls(stages, pace.step, num_evaluations)

    @property
    def total(self) -> float:
        return sum(self.stages.values())

    def __str__(self) -> str:
        return f"about {format_time(self.total)}: {format_stages(self.stages)}"

    def count_steps(self, minutes: float, elapsed: float) -> int:
        """Count the steps that fit into a run, ``elapsed`` seconds after it began."""
        left = 60 * minutes - elapsed - self.stages["evaluation"]
        return max(1, round(max(left, LEAST_SHARE * 60 * minutes) / self.step))


def format_stages(stages: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {format_time(seconds)}" for name, seconds in stages.items() if seconds
    )


def format_time(seconds: float) -> str:
    """Render seconds, or minutes from 100 seconds on, or hours from 100 minutes on."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
