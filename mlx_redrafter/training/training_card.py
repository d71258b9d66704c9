"""The model card of a trained drafter: ``README.md`` beside the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlx_redrafter.checkpoint_files import write_atomically
from mlx_redrafter.decoding.stats import DecodingStats
from mlx_redrafter.training.corpus import Corpus
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.state import Progress
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training.training_options import LossOptions, TrainingOptions
from mlx_redrafter.version import __version__

# Training objective of each recipe, as the card describes it.
OBJECTIVES = {
    "soft": "KL divergence from the target's distributions (most probable tokens and the rest)",
    "coupled": "probability of sampling the target's token with the same noise",
    "apple": "cross-entropy on the text, as in Apple's released code",
    "rollouts": "cross-entropy on greedy continuations by the target at every position "
    "(arXiv 2403.09919, Eq. 2)",
}
# Length of the n-grams whose repetition the card reports, in tokens.
NGRAM = 4


@dataclass(frozen=True)
class TrainingSummary:
    """The contents of a training card.

    Attributes:
        target: Name of the target.
        target_fingerprint: Fingerprint of the target's weights.
        start: Name of the earlier drafter that training started from, None for new weights.
        files: Names of the training files.
        corpus: Sequences of the run.
        student: The drafter.
        loss: Training objective.
        options: Options of the optimisation.
        progress: Counters and curve of the finished run.
        measured: Statistics of simulated decoding on held-out texts, by the name of the draft
            shape.
    """

    target: str
    target_fingerprint: str
    start: str | None
    files: Sequence[str]
    corpus: Corpus
    student: Student
    loss: LossOptions
    options: TrainingOptions
    progress: Progress
    measured: dict[str, DecodingStats]


def write_training_card(folder: Path, summary: TrainingSummary) -> None:
    """Write ``README.md``."""
    text = render_training_card(summary)
    write_atomically(folder / "README.md", lambda path: path.write_text(text, encoding="utf-8"))


def render_training_card(summary: TrainingSummary) -> str:
    """Render the card as Markdown."""
    student, progress, options = summary.student, summary.progress, summary.options
    hub = f"base_model: {summary.target}\n" if summary.target.count("/") == 1 else ""
    rows = {
        "target": f"`{summary.target}`, weights {summary.target_fingerprint}",
        "started from": "new weights" if summary.start is None else f"`{summary.start}`",
        "head": student.summary,
        "objective": OBJECTIVES[summary.loss.recipe],
        "files": ", ".join(f"`{name}`" for name in summary.files),
        "tokens": f"{_count_trained(summary.corpus.given):,} given, "
        f"{_count_trained(summary.corpus.self_generated):,} written by the target",
        "steps": f"{progress.step:,} of {progress.total_steps:,}, of "
        f"{options.batch_tokens:,} positions, in {progress.seconds / 60:.1f} minutes; the weights "
        f"are the averaged ones of step {progress.best_step:,}",
        "learning rate": f"{options.learning_rate or student.learning_rate:g}, seed {options.seed}",
        "made with": f"mlx-redrafter {__version__}",
    }
    return _TEMPLATE.format(
        base_model=hub,
        target=summary.target,
        kind=student.name[0].upper() + student.name[1:],
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        acceptance="\n".join(_render_acceptance(n, s) for n, s in summary.measured.items()),
        num_texts=len(summary.corpus.held_out),
        repeated=measure_repetition(summary.corpus.held_out),
        curve="\n".join(
            f"| {p.step:,} | {p.seconds:.0f} | {'' if p.step == 0 else f'{p.loss:.3f}'} | "
            f"{p.tokens_per_step:.2f} |"
            for p in progress.curve
        ),
    )


def measure_repetition(sequences: Sequence[TokenSequence]) -> float:
    """Measure the share of 4-grams of trained tokens that occurred earlier in their sequence."""
    seen = total = 0
    for sequence in sequences:
        tokens = [int(token) for token in sequence.tokens[np.flatnonzero(sequence.is_trained)]]
        grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
        total += len(grams)
        seen += len(grams) - len(set(grams))
    return seen / total if total else 0.0


def _count_trained(sequences: Sequence[TokenSequence]) -> int:
    return sum(int(sequence.is_trained.sum()) for sequence in sequences)


def _render_acceptance(name: str, stats: DecodingStats) -> str:
    rates = " ".join(f"{rate:.0%}" for rate in stats.acceptance_rate_by_depth)
    return f"| {name} | {stats.tokens_per_step or 1.0:.2f} | {rates} |"


_TEMPLATE = """---
library_name: mlx
tags: [mlx, speculative-decoding, redrafter]
{base_model}---

# Drafter for {target}

{kind} to make this model decode faster and leave its text as it is, for
these weights only.

    redrafter-mlx generate --model {target} --drafter . --prompt "..."

| | |
|---|---|
{rows}

## Drafts accepted

Simulated on {num_texts} texts that the target generated from held-out beginnings, half greedily,
half sampled; {repeated:.0%} of the {ngram}-grams in these texts repeat. The training text may
include other parts of the files that the beginnings come from. Sampled texts are drafted with the
target's noise, as in decoding with a seed.

| drafting | tokens/step | accepted at least 1, 2, ... drafts |
|---|---|---|
{acceptance}

## CurvePoint

| step | seconds | loss (nats) | tokens/step |
|---|---|---|---|
{curve}
""".replace("{ngram}", str(NGRAM))
