"""``redrafter-mlx advise``: what can draft for a model, what that gives, what training takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mlx_redrafter.cli.bench_output import parse_count, progress
from mlx_redrafter.cli.check import PROMPTS
from mlx_redrafter.cli.model_options import AnyDrafter
from mlx_redrafter.errors import ConfigError, UnsupportedTargetError

if TYPE_CHECKING:
    from mlx_redrafter.bench.advice import Subject
    from mlx_redrafter.bench.chips import Chip
    from mlx_redrafter.bench.outlook import Outlook, Trial
    from mlx_redrafter.bench.training_cost import TrainingCost


def advise(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Folder, repository, or family with a size like 'llama 8B 4bit'; by default the "
            "bundled model. Of a repository only config.json is read.",
            show_default=False,
        ),
    ] = None,
    chip: Annotated[
        str | None,
        typer.Option(
            help="Chip to predict for, such as 'M2 Pro'; by default this machine, where a folder's "
            "model is measured.",
            show_default=False,
        ),
    ] = None,
    drafter: AnyDrafter = None,
    tokens: Annotated[str, typer.Option(help="Tokens to train on, such as 1M.")] = "1M",
) -> None:
    """Say what drafting would give for a model here or on another chip, and what to do."""
    count = parse_count(tokens)
    from mlx_redrafter.bench import advice
    from mlx_redrafter.bench.training_cost import TrainingCost

    try:
        subject = advice.find_subject(model, drafter)
    except UnsupportedTargetError as error:
        typer.echo(f"Not supported: {error}.")
        raise typer.Exit(1) from None
    cost = TrainingCost.of(subject.shape, count)
    if chip is None and subject.folder is not None:
        machine = "this machine"
        outlook, trial = _measure(subject, cost)
    else:
        from mlx_redrafter.bench.outlook import predict_outlook

        known = _find_chip(chip)
        machine, trial = known.name, None
        outlook = predict_outlook(subject.shape, known, cost)
    sections = advice.advise(subject, machine, outlook, trial, cost)
    for headline, sentences in sections.items():
        typer.echo(headline)
        for sentence in sentences:
            typer.echo(f"  {sentence}")


def _measure(subject: Subject, cost: TrainingCost) -> tuple[Outlook, Trial | None]:
    from mlx_redrafter.bench.outlook import measure_outlook, try_drafter
    from mlx_redrafter.checkpoints.loading import load

    folder = None if subject.is_bundled else subject.folder
    model, tokenizer, loaded = load(folder, subject.usable_drafter)
    with progress("timing") as on_stage:
        outlook = measure_outlook(model, subject.shape, cost, on_stage)
    trial = None if loaded is None else try_drafter(model, tokenizer, loaded, PROMPTS)
    return outlook, trial


def _find_chip(name: str | None) -> Chip:
    """The chip that is asked for, or that of this machine."""
    from mlx_redrafter.bench.chips import find_chip
    from mlx_redrafter.bench.machine import processor_name

    if name is not None:
        return find_chip(name)
    try:
        return find_chip(processor_name())
    except ConfigError:
        raise ConfigError(
            f"no chip given, and no figures are known for this machine ({processor_name()}); say "
            "--chip 'M2 Pro', or name a folder, whose model is measured here"
        ) from None
