"""``redrafter-mlx list``, ``pull`` and ``rm``: models and drafters on this machine."""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_redrafter.checkpoint_files import expand_home, find_checkpoint, read_json
from mlx_redrafter.checkpoints.bundled import bundled_drafters, expand_name
from mlx_redrafter.cli.bench_output import show_lines
from mlx_redrafter.cli.names import agrees, complete_name
from mlx_redrafter.cli.progress import note
from mlx_redrafter.errors import CheckpointError, ConfigError, RedrafterError, one_line, quote
from mlx_redrafter.memory_sizes import format_bytes
from mlx_redrafter.model_store import (
    StoredModel,
    cached_repository,
    find_stored,
    repository_of,
    stored_models,
)

Name = Annotated[
    str | None,
    typer.Argument(
        help="Repository, or the last part of its name; without an owner, first on this machine, "
        "then of mlx-community.",
    ),
]


def list_models(as_json: Annotated[bool, "Print one JSON object.", "--json"] = False) -> None:
    """List models and drafters on this machine, with their sizes and what drafts for them.

    Searches the Hugging Face cache, which mlx-lm uses, and LM Studio's folders.
    """
    rows = [_describe(model) for model in stored_models()]
    if as_json:
        typer.echo(json.dumps({"models": rows}))
        return
    names = ", ".join(folder.name for folder in bundled_drafters())
    note(f"drafters in this package, whose names --drafter takes: {names}")
    if not rows:
        typer.echo(
            "no models in MLX's format on this machine; redrafter-mlx pull NAME downloads one",
            err=True,
        )
        return
    lines = [
        (row["name"], format_bytes(row["bytes"]), row["kind"], row["place"], row["drafter"] or "-")
        for row in rows
    ]
    show_lines([("NAME", "SIZE", "KIND", "KEPT BY", "DRAFTER"), *lines])


def show_model(
    model: Annotated[str | None, typer.Argument(help="Folder or repository.")] = None,
    as_json: Annotated[bool, "Print one JSON object.", "--json"] = False,
) -> None:
    """Show what is known of a model or a drafter: kind, sizes, context, template and drafter.

    Of a repository that is not on this machine only config.json is read.
    """
    from mlx_redrafter.bench.model_shape import shape_of_config
    from mlx_redrafter.proposers.checkpoint import CONFIG_ONLY
    from mlx_redrafter.target.model_loading import make_model
    from mlx_redrafter.target.target import Target

    given = expand_name(_given(model))
    name = given if expand_home(given).exists() else complete_name(given)
    folder = find_checkpoint(name, CONFIG_ONLY)
    kind, config = _recognise(folder)
    facts: dict[str, Any] = {"name": name, "folder": str(folder), "type": config.get("model_type")}
    facts["kind"] = kind
    if kind == "model":
        shape = shape_of_config(name, config)
        facts |= {
            "parameters": int(shape.parameters),
            "bits": shape.bits,
            "hidden_size": shape.hidden_size,
            "vocabulary": shape.vocab_size,
            "context": Target(make_model(name, config)).context_length,
            "chat_template": _has_template(folder),
            "drafter": _drafter_of(folder),
        }
    else:
        facts["vocabulary"] = config.get("vocab_size")
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for key, value in facts.items():
        text = f"{value:,}" if type(value) is int else value
        typer.echo(one_line(f"{key.replace('_', ' ')}: {'-' if value is None else text}"))


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and "chat_template" in read_json(path)


def pull(model: Name = None) -> None:
    """Download a model or a drafter, or its newest version, and say what drafts for it.

    A name without an owner is completed by models on this machine, or else by mlx-community.
    """
    full = complete_name(_given(model))
    typer.echo(f"looking for {quote(full)} on the hub ...", err=True)
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    from mlx_redrafter.hub import download, find_repository

    patterns = [*DEFAULT_ALLOW_PATTERNS, "*.safetensors", "README.md"]
    repository = find_repository(full, patterns)
    licence = repository.licence or "not stated"
    size = format_bytes(repository.size(patterns))
    is_here = cached_repository(full).is_dir() and find_stored(full, patterns) is not None
    doing = "checking the files of" if is_here else "downloading"
    typer.echo(one_line(f"{doing} {full} ({size}, licence {licence})"), err=True)
    folder = download(repository, patterns)
    typer.echo(f"{full} is in {folder}", err=True)
    drafter = _drafter_of(folder)
    if drafter is not None:
        typer.echo(f"drafter: {drafter}", err=True)


def remove(
    model: Annotated[
        str | None,
        typer.Argument(help="Repository, or the last part of the name of one on this machine."),
    ] = None,
    yes: Annotated[bool, "Delete without a question."] = False,
) -> None:
    """Delete a model or a drafter from the Hugging Face cache, in all its versions."""
    full = _given(model)
    if "/" not in full:
        if (found := find_stored(full, None)) is None:
            raise CheckpointError(f"no {full!r} is on this machine; see redrafter-mlx list")
        full = repository_of(found)
    folder = cached_repository(full)
    if not folder.is_dir():
        others = [f"{one.place} keeps it" for one in stored_models() if one.name == full]
        hint = f"{others[0]}: delete it there" if others else "see redrafter-mlx list"
        raise CheckpointError(f"{full!r} is not in the Hugging Face cache; {hint}")
    if folder.is_symlink():
        raise CheckpointError(
            f"{full!r} is a link in the Hugging Face cache: delete {folder} and, if nothing else "
            f"needs it, {folder.resolve()}"
        )
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    size = format_bytes(sum(path.stat().st_size for path in files))
    if agrees(f"Delete {full} ({size})?", yes):
        shutil.rmtree(folder)
        typer.echo(f"deleted {full}", err=True)


def _describe(model: StoredModel) -> dict[str, Any]:
    try:
        kind, _ = _recognise(model.folder)
    except RedrafterError:
        kind = "not supported"
    return {
        "name": model.name,
        "bytes": model.size,
        "kind": kind,
        "place": model.place,
        "folder": str(model.folder),
        "drafter": _drafter_of(model.folder) if kind == "model" else None,
    }


def _recognise(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the kind of a checkpoint, "model" or that of a drafter, and its config."""
    from mlx_redrafter.checkpoints.recognition import recognise
    from mlx_redrafter.proposers import draft_model

    kind, config = recognise(folder)
    return "model" if kind is draft_model else kind.NAME, config


def _given(model: str | None) -> str:
    if model is None:
        raise ConfigError("expected a model, found none; redrafter-mlx list shows those here")
    return model


def _drafter_of(folder: Path) -> str | None:
    """Name a drafter on this machine for a model, or else one in the table of published ones."""
    from mlx_redrafter.checkpoints.drafter_search import METHODS, DrafterSearch, published_for
    from mlx_redrafter.checkpoints.identity import Identity

    try:
        identity = Identity.of_folder(folder)
        found = DrafterSearch(identity).stored()
    except RedrafterError:
        return None
    if found is not None:
        return f"{found.name} ({found.method}, on this machine)"
    published = published_for(identity)
    if not published:
        return None
    return f"{published[0].drafter} ({METHODS[published[0].method]}, to download)"
