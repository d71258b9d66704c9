"""``redrafter-mlx train``: train a drafter for a model, on this machine."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_redrafter.checkpoint_files import read_json
from mlx_redrafter.cli.model_options import AdapterPath, NamedModel, TrustRemoteCode
from mlx_redrafter.cli.names import ask_for_drafter, find_model
from mlx_redrafter.cli.progress import note, progress_bar
from mlx_redrafter.cli.text_options import Overwrite
from mlx_redrafter.cli.typer_app import pack
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.interrupts import keeping
from mlx_redrafter.training_options import DataOptions, NetworkOptions, TrainingOptions

if TYPE_CHECKING:
    from mlx_redrafter.training import TrainingRequest, TrainingResult

# Options of one call, which the record of a run leaves out. No record may say that code is run.
OF_THE_CALL = ("out", "resume", "dry_run", "overwrite", "yes", "trust_remote_code")
# Options that are paths; a record has absolute ones, for other working folders.
PATHS = ("data", "prompts", "cache", "adapter_path")
# Those of them that may be repeated.
LISTS = ("data", "prompts")
# Options that are folders or repositories.
FOLDERS = ("model", "start_from")


@dataclass(frozen=True)
class RunOptions:
    out: Annotated[Path, "Folder of the drafter and its training run."]
    resume: Annotated[bool, "Continue the run in --out."] = False
    dry_run: Annotated[bool, "Estimate time, disk and memory of the run, then stop."] = False
    overwrite: Overwrite = False
    yes: Annotated[bool, "Download what is not on this machine without a question."] = False
    model: NamedModel = None
    adapter_path: AdapterPath = None
    trust_remote_code: TrustRemoteCode = False
    data: Annotated[
        list[Path] | None,
        'File of text, or jsonl with "text", "messages" or "prompt". May be repeated. Without '
        "--data and --prompts the model writes all texts; your own ones are the better choice.",
    ] = None
    prompts: Annotated[
        list[Path] | None,
        "File of prompts that the model answers: one a line, or jsonl. May be repeated.",
    ] = None
    cache: Annotated[
        Path | None,
        "Folder of the model's outputs on the texts, by default OUT/cache. Runs with the same "
        "model, texts and text options may share it.",
    ] = None


def train(
    context: typer.Context,
    run: RunOptions,
    text: DataOptions,
    drafter: NetworkOptions,
    training: TrainingOptions,
) -> None:
    """Train a drafter for a model on this machine.

    You may interrupt it; `redrafter-mlx train --out FOLDER --resume` ends in the same weights.
    """
    groups = (run, text, drafter, training)
    given = {name: value for group in groups for name, value in vars(group).items()}
    from mlx_redrafter.training import train_drafter
    from mlx_redrafter.training.files import save_json
    from mlx_redrafter.training.training_request import RUN_FILE

    path = run.out / RUN_FILE
    is_new = not path.exists()
    if run.resume and not is_new:
        given = _restore(context, given, path)
    request = _make_request(given)
    request.check_output()
    request = replace(request, model=find_model(request.model, run.yes))
    if request.network.start_from is not None:
        ask_for_drafter(request.network.start_from, run.yes)
    if run.resume and is_new:
        note(f"no run was begun in {run.out}; this one begins at its first step")

    command = ["redrafter-mlx", "train", "--out", str(run.out), "--resume", *_trust(request)]
    resume = f"stopped; continue with: {shlex.join(command)}"
    reporter = ConsoleReporter()
    with keeping(lambda: resume if path.exists() else "stopped; nothing was begun"), reporter.bar:
        result = train_drafter(request, reporter, lambda: save_json(path, _to_record(given)))
    if result is not None:
        _print_result(result, request)


def _to_record(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options to store with a run, as JSON values."""
    kept = {
        name: _make_absolute(name, value)
        for name, value in values.items()
        if name not in OF_THE_CALL
    }
    record: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return record


def _make_absolute(name: str, value: Any) -> Any:
    """Return an option as any working folder understands it."""
    if isinstance(value, (list, tuple)):
        return [_make_absolute(name, one) for one in value]
    is_text = isinstance(value, (str, Path)) and str(value) != ""
    if is_text and (name in PATHS or (name in FOLDERS and Path(value).is_dir())):
        return str(Path(value).absolute())
    return value


