"""The card of a trained drafter: ``README.md`` beside its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlx_redrafter.checkpoint import write_atomically
from mlx_redrafter.config import DrafterConfig
from mlx_redrafter.decoding.stats import DecodingStats
from mlx_redrafter.training.corpus import Corpus
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.options import (
    LossOptions,
    TrainingOptions,
    default_learning_rate,
)
from mlx_redrafter.training.state import Progress
from mlx_redrafter.version import __version__

RECIPES = {
    "soft": "the target's own distributions (KL over its most probable tokens and the rest)",
    "coupled": "to sample what the target samples with the same noise, from its distributions",
    "apple": "the text itself (cross-entropy, as in Apple's released code)",
    "rollouts": "greedy continuations by the target at every position (arXiv 2403.09919, Eq. 2)",
}
NGRAM = 4


@dataclass(frozen=True)
class Training:
    """All that a card tells.

    Attributes:
        target: The model's name.
        fingerprint: Of its weights.
        start: The earlier drafter's name, None for a new one.
        files: Names of the files it was trained on.
        corpus: Their tokens.
        config: The drafter's shape.
        loss: What it was carried_over.
        options: How.
        progress: What came out.
        measured: Simulated decoding of held-out texts, by what was drafted.
    """

    target: str
    fingerprint: str
    start: str | None
    files: Sequence[str]
    corpus: Corpus
    config: DrafterConfig
    loss: LossOptions
    options: TrainingOptions
    progress: Progress
    measured: dict[str, DecodingStats]


def write_card(folder: Path, training: Training) -> None:
    """Write ``README.md``."""
    text = render(training)
    write_atomically(folder / "README.md", lambda path: path.write_text(text, encoding="utf-8"))


def render(training: Training) -> str:
    """The card's text."""
    config, progress, options = training.config, training.progress, training.options
    recipe = training.loss.recipe
    hub = f"base_model: {training.target}\n" if training.target.count("/") == 1 else ""
    rows = {
        "target": f"`{training.target}`, weights {training.fingerprint}",
        "started from": "new weights" if training.start is None else f"`{training.start}`",
        "head": f"{config.exit_dim} wide, {config.num_draft_layers} residual blocks, "
        f"{config.head_rows} tokens",
        "calibration": f"score scale {config.score_scale:.2f}, noise share {config.noise_share:g}",
        "carried_over": RECIPES[recipe],
        "files": ", ".join(f"`{name}`" for name in training.files),
        "tokens": f"{_trained(training.corpus.given):,} given, "
        f"{_trained(training.corpus.written):,} written by the target",
        "steps": f"{progress.step:,} of {progress.total_steps or 0:,}, of "
        f"{options.batch_tokens:,} positions, in {progress.seconds / 60:.1f} minutes; the weights "
        f"are the averaged ones of step {progress.best_step:,}",
        "learning rate": f"{options.learning_rate or default_learning_rate(config.exit_dim):g}, "
        f"seed {options.seed}",
        "made with": f"mlx-redrafter {__version__}",
    }
    return _TEMPLATE.format(
        base_model=hub,
        target=training.target,
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        acceptance="\n".join(_acceptance_row(n, s) for n, s in training.measured.items()),
        num_texts=len(training.corpus.held_out),
        repeated=repeated_share(training.corpus.held_out),
        curve="\n".join(
            f"| {p.step:,} | {p.seconds:.0f} | {'' if p.step == 0 else f'{p.loss:.3f}'} | "
            f"{p.tokens_per_step:.2f} |"
            for p in progress.curve
        ),
    )


def repeated_share(sequences: Sequence[TokenSequence]) -> float:
    """Share of the 4-grams of the trained tokens that occurred before in the same sequence."""
    seen = total = 0
    for sequence in sequences:
        tokens = [int(token) for token in sequence.tokens[np.flatnonzero(sequence.is_trained)]]
        grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
        total += len(grams)
        seen += len(grams) - len(set(grams))
    return seen / total if total else 0.0


def _trained(sequences: Sequence[TokenSequence]) -> int:
    return sum(int(sequence.is_trained.sum()) for sequence in sequences)


def _acceptance_row(name: str, stats: DecodingStats) -> str:
    rates = " ".join(f"{rate:.0%}" for rate in stats.acceptance_rate_by_depth)
    return f"| {name} | {stats.tokens_per_step or 1.0:.2f} | {rates} |"


_TEMPLATE = """---
library_name: mlx
tags: [mlx, speculative-decoding, redrafter]
{base_model}---

# Drafter for {target}

A recurrent drafter (ReDrafter, arXiv 2403.09919) that makes this model decode faster and leaves its
text as it is. It fits these weights only.

    redrafter-mlx generate --model {target} --drafter . --prompt "..."

| | |
|---|---|
{rows}

## Drafts accepted

Simulated on {num_texts} texts that the target wrote from held-out beginnings, half greedily, half
sampled; {repeated:.0%} of their {ngram}-grams repeat. Other parts of the files that these
beginnings come from may have been trained on. Sampled texts are drafted with the noise of the
target, as decoding with a seed does.

| drafting | tokens/step | accepted at least 1, 2, ... drafts |
|---|---|---|
{acceptance}

## Curve

| step | seconds | loss (nats) | tokens/step |
|---|---|---|---|
{curve}
""".replace("{ngram}", str(NGRAM))
