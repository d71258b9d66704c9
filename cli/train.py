"""``redrafter-mlx train``: train a drafter for a model, on this machine."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from mlx_redrafter.cli.model_options import AdapterPath, NamedModel, TrustRemoteCode
from mlx_redrafter.errors import ConfigError

if TYPE_CHECKING:
    from mlx_redrafter.training import TrainingRequest, TrainingResult

# File in the drafter's folder with the options that the run began with.
RUN_FILE = "run.json"
# Options of one call, which `RUN_FILE` leaves out.
OF_THE_CALL = ("out", "resume", "dry_run")
# Seconds between lines of progress if stderr is not a terminal.
LOG_SECONDS = 20.0

text_option = partial(typer.Option, rich_help_panel="Text")
drafter_option = partial(typer.Option, rich_help_panel="Drafter")
training_option = partial(typer.Option, rich_help_panel="Training")


@dataclass(frozen=True)
class RunOptions:
    """Options of the command."""

    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder of the drafter and its training run.")
    ]
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Estimate time, disk and memory of the run, then stop."),
    ] = False
    model: NamedModel = None
    adapter_path: AdapterPath = None
    trust_remote_code: TrustRemoteCode = False
    data: Annotated[
        list[Path] | None,
        text_option(
            metavar="FILE",
            help='Text, or jsonl with "text", "messages" or "prompt". May be repeated.',
            show_default=False,
        ),
    ] = None
    prompts: Annotated[
        list[Path] | None,
        text_option(
            metavar="FILE",
            help="Prompts that the model answers: one a line, or jsonl. May be repeated.",
            show_default=False,
        ),
    ] = None
    tokens: Annotated[
        int | None,
        text_option(help="Maximum number of tokens to train on.", show_default="all"),
    ] = None
    self_generated: Annotated[
        float,
        text_option(help="Share of the tokens that the model generates for training, 0 to 1."),
    ] = 0.5
    answer_tokens: Annotated[
        int, text_option(help="Maximum number of tokens of a self-generated text.")
    ] = 256
    temp: Annotated[
        float,
        text_option(
            help="Sampling temperature of half of the self-generated texts; the others are greedy."
        ),
    ] = 0.8
    cache: Annotated[
        Path | None,
        text_option(
            metavar="FOLDER",
            help="Folder of the model's outputs on the texts. Runs with the same model, texts and "
            "text options may share it.",
            show_default="OUT/cache",
        ),
    ] = None
    head: Annotated[
        str,
        drafter_option(
            help="Kind of drafter: redrafter (recurrent), medusa, eagle (EAGLE-3), eagle1, mtp (an "
            "MTP module), specformer, dflash, dflash2 or dspark."
        ),
    ] = "redrafter"
    start_from: Annotated[
        str | None,
        drafter_option(
            metavar="DRAFTER",
            help="Recurrent or block drafter to continue training: a folder or a hub repository.",
            show_default="a new one",
        ),
    ] = None
    exit_dim: Annotated[
        int | None,
        drafter_option(
            help="Width of a recurrent drafter's head; a wider one costs more time and memory.",
            show_default="1024, or twice the hidden size if that is less",
        ),
    ] = None
    length: Annotated[
        int, drafter_option(help="Number of tokens per beam to train for, root included.")
    ] = 5
    draft_vocab: Annotated[
        int | None,
        drafter_option(
            help="Number of tokens that the drafter can propose, the most frequent ones; fewer "
            "speed up the drafting for a large vocabulary.",
            show_default="all",
        ),
    ] = None
    recipe: Annotated[
        str,
        training_option(
            help="Objective: soft (the model's distributions), coupled (the same, for sampled "
            "text), overlap (DSpark's) or apple (the tokens of the texts)."
        ),
    ] = "soft"
    epochs: Annotated[int, training_option(help="Number of passes over the texts.")] = 3
    minutes: Annotated[
        float | None,
        training_option(
            help="Approximate time of the whole run, including generation and evaluation, instead "
            "of --epochs.",
            show_default=False,
        ),
    ] = None
    lr: Annotated[
        float | None,
        training_option(
            help="Peak learning rate.", show_default="inverse to the width of the drafter"
        ),
    ] = None
    seed: Annotated[
        int, training_option(help="Random seed of texts, initial weights and order.")
    ] = 0

    def to_record(self) -> dict[str, Any]:
        """Return the options to store with a run, as JSON values."""
        values = {name: value for name, value in asdict(self).items() if name not in OF_THE_CALL}
        record: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return record


def train(context: typer.Context, options: RunOptions) -> None:
    """Train a drafter for a model on this machine.

    You may interrupt it; `redrafter-mlx train --out FOLDER --resume` ends in the same weights.
    """
    path = options.out / RUN_FILE
    if options.resume and path.exists():
        options = _restore(context, options, path)
    elif path.exists():
        raise ConfigError(
            f"a run was begun in {options.out}; continue it with --resume, or choose another --out"
        )
    request = _make_request(options)

    from mlx_redrafter.training import train_drafter
    from mlx_redrafter.training.files import save_json

    try:
        with ConsoleReporter() as reporter:
            result = train_drafter(request, reporter, lambda: save_json(path, options.to_record()))
    except KeyboardInterrupt:
        if path.exists():
            typer.echo(
                f"stopped; continue with: redrafter-mlx train --out {options.out} --resume",
                err=True,
            )
        raise
    if result is not None:
        _print_result(result, request)


def _restore(context: typer.Context, options: RunOptions, path: Path) -> RunOptions:
    """Replace options by those that a run began with; options given again must be the same."""
    from mlx_redrafter.checkpoint_files import read_json

    stored, given = read_json(path), options.to_record()
    if unknown := stored.keys() - given.keys():
        raise ConfigError(
            f"expected the options of a run in {path}, found {', '.join(sorted(unknown))}; finish "
            "the run with the version of mlx-redrafter that began it, or choose another --out"
        )
    for name, value in given.items():
        source = context.get_parameter_source(name)
        is_given = source is not None and source.name == "COMMANDLINE"
        if is_given and stored.get(name) != value:
            raise ConfigError(
                f"the run in {options.out} was begun with {name.replace('_', '-')} "
                f"{stored.get(name)!r}, not {value!r}; leave the option out, or choose another "
                "--out"
            )
    return replace(options, **stored)


def _make_request(options: RunOptions) -> TrainingRequest:
    """Make the request of a run; restored paths are strings."""
    from mlx_redrafter.training import (
        DataOptions,
        NetworkOptions,
        TrainingOptions,
        TrainingRequest,
    )

    if options.model is None:
        raise ConfigError("expected a target, found none; give --model FOLDER or --model ORG/NAME")
    return TrainingRequest(
        model=options.model,
        out=options.out,
        data=[Path(path) for path in options.data or ()],
        prompts=[Path(path) for path in options.prompts or ()],
        cache=None if options.cache is None else Path(options.cache),
        adapter_path=options.adapter_path,  # type: ignore[arg-type]
        trust_remote_code=options.trust_remote_code,
        start_from=options.start_from,
        resume=options.resume,
        dry_run=options.dry_run,
        data_options=DataOptions(
            max_tokens=options.tokens,
            self_generated_share=options.self_generated,
            answer_tokens=options.answer_tokens,
            temp=options.temp,
            seed=options.seed,
        ),
        network=NetworkOptions(
            options.head,  # type: ignore[arg-type]
            options.exit_dim,
            beam_length=options.length,
            draft_vocab=options.draft_vocab,
        ),
        recipe=options.recipe,  # type: ignore[arg-type]
        training=TrainingOptions(
            epochs=options.epochs,
            minutes=options.minutes,
            learning_rate=options.lr,
            seed=options.seed,
        ),
    )


def _print_result(result: TrainingResult, request: TrainingRequest) -> None:
    stats, length = result.measured, request.network.beam_length
    rates = ", ".join(f"{rate:.0%}" for rate in stats.acceptance_rate_by_depth) or "none"
    typer.echo(
        f"chain of {length - 1}: {stats.tokens_per_step or 1:.2f} tokens/step on held-out text "
        f"(simulated), acceptance rate by position: {rates}"
    )
    typer.echo(f"wrote {request.out}; you may delete its cache")
    typer.echo(
        f"use it: redrafter-mlx generate --model {request.model} --drafter {request.out} "
        "--prompt ..."
    )


class ConsoleReporter:
    """A reporter on stderr. Ctrl-C stops the run at its next report, a second one at once."""

    def __init__(self) -> None:
        from mlx_redrafter.cli.progress import progress_bar

        self.bar = progress_bar("{task.description}")
        self.tasks: dict[str, Any] = {}
        self.logged_at = time.monotonic()
        self.is_interrupted = False

    def __enter__(self) -> Self:
        self.handler = signal.signal(signal.SIGINT, self._interrupt)
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()
        signal.signal(signal.SIGINT, self.handler)

    def progress(self, stage: str, done: int, total: int | None) -> None:
        if self.is_interrupted:
            raise KeyboardInterrupt
        if self.bar.disable:
            self._log(stage, done, total)
        if stage not in self.tasks:
            self.tasks[stage] = self.bar.add_task(stage, total=total)
        self.bar.update(self.tasks[stage], completed=done, total=total)

    def say(self, message: str) -> None:
        self.bar.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def _log(self, stage: str, done: int, total: int | None) -> None:
        """Print a line of progress, unless the last one is recent."""
        if time.monotonic() - self.logged_at < LOG_SECONDS and done != total:
            return
        self.logged_at = time.monotonic()
        self.say(f"{stage}: {done:,}" + ("" if total is None else f" of {total:,}"))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.is_interrupted:
            raise KeyboardInterrupt
        self.is_interrupted = True
        typer.echo("stopping after this step; Ctrl-C again stops at once", err=True)
