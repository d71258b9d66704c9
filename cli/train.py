"""``redrafter-mlx train``: a drafter for a model, trained on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mlx_redrafter.cli.train_options import Network, Run, Schedule, Target, Texts
from mlx_redrafter.cli.train_progress import console_reporter
from mlx_redrafter.cli.typer_app import pack
from mlx_redrafter.errors import ConfigError

if TYPE_CHECKING:
    from mlx_redrafter.training import TrainingRequest, TrainingResult

RUN_FILE = "run.json"


def train(
    context: typer.Context,
    run: Run,
    target: Target,
    texts: Texts,
    network: Network,
    schedule: Schedule,
) -> None:
    """Train a drafter for a model on this machine.

    Interrupt it whenever you like: `redrafter-mlx train --out FOLDER --resume` goes on and ends
    where an undisturbed run ends.
    """
    values = {**vars(target), **vars(texts), **vars(network), **vars(schedule)}
    path = run.out / RUN_FILE
    if run.resume:
        values = _stored_options(context, run.out, values)
    elif path.exists():
        raise ConfigError(
            f"a run was begun in {run.out}; go on with --resume, or choose another --out"
        )
    request = _request(run, values)

    from mlx_redrafter.training import save_json, train_drafter

    record = json.loads(json.dumps(values, default=str))
    with console_reporter() as reporter:
        try:
            result = train_drafter(request, reporter, lambda: save_json(path, record))
        except KeyboardInterrupt:
            reporter.close()
            if path.exists():
                typer.echo(
                    f"stopped; go on with: redrafter-mlx train --out {run.out} --resume", err=True
                )
            raise
    if result is not None:
        _print_result(result, request)


def _stored_options(context: typer.Context, out: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The options that a run began with; any given again must be the same."""
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


def _request(run: Run, values: dict[str, Any]) -> TrainingRequest:
    """The request of a run with these options, of which paths may be strings."""
    from mlx_redrafter.training import (
        DataOptions,
        LossOptions,
        NetworkOptions,
        TrainingOptions,
        TrainingRequest,
    )

    target, texts = pack(Target, values), pack(Texts, values)
    network, schedule = pack(Network, values), pack(Schedule, values)
    if target.model is None:
        raise ConfigError("no target given; say --model FOLDER or --model ORG/NAME")
    return TrainingRequest(
        model=target.model,
        out=run.out,
        data=[Path(path) for path in texts.data or ()],
        prompts=[Path(path) for path in texts.prompts or ()],
        cache=None if texts.cache is None else Path(texts.cache),
        adapter_path=target.adapter_path,  # type: ignore[arg-type]
        trust_remote_code=target.trust_remote_code,
        start_from=network.start_from,
        dtype=network.dtype,
        resume=run.resume,
        dry_run=run.dry_run,
        data_options=DataOptions(
            max_tokens=texts.tokens,
            written_share=texts.self_written,
            answer_tokens=texts.answer_tokens,
            temp=texts.temp,
            seed=schedule.seed,
        ),
        network=NetworkOptions(
            network.head,  # type: ignore[arg-type]
            network.exit_dim,
            network.layers,
            network.length,
            network.draft_vocab,
            network.fused,
            None if network.layers_read is None else _parse_layers(network.layers_read),
        ),
        loss=LossOptions(recipe=schedule.recipe),  # type: ignore[arg-type]
        training=TrainingOptions(
            epochs=schedule.epochs,
            minutes=schedule.minutes,
            batch_tokens=schedule.batch_tokens,
            learning_rate=schedule.lr,
            seed=schedule.seed,
        ),
    )


def _parse_layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"expected layers such as 1,3,-1, got {text!r}") from None


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
