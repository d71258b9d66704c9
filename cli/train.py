"""``redrafter-mlx train``: a drafter for a model, made where the model is used."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_redrafter.cli import options
from mlx_redrafter.errors import ConfigError

if TYPE_CHECKING:
    from mlx_redrafter.training import Request, Result

TEXT, NETWORK, TRAINING = "Text", "Drafter", "Training"
RUN_FILE = "run.json"
# Not part of what a run is.
TRANSIENT = ("resume", "debug", "out")
# Between lines about progress where stderr is no terminal.
LOG_SECONDS = 20.0


def train(
    context: typer.Context,
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="The drafter; also holds the run.")
    ],
    model: options.NamedModel = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help='Text, or jsonl with "text", "messages" or "prompt". May be repeated.',
            show_default=False,
            rich_help_panel=TEXT,
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Prompts that the model answers: one a line, or jsonl. May be repeated.",
            show_default=False,
            rich_help_panel=TEXT,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            help="Most tokens to train on; all.",
            show_default=False,
            rich_help_panel=TEXT,
        ),
    ] = None,
    self_written: Annotated[
        float,
        typer.Option(
            "--self-written",
            help="Share of the tokens that the model writes itself, 0 to 1.",
            rich_help_panel=TEXT,
        ),
    ] = 0.5,
    answer_tokens: Annotated[
        int,
        typer.Option(
            "--answer-tokens", help="Most tokens of a text it writes.", rich_help_panel=TEXT
        ),
    ] = 256,
    temp: Annotated[
        float,
        typer.Option(
            "--temp",
            help="Temperature of half of these texts; the others are greedy.",
            rich_help_panel=TEXT,
        ),
    ] = 0.8,
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            metavar="FOLDER",
            help="What the model says of the texts; to be shared by runs. OUT/cache.",
            show_default=False,
            rich_help_panel=TEXT,
        ),
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--start-from",
            metavar="DRAFTER",
            help="Go on from this drafter, a folder or repository; a new one.",
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            help="What to teach: soft, the model's distributions; coupled, to sample as it does; "
            "apple, the text; rollouts.",
            rich_help_panel=TRAINING,
        ),
    ] = "soft",
    epochs: Annotated[
        int, typer.Option("--epochs", help="Passes over the text.", rich_help_panel=TRAINING)
    ] = 3,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            help="Train about this long instead.",
            show_default=False,
            rich_help_panel=TRAINING,
        ),
    ] = None,
    batch_tokens: Annotated[
        int,
        typer.Option("--batch-tokens", help="Positions per step.", rich_help_panel=TRAINING),
    ] = 1024,
    lr: Annotated[
        float | None,
        typer.Option(
            "--lr",
            help="Peak learning rate; by the drafter's width.",
            show_default=False,
            rich_help_panel=TRAINING,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option("--seed", help="Of texts, weights and order.", rich_help_panel=TRAINING),
    ] = 0,
    exit_dim: Annotated[
        int | None,
        typer.Option(
            "--exit-dim",
            help="Width of the head; 1024, or twice the hidden size if that is less.",
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = None,
    layers: Annotated[
        int,
        typer.Option("--layers", help="Residual blocks before the head.", rich_help_panel=NETWORK),
    ] = 2,
    length: Annotated[
        int,
        typer.Option(
            "--length",
            help="Tokens per beam to train for, root included.",
            rich_help_panel=NETWORK,
        ),
    ] = 5,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            "--draft-vocab",
            help="Propose only so many tokens, the most frequent ones; all.",
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option("--dtype", help="Of the weights written.", rich_help_panel=NETWORK),
    ] = "float16",
    adapter_path: options.AdapterPath = None,
    trust_remote_code: options.TrustRemoteCode = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
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
    with _interrupts() as interrupts, _reporter(interrupts) as reporter:
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


def _request(values: dict[str, Any], out: Path, resume: bool) -> Request:
    from mlx_redrafter.training import (
        DataOptions,
        LossOptions,
        NetworkOptions,
        Request,
        TrainingOptions,
    )

    if values["model"] is None:
        raise ConfigError("no target given; say --model FOLDER or --model ORG/NAME")
    return Request(
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


class Interrupts:
    """Remembers Ctrl-C until a step is finished; the second one stops at once."""

    def __init__(self) -> None:
        self.happened = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if self.happened:
            raise KeyboardInterrupt
        self.happened = True
        typer.echo("stopping after this step; Ctrl-C again stops at once", err=True)

    def check(self) -> None:
        """Stop if Ctrl-C was pressed."""
        if self.happened:
            raise KeyboardInterrupt


@contextmanager
def _interrupts() -> Iterator[Interrupts]:
    interrupts = Interrupts()
    before = signal.signal(signal.SIGINT, interrupts.handle)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _reporter(interrupts: Interrupts) -> Iterator[ConsoleReporter]:
    reporter = ConsoleReporter(interrupts)
    try:
        yield reporter
    finally:
        reporter.close()


class ConsoleReporter:
    """Shows progress with the time left on a terminal, and a line for what is worth one."""

    def __init__(self, interrupts: Interrupts):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.interrupts = interrupts
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        self.tasks: dict[str, Any] = {}
        self.said_at = time.monotonic()
        self.bar.start()

    def progress(self, stage: str, done: int, total: int | None) -> None:
        """See `mlx_redrafter.training.Reporter`."""
        self.interrupts.check()
        if self.bar.disable:
            self._say_now_and_then(stage, done, total)
        if stage not in self.tasks:
            self.tasks[stage] = self.bar.add_task(stage, total=total)
        self.bar.update(self.tasks[stage], completed=done, total=total)

    def _say_now_and_then(self, stage: str, done: int, total: int | None) -> None:
        if time.monotonic() - self.said_at < LOG_SECONDS and done != total:
            return
        self.said_at = time.monotonic()
        self.say(f"{stage}: {done:,}" + ("" if total is None else f" of {total:,}"))

    def say(self, message: str) -> None:
        """See `mlx_redrafter.training.Reporter`."""
        self.bar.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bars away."""
        self.bar.stop()


def _print_result(result: Result, request: Request) -> None:
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
