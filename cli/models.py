"""``redrafter-mlx list``, ``pull`` and ``rm``: models and drafters on this machine."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_redrafter.cli.names import agrees, complete_name
from mlx_redrafter.errors import CheckpointError, RedrafterError

if TYPE_CHECKING:
    from mlx_redrafter.model_store import StoredModel

Name = Annotated[
    str,
    typer.Argument(
        help="Repository, or the last part of its name; without an owner, first on this machine, "
        "then of mlx-community.",
    ),
]
Yes = Annotated[bool, "Delete without a question."]


def list_models(
    as_json: Annotated[bool, "Print one JSON object.", "--json"] = False,
) -> None:
    """List models and drafters on this machine, with their sizes and what drafts for them.

    Searches the Hugging Face cache, which mlx-lm uses, and LM Studio's folders.
    """
    from mlx_redrafter.memory_sizes import format_bytes
    from mlx_redrafter.model_store import stored_models

    rows = [_describe(model) for model in stored_models()]
    if as_json:
        typer.echo(json.dumps({"models": rows}))
        return
    if not rows:
        typer.echo(
            "no models in MLX's format on this machine; redrafter-mlx pull NAME downloads one",
            err=True,
        )
    for row in rows:
        drafter = f"; drafter: {row['drafter']}" if row["drafter"] else ""
        typer.echo(
            f"{row['name']}  {format_bytes(row['bytes'])}  {row['kind']}  ({row['place']}){drafter}"
        )


def pull(name: Name) -> None:
    """Download a model or a drafter, or its newest version, and say what drafts for it.

    A name without an owner is completed by models on this machine, or else by mlx-community.
    """
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    from mlx_redrafter.hub import download, find_repository
    from mlx_redrafter.memory_sizes import format_bytes

    patterns = [*DEFAULT_ALLOW_PATTERNS, "*.safetensors", "README.md"]
    full = complete_name(name)
    repository = find_repository(full, patterns)
    licence = repository.licence or "not stated"
    size = format_bytes(repository.size(patterns))
    typer.echo(f"downloading {full} ({size}, licence {licence})", err=True)
    typer.echo(f"{full} is in {download(repository, patterns)}", err=True)
    drafter = _drafter_of(full)
    if drafter is not None:
        typer.echo(f"drafter: {drafter}", err=True)


def remove(name: Name, yes: Yes = False) -> None:
    """Delete a model or a drafter from the Hugging Face cache, in all its versions."""
    from mlx_redrafter.memory_sizes import format_bytes
    from mlx_redrafter.model_store import cached_repository, stored_models

    full = complete_name(name)
    folder = cached_repository(full)
    if not folder.is_dir():
        others = [f"{one.place} keeps it" for one in stored_models() if one.name == full]
        hint = f"{others[0]}: delete it there" if others else "see redrafter-mlx list"
        raise CheckpointError(f"{full!r} is not in the Hugging Face cache; {hint}")
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    size = format_bytes(sum(path.stat().st_size for path in files))
    if agrees(f"Delete {full} ({size})?", yes):
        shutil.rmtree(folder)
        typer.echo(f"deleted {full}", err=True)


def _describe(model: StoredModel) -> dict[str, Any]:
    from mlx_redrafter.checkpoints.recognition import recognise
    from mlx_redrafter.proposers import draft_model

    try:
        kind, _ = recognise(model.folder)
        name = "model" if kind is draft_model else kind.NAME
    except RedrafterError:
        name = "not supported"
    return {
        "name": model.name,
        "bytes": model.size,
        "kind": name,
        "place": model.place,
        "folder": str(model.folder),
        "drafter": _drafter_of(model.name) if name == "model" else None,
    }


def _drafter_of(name: str) -> str | None:
    """Name a drafter on this machine for a model, or else one in the table of published ones."""
    from mlx_redrafter.checkpoints.drafter_search import DrafterSearch
    from mlx_redrafter.checkpoints.identity import Identity
    from mlx_redrafter.checkpoints.published_drafters import METHODS, published_for, read_table
    from mlx_redrafter.model_store import find_stored

    folder = find_stored(name, None)
    if folder is None:
        return None
    try:
        identity = Identity.of_folder(folder)
        found = DrafterSearch(identity).stored()
    except RedrafterError:
        return None
    if found is not None:
        return f"{found.name} ({found.method}, on this machine)"
    published = published_for(identity, read_table())
    if not published:
        return None
    return f"{published[0].drafter} ({METHODS[published[0].method]}, to download)"