def _restore(context: typer.Context, values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Replace options by those that a run began with; options given again must be the same."""
    given = _to_record(values)
    stored = {name: _make_absolute(name, value) for name, value in read_json(path).items()}
    if unknown := stored.keys() - given.keys():
        raise ConfigError(
            f"expected the options of a run in {path}, found {', '.join(sorted(unknown))}; finish "
            "the run with the version of mlx-redrafter that began it, or choose another --out"
        )
    for name in sorted(stored.keys() & {*PATHS, *FOLDERS}):
        found = stored[name]
        kind, texts = ("a list of texts", found) if name in LISTS else ("a text", [found])
        is_right = isinstance(texts, list) and all(isinstance(one, str) for one in texts)
        if found is not None and not is_right:
            raise ConfigError(
                f"expected {kind} as {name} in {path}, found {found!r}; correct it, or choose "
                "another --out"
            )
    for name, value in given.items():
        source = context.get_parameter_source(name)
        is_given = source is not None and source.name == "COMMANDLINE"
        if is_given and stored.get(name) != value:
            raise ConfigError(
                f"the run in {values['out']} was begun with {name.replace('_', '-')} "
                f"{stored.get(name)!r}, not {value!r}; leave the option out, or choose another "
                "--out"
            )
    return {**values, **stored}


def _make_request(values: Mapping[str, Any]) -> TrainingRequest:
    """Make the request of a run; restored paths are strings."""
    from mlx_redrafter.training import TrainingRequest

    if values["model"] is None:
        begun = f"no run was begun in {values['out']}; " if values["resume"] else ""
        raise ConfigError(
            f"{begun}expected a model, found none; give --model FOLDER or --model ORG/NAME"
        )
    run = {field.name: values[field.name] for field in fields(RunOptions)}
    del run["yes"]
    run |= {name: [Path(path) for path in run[name] or ()] for name in LISTS}
    run["cache"] = None if run["cache"] is None else Path(run["cache"])
    return TrainingRequest(
        **run,
        data_options=pack(DataOptions, values),
        network=pack(NetworkOptions, values),
        training=pack(TrainingOptions, values),
    )


def _print_result(result: TrainingResult, request: TrainingRequest) -> None:
    stats, length = result.measured, request.network.length
    rates = ", ".join(f"{rate:.0%}" for rate in stats.acceptance_rate_by_depth) or "none"
    typer.echo(
        f"chain of {length - 1}: {stats.tokens_per_step or 1:.2f} tokens/step on held-out text "
        f"(simulated), acceptance rate by position: {rates}"
    )
    typer.echo(f"wrote {request.out}; you may delete its cache")
    typer.echo(f"use it: {to_use(request)} --prompt ...")


def to_use(request: TrainingRequest) -> str:
    """Return the command that generates with the drafter, for the target that it was trained on."""
    words = ["redrafter-mlx", "generate", "--model", request.model]
    if request.adapter_path is not None:
        words += ["--adapter-path", str(request.adapter_path)]
    return shlex.join([*words, *_trust(request), "--drafter", str(request.out)])


def _trust(request: TrainingRequest) -> list[str]:
    return ["--trust-remote-code"] if request.trust_remote_code else []


class ConsoleReporter:
    def __init__(self) -> None:
        self.bar = progress_bar("{task.description}")
        self.tasks: dict[str, Any] = {}
        self.logged_at = time.monotonic()

    def progress(self, stage: str, done: int, total: int | None) -> None:
        if self.bar.disable:
            self._log(stage, done, total)
        if stage not in self.tasks:
            self.tasks[stage] = self.bar.add_task(stage, total=total)
        self.bar.update(self.tasks[stage], completed=done, total=total)

    def say(self, message: str) -> None:
        self.bar.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def _log(self, stage: str, done: int, total: int | None) -> None:
        """Print a line of progress, unless the last one is from the last 20 seconds."""
        if time.monotonic() - self.logged_at < 20 and done != total:
            return
        self.logged_at = time.monotonic()
        self.say(f"{stage}: {done:,}" + ("" if total is None else f" of {total:,}"))
