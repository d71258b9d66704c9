"""Timings on this machine, kept in the user's cache folder until something changes.

A run times in rounds. A round times everything once, close together, so that other work slows all
of it alike. If the rounds of the first run leave doubt, one later run times more rounds, and so
does a run after one in which steps cost less than was timed. The rounds of all runs count.
"""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.checkpoint_files import named_parameters, write_text
from mlx_redrafter.version import __version__

logger = logging.getLogger(__name__)

# Environment variable of the folder; 0 stores nothing.
FOLDER = "MLX_REDRAFTER_CACHE"
# Seconds of a step that no machine needs: stored times of an hour or more are damaged.
MOST_SECONDS = 3600.0
# Number of runs that may time the same: the first, one more if its rounds leave doubt, and one for
# each time that use shows the times to be too long: a machine may be busy in several runs.
MOST_RUNS = 8

# Errors of files that are missing or damaged.
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)

Key = TypeVar("Key", bound=Hashable)


def load_or_time(
    what: object,
    modules: Collection[nn.Module],
    keys: Collection[Key],
    is_doubtful: Callable[[Sequence[Mapping[Key, float]]], bool],
    time_rounds: Callable[[], Sequence[Mapping[Key, float]]],
) -> Sequence[Mapping[Key, float]]:
    """Return the stored rounds of a timing, or time and store them, in seconds by key.

    The file's name is the `fingerprint` of ``what``, a description by its ``repr``, and of the
    timed ``modules``. The ``str`` of keys is stored. ``time_rounds`` times at least one round. If
    the rounds of the first run are doubtful, the next run times more.
    """
    path = _path(what, modules)
    stored = _read(path, keys)
    if stored.rounds and not stored.is_doubted:
        return stored.rounds
    rounds = [*stored.rounds, *time_rounds()]
    _write(path, _Stored(rounds, stored.runs + 1, not stored.rounds and is_doubtful(rounds)))
    return rounds


def doubt(what: object, modules: Collection[nn.Module], keys: Collection[Hashable]) -> None:
    """Let the next run time more rounds, unless `MOST_RUNS` have; see `load_or_time`."""
    path = _path(what, modules)
    stored = _read(path, keys)
    if stored.rounds and stored.runs < MOST_RUNS and not stored.is_doubted:
        _write(path, stored._replace(is_doubted=True))


def fastest(rounds: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    """Return the shortest times of all rounds: other work only ever adds to a time."""
    return {key: min(one[key] for one in rounds) for key in rounds[0]}


def cache_folder() -> Path | None:
    """Return the folder of stored timings and estimates; None if nothing is to be stored.

    It is the value of `FOLDER`, or ``mlx-redrafter`` in the user's cache folder.
    """
    given = os.environ.get(FOLDER)
    if given == "0":
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "mlx-redrafter"


class _Stored(NamedTuple, Generic[Key]):
    """Content of a file: seconds by key, of all runs, none if it is missing or damaged.

    ``runs`` counts the runs that have timed; ``is_doubted`` lets the next run time more rounds.
    """

    rounds: Sequence[Mapping[Key, float]] = ()
    runs: int = 0
    is_doubted: bool = False


def _read(path: Path | None, keys: Collection[Key]) -> _Stored[Key]:
    if path is None:
        return _Stored()
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        rounds = [{key: _check_seconds(one[str(key)]) for key in keys} for one in stored["rounds"]]
        runs = range(1, MOST_RUNS + 1).index(stored["runs"]) + 1
        return _Stored(rounds, runs, stored["doubted"] is True and runs < MOST_RUNS)
    except DAMAGED:
        return _Stored()


def _write(path: Path | None, stored: _Stored[Key]) -> None:
    if path is None:
        return
    rounds = [{str(key): seconds for key, seconds in one.items()} for one in stored.rounds]
    text = json.dumps({"rounds": rounds, "runs": stored.runs, "doubted": stored.is_doubted})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        logger.warning("timings are not kept for the next run: %s", error)


def _check_seconds(value: object) -> float:
    seconds = float(value)  # type: ignore[arg-type]
    if not 0 < seconds < MOST_SECONDS:
        raise ValueError(f"{seconds} is no time of a step")
    return seconds


def fingerprint(what: object, modules: Collection[nn.Module]) -> str:
    """Return a digest of ``what`` and all else that times and texts of networks depend on.

    That is names, shapes and dtypes of the weights, the device, and the versions of MLX and of this
    package.
    """
    tensors = [
        (name, tensor.shape, str(tensor.dtype))
        for module in modules
        for name, tensor in named_parameters(module).items()
    ]
    device = (str(mx.default_device()), mx.device_info().get("device_name"), platform.processor())
    known = repr((what, tensors, device, version("mlx"), __version__))
    return hashlib.sha256(known.encode()).hexdigest()[:32]


def _path(what: object, modules: Collection[nn.Module]) -> Path | None:
    folder = cache_folder()
    return folder and folder / f"{fingerprint(what, modules)}.json"
