"""The one check of what a command writes: nothing of the user's is written over.

A command calls it before any work. It may write to a path that is absent or an empty folder, and to
what it has written itself. ``--overwrite`` also allows other files, but never one that the call
reads: the model, the drafter, the data.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile

from mlx_redrafter.checkpoint_files import INCOMPLETE, check_encoding, expand_home, naming
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.model_store import find_stored, is_path

# Name of the files of the Finder, which do not count.
FINDER = ".DS_Store"


def check_destination(
    path: Path,
    inputs: Iterable[str | Path | None],
    is_own: bool,
    overwrite: bool = False,
    is_folder: bool = True,
) -> None:
    """Raise unless a command may write a folder or file.

    The call reads the ``inputs``: files, folders and repositories; None is skipped. A path that
    ``is_own`` holds an earlier output of the command and nothing else.

    Raises:
        ConfigError: The path is an input, holds one or is part of one; it holds other files; or it
            is not valid UTF-8.
        OSError: The path cannot be written to.
    """
    kind = "folder" if is_folder else "file"
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"expected a {kind} to write, found a broken link: {path}; remove it")
    place = path.resolve()  # "x/../model" is the model even if there is no x
    check_encoding(place)
    if place.exists():
        if place.is_dir() != is_folder:
            found = "file" if is_folder else "folder"
            raise ConfigError(
                f"expected a {kind} to write, found a {found}: {path}; choose another"
            )
        read = [one for given in inputs if (one := _locate(given)) is not None]
        present = _foreign(place)
        is_inside = present and not is_own and any(_holds(one, place) for one in read)
        if is_inside or any(_holds(place, one) for one in read):
            raise ConfigError(
                f"expected a new {kind} to write, found what this call reads: {path}; choose "
                "another"
            )
        if present and not is_own and not overwrite:
            beside = f"{present} in " if is_folder else ""
            raise ConfigError(
                f"expected a new {kind} to write, found {beside}{path}, which this command did not "
                "write; choose another, or add --overwrite"
            )
    check_writable(place)


def _foreign(path: Path) -> str:
    names = os.listdir(path) if path.is_dir() else [path.name]
    counted = (name for name in sorted(names) if name != FINDER and not INCOMPLETE.fullmatch(name))
    return next(counted, "")


def _locate(given: str | Path | None) -> Path | None:
    if given is None:
        return None
    path = expand_home(given)
    try:
        if path.exists():
            return path
    except (OSError, ValueError):  # an impossible name, which its reader explains
        return None
    return None if is_path(str(given)) else find_stored(str(given), None)


def _holds(outer: Path, inner: Path) -> bool:
    """Return whether a path is, or holds, another one, by whatever links and spellings."""
    resolved = inner.resolve()
    return any(outer.samefile(one) for one in (inner, resolved, *resolved.parents))


def check_writable(path: Path) -> None:
    """Create a file without a name where the output will be; raise `OSError` if that fails."""
    folder = path if path.is_dir() else path.absolute().parent
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    with naming(path), TemporaryFile(dir=existing):
        pass
