"""``redrafter-mlx advise``: the command for a model, its expected gain and its reasons."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_redrafter.checkpoint_files import expand_home
from mlx_redrafter.cli.bench_output import parse_count, progress
from mlx_redrafter.cli.check import PROMPTS
from mlx_redrafter.cli.model_options import AnyDrafter, refuse_none
from mlx_redrafter.cli.names import complete_name, refuse_drafter
from mlx_redrafter.cli.progress import note
from mlx_redrafter.errors import ConfigError, UnsupportedTargetError, printable

if TYPE_CHECKING:
    from mlx_redrafter.bench.advice import Subject
    from mlx_redrafter.bench.chips import Chip
    from mlx_redrafter.bench.forecast import Forecast
    from mlx_redrafter.bench.training_cost import TrainingCost


def advise(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder or repository; by default the bundled model. Of a repository only "
            "config.json is read.",
        ),
    ] = None,
    chip: Annotated[
        str | None,
        "Chip to predict for, such as 'M2 Pro'; by default this machine, which measures "
        "the model if its weights are here.",
    ] = None,
    machines: Annotated[int, "Number of such machines that the model is split over."] = 1,
    link: Annotated[
        str, "Link between the machines: thunderbolt (MLX's ring), or rdma (JACCL, Thunderbolt 5)."
    ] = "thunderbolt",
    drafter: AnyDrafter = None,
    tokens: Annotated[str, "Tokens to train on, such as 1M."] = "1M",
    no_rehearsal: Annotated[
        bool, "Leave out how long training takes here; to rehearse it may take minutes."
    ] = False,
    as_json: Annotated[bool, "Print one JSON object.", "--json"] = False,
) -> None:
    """Recommend one command for a model, with the expected gain, here or on another chip."""
    count = parse_count(tokens)
    refuse_none(drafter)
    from mlx_redrafter.bench import advice
    from mlx_redrafter.bench.chips import find_chip
    from mlx_redrafter.bench.machine import this_chip
    from mlx_redrafter.bench.several_machines import SplitModel, describe
    from mlx_redrafter.bench.training_cost import TrainingCost

    if model is not None and (folder := expand_home(model)).exists():
        refuse_drafter(model, folder)
    elif model is not None:
        model = complete_name(model)
    try:
        known = this_chip() if chip is None else find_chip(chip)
        subject = advice.find_subject(model, drafter, known)
    except UnsupportedTargetError as error:
        refusal = f"Not supported: {error}."
        typer.echo(json.dumps({"supported": False, "reason": str(error)}) if as_json else refusal)
        raise typer.Exit(1) from None
    cost = TrainingCost.of(subject.shape, count)
    if chip is None and subject.folder is not None and machines == 1:
        forecast, trial = _measure(subject, cost, not no_rehearsal)
    else:
        forecast, trial = _predict(subject, known, cost), None
    recommended = advice.recommend(subject, forecast, trial)
    sections = advice.advise(subject, forecast, recommended, known)
    if machines != 1 and known is not None:
        split = SplitModel(subject.shape, known, machines, link)
        sections[f"Expected speed on {machines} x {known.name} over {link}"] = describe(split)
    if as_json:
        summary = advice.summarise(subject, forecast, recommended)
        typer.echo(json.dumps({**summary, "sections": sections}))
        return
    for headline, sentences in sections.items():
        typer.echo(headline)
        for sentence in sentences:
            typer.echo(f"  {printable(sentence)}")


def _predict(subject: Subject, chip: Chip | None, cost: TrainingCost) -> Forecast:
    from mlx_redrafter.bench.forecast import predict_forecast
    from mlx_redrafter.bench.machine import processor_name

    if chip is None:
        is_here = subject.folder is not None  # several machines are never measured
        measured = "" if is_here else ", or give a model's folder, to measure it here"
        raise ConfigError(
            "no chip given, and no figures are known for this machine "
            f"({processor_name()}); say --chip 'M2 Pro'{measured}"
        )
    return predict_forecast(subject.shape, chip, cost, subject.simulated)


def _measure(subject: Subject, cost: TrainingCost, may_rehearse: bool) -> tuple[Forecast, float]:
    from mlx_redrafter.bench.forecast import measure_forecast, try_drafter
    from mlx_redrafter.checkpoints.loading import load

    folder = None if subject.is_bundled else subject.folder
    note("loading the model, to time its steps and to try drafts on it")
    model, tokenizer, loaded = load(folder, subject.usable_drafter)
    trial = try_drafter(model, tokenizer, loaded or "lookup", PROMPTS)
    if subject.has_drafter or not may_rehearse:
        return measure_forecast(model, subject.shape, cost), trial
    note("rehearsing the training of a drafter, to know its time; --no-rehearsal leaves that out")
    with progress("rehearsal") as on_stage:
        return measure_forecast(model, subject.shape, cost, on_stage), trial
