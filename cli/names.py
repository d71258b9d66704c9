"""Names of models, by one rule for every command, and the question before a download."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mlx_redrafter.checkpoint_files import CONFIG_FILE, expand_home, read_config
from mlx_redrafter.errors import (
    CheckpointError,
    ConfigError,
    RedrafterError,
    ResourceError,
    one_line,
)
from mlx_redrafter.memory_sizes import format_bytes, read_total_memory
from mlx_redrafter.model_store import find_stored, is_path, repository_of, stored_names

if TYPE_CHECKING:
    from mlx_redrafter.hub import Repository

# Owner of the repositories that a name without an owner stands for, if it is not on this machine.
DEFAULT_OWNER = "mlx-community"
# Addresses of the hub, whose rest is a repository.
HUB = re.compile(r"(?:https?://)?(?:www[.])?(?:huggingface[.]co|hf[.]co)/([^/]+/[^/]+).*")


def complete_name(name: str) -> str:
    """Complete a repository's name by models on this machine, or else by the default owner."""
    if match := HUB.fullmatch(name):
        raise ConfigError(f"expected a repository like org/name, got an address: say {match[1]}")
    if ":" in name and "://" not in name:
        joined = name.replace(":", "-")
        joined += "" if joined.endswith("bit") else "-4bit"
        raise ConfigError(
            f"expected a repository like org/name, got {name!r}; names have no tags here; sizes "
            f"and bits are parts of the name, as in {joined}"
        )
    if not name or is_path(name):
        raise ConfigError(f"expected a repository like org/name, got {name!r}")
    if (stored := find_stored(name, None)) is not None:
        return repository_of(stored)
    return name if "/" in name else f"{DEFAULT_OWNER}/{name}"


def names_beginning(incomplete: str) -> list[str]:
    """List repositories on this machine for the shell, by their names or else their last parts."""
    names = stored_names()
    last_parts = [name.rpartition("/")[2] for name in names]
    found = [name for name in names if name.startswith(incomplete)]
    return found or [name for name in last_parts if name.startswith(incomplete)]


def find_model(name: str, yes: bool) -> str:
    """Return the folder or repository of a model on this machine, after a download if agreed."""
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    if name and expand_home(name).exists():
        folder = expand_home(name)
    elif is_path(name) and HUB.fullmatch(name) is None:
        raise CheckpointError(
            f"no such folder: {name}; give a folder or a repository like org/name"
        )
    else:
        full = complete_name(name)
        stored = find_stored(full, DEFAULT_ALLOW_PATTERNS)
        if stored is None:
            _download(full, yes)
            return full
        name, folder = full, stored
    refuse_drafter(name, folder)
    return name


def refuse_drafter(name: str, folder: Path) -> None:
    """Raise `CheckpointError` if a folder that is to be a model holds a drafter."""
    from mlx_redrafter.checkpoints.recognition import recognise
    from mlx_redrafter.proposers import draft_model, redrafter
    from mlx_redrafter.proposers.redrafter.config import MODEL_TYPE

    try:
        kind, config = recognise(folder)
    except RedrafterError:
        return  # what loads the model says why it cannot
    is_unknown = kind is redrafter and config.get("model_type") != MODEL_TYPE
    if kind is not draft_model and not is_unknown:
        raise CheckpointError(f"{name} is a drafter; give it with --drafter, next to its --model")


def _download(full: str, yes: bool) -> None:
    """Download a model that this machine can use, if the user agrees."""
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    from mlx_redrafter.hub import download, find_repository
    from mlx_redrafter.target.model_parts import check_config

    repository = find_repository(full, [CONFIG_FILE, *DEFAULT_ALLOW_PATTERNS])
    folder = download(repository, [CONFIG_FILE])
    refuse_drafter(full, folder)
    check_config(read_config(folder))
    size, memory = repository.size(DEFAULT_ALLOW_PATTERNS), read_total_memory()
    if memory is not None and size > memory:
        raise ResourceError(
            f"{full} has {format_bytes(size)}, and this machine has {format_bytes(memory)} of "
            "memory; use a copy in fewer bits, or a smaller model"
        )
    _ask(repository, size, yes)
    download(repository, DEFAULT_ALLOW_PATTERNS)


def ask_for_drafter(name: str, yes: bool) -> None:
    """Ask before a drafter is downloaded, if a name is that of one that is not on this machine."""
    from mlx_redrafter.proposers.checkpoint import PATTERNS

    is_repository = "/" in name and not is_path(name) and not expand_home(name).exists()
    if yes or not is_repository or find_stored(name, PATTERNS) is not None:
        return
    from mlx_redrafter.hub import find_repository

    repository = find_repository(name, PATTERNS)
    _ask(repository, repository.size(PATTERNS), yes)


def _ask(repository: Repository, size: int, yes: bool) -> None:
    licence = repository.licence or "not stated"
    if not agrees(f"Download {repository.name} ({format_bytes(size)}, licence {licence})?", yes):
        typer.echo("not downloaded", err=True)
        raise typer.Exit(1)


def agrees(question: str, yes: bool) -> bool:
    """Ask the user; without a terminal ``--yes`` must have answered."""
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"{question} There is no terminal to ask at: add --yes")
    return confirm(question)


def confirm(question: str) -> bool:
    """Ask at the terminal; Ctrl-C is none of the answers.

    The question may repeat a licence from the hub, whose signs must not move the cursor.
    """
    try:
        return typer.confirm(one_line(question), err=True)
    except typer.Abort:
        raise KeyboardInterrupt from None
