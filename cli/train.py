"""``redrafter-mlx train``: a drafter for a model, made where the model is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mlx_redrafter.cli import options, train_options
from mlx_redrafter.cli.train_progress import console_reporter
from mlx_redrafter.errors import ConfigError

if TYPE_CHECKING:
    from mlx_redrafter.training import TrainingRequest, TrainingResult

RUN_FILE = "run.json"
# Not part of what a run is.
TRANSIENT = ("resume", "debug", "out")


def train(
    context: typer.Context,
    out: train_options.Out,
    model: options.NamedModel = None,
    data: train_options.DataFiles = None,
    prompts: train_options.PromptFiles = None,
    tokens: train_options.Tokens = None,
    self_written: train_options.SelfWritten = 0.5,
    answer_tokens: train_options.AnswerTokens = 256,
    temp: train_options.WriterTemp = 0.8,
    cache: train_options.TeacherCache = None,
    start_from: train_options.StartFrom = None,
    recipe: train_options.Recipe = "soft",
    epochs: train_options.Epochs = 3,
    minutes: train_options.Minutes = None,
    batch_tokens: train_options.BatchTokens = 1024,
    lr: train_options.LearningRate = None,
    seed: train_options.Seed = 0,
    exit_dim: train_options.ExitDim = None,
    layers: train_options.Layers = 2,
    length: train_options.Length = 5,
    draft_vocab: train_options.DraftVocab = None,
    dtype: train_options.Dtype = "float16",
    adapter_path: options.AdapterPath = None,
    trust_remote_code: options.TrustRemoteCode = False,
    resume: train_options.Resume = False,
    debug: options.Debug = False,
) -> None:
    """Train a drafter for a model on this machine.

    Interrupt it whenever you like: `redrafter-mlx train --out FOLDER --resume` goes on and ends
    where an undisturbed run ends.
    """
    values = {k: v for k, v in context.params.items() if k not in TRANSIENT}
    if resume:
        values = _stored_options(context, out, values)
    request = _request(values, out, resume)

    from mlx_redrafter.training import save_json, train_drafter

    save_json(out / RUN_FILE, json.loads(json.dumps(values, default=str)))
    with console_reporter() as reporter:
        try:
            result = train_drafter(request, reporter)
        except KeyboardInterrupt:
            reporter.close()
            typer.echo(f"stopped; go on with: redrafter-mlx train --out {out} --resume", err=True)
            raise
    _print_result(result, request)


def _stored_options(context: typer.Context, out: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The options that a run was begun with; ones given again must be the same."""
    path = out / RUN_FILE
    if not path.exists():
        return given
    from mlx_redrafter.training import load_json

    stored = load_json(path)
    for name, value in given.items():
        source = context.get_parameter_source(name)
        is_given = source is not None and source.name == "COMMANDLINE"
        plain = json.loads(json.dumps(value, default=str))
        if is_given and stored.get(name) != plain:
            raise ConfigError(
                f"the run in {out} was begun with {name.replace('_', '-')} {stored.get(name)!r}, "
                f"not {plain!r}; leave the option out, or choose another --out"
            )
    return {**given, **stored}


def _request(values: dict[str, Any], out: Path, resume: bool) -> TrainingRequest:
    from mlx_redrafter.training import (
        DataOptions,
        LossOptions,
        NetworkOptions,
        TrainingOptions,
        TrainingRequest,
    )

    if values["model"] is None:
        raise ConfigError("no target given; say --model FOLDER or --model ORG/NAME")
    return TrainingRequest(
        model=values["model"],
        out=out,
        data=[Path(path) for path in values["data"] or ()],
        prompts=[Path(path) for path in values["prompts"] or ()],
        cache=None if values["cache"] is None else Path(values["cache"]),
        adapter_path=values["adapter_path"],
        trust_remote_code=values["trust_remote_code"],
        start_from=values["start_from"],
        dtype=values["dtype"],
        resume=resume,
        data_options=DataOptions(
            max_tokens=values["tokens"],
            written_share=values["self_written"],
            answer_tokens=values["answer_tokens"],
            temp=values["temp"],
            seed=values["seed"],
        ),
        network=NetworkOptions(
            values["exit_dim"], values["layers"], values["length"], values["draft_vocab"]
        ),
        loss=LossOptions(recipe=values["recipe"]),
        training=TrainingOptions(
            epochs=values["epochs"],
            minutes=values["minutes"],
            batch_tokens=values["batch_tokens"],
            learning_rate=values["lr"],
            seed=values["seed"],
        ),
    )


def _print_result(result: TrainingResult, request: TrainingRequest) -> None:
    for name, stats in result.measured.items():
        rates = ", ".join(f"{rate:.0%}" for rate in stats.acceptance_rate_by_depth) or "none"
        typer.echo(
            f"{name}: {stats.tokens_per_step or 1:.2f} tokens/step on held-out text (simulated), "
            f"accepted by depth: {rates}"
        )
    typer.echo(f"wrote {request.out}; its cache can be deleted")
    typer.echo(
        f"use it: redrafter-mlx generate --model {request.model} --drafter {request.out} "
        "--prompt ..."
    )
