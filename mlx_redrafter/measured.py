"""What was timed on this machine, kept in the user's cache folder until something changes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.checkpoint_files import named_parameters, write_atomically
from mlx_redrafter.version import __version__

logger = logging.getLogger(__name__)

# No step takes longer.
MOST_SECONDS = 3600.0
# Measurements of what was disturbed, each in a run of its own; the fastest times of all count.
MOST_RUNS = 3
RUNS_LEFT = "runs left"
# How often use has shown that less time is taken than was measured, and the most times that this
# counts: parts of steps may seem to take less for ever.
DOUBTS, MOST_DOUBTS = "doubts", 2


class Timed(NamedTuple):
    """What was measured.

    Attributes:
        seconds: Seconds by key.
        is_doubtful: Whether something disturbed it: the next run measures it again.
    """

    seconds: Mapping[str, float]
    is_doubtful: bool = False


def load_or_measure(
    what: object,
    modules: Collection[nn.Module],
    keys: Collection[str],
    measure: Callable[[], Timed],
) -> dict[str, float]:
    """Seconds by key: from a file if they were measured before, else measured and written to it.

    What was disturbed when it was measured is measured again by the next runs, `MOST_RUNS` at most.

    Args:
        what: Says what is timed; its ``repr`` counts.
        modules: Networks timed: names, shapes and dtypes of their weights count, as do the device
            and the versions of MLX and of this package.
        keys: Names of the seconds.
        measure: Finds it.
    """
    path = _path(what, modules)
    stored = _read(path, keys)
    if not stored.runs:
        return stored.seconds
    before = stored.seconds
    if before:
        logger.info("other work disturbed the last timing; the fastest times of both count")
    timed = measure()
    seconds = {key: min(taken, before.get(key, taken)) for key, taken in timed.seconds.items()}
    _write(path, Stored(seconds, stored.runs - 1 if timed.is_doubtful else 0, stored.doubts))
    return seconds


def measure_again(what: object, modules: Collection[nn.Module], keys: Collection[str]) -> bool:
    """Have what took less time in use than was measured measured once more, when it is next asked.

    The arguments are those of `load_or_measure`.

    Returns:
        Whether it will be; not where this has been asked `MOST_DOUBTS` times before, or where the
        file cannot be written.
    """
    path = _path(what, modules)
    stored = _read(path, keys)
    if not stored.seconds or stored.doubts == MOST_DOUBTS:
        return False
    return _write(path, Stored(stored.seconds, max(1, stored.runs), stored.doubts + 1))


class Stored(NamedTuple):
    """What a file holds.

    Attributes:
        seconds: Seconds by key, none where the file is damaged.
        runs: Number of further runs that may measure them.
        doubts: Number of times that use has shown them to be too long.
    """

    seconds: dict[str, float]
    runs: int
    doubts: int


def _write(path: Path, stored: Stored) -> bool:
    """Whether the file is written; a warning says so if not."""
    counts = {name: n for name, n in ((RUNS_LEFT, stored.runs), (DOUBTS, stored.doubts)) if n}
    text = json.dumps(stored.seconds | counts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    except OSError as error:
        logger.warning("what was timed is not kept for the next run: %s", error)
        return False
    return True


def _read(path: Path, keys: Collection[str]) -> Stored:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        runs = range(MOST_RUNS).index(stored.get(RUNS_LEFT, 0))
        doubts = range(MOST_DOUBTS + 1).index(stored.get(DOUBTS, 0))
        return Stored({key: _check_seconds(stored[key]) for key in keys}, runs, doubts)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):
        return Stored({}, MOST_RUNS, 0)


def _path(what: object, modules: Collection[nn.Module]) -> Path:
    return cache_folder() / f"{_fingerprint(what, modules)}.json"


def cache_folder() -> Path:
    """Where timings are kept: ``mlx-redrafter`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-redrafter"


def _check_seconds(value: object) -> float:
    """Raise ValueError unless it is a time that something may have taken."""
    seconds = float(value)  # type: ignore[arg-type]
    if not 0 < seconds < MOST_SECONDS:
        raise ValueError(f"{seconds} is no time of a step")
    return seconds


def _fingerprint(what: object, modules: Collection[nn.Module]) -> str:
    tensors = [
        (name, tensor.shape, str(tensor.dtype))
        for module in modules
        for name, tensor in named_parameters(module).items()
    ]
    device = (str(mx.default_device()), mx.device_info().get("device_name"), platform.processor())
    known = repr((what, tensors, device, version("mlx"), __version__))
    return hashlib.sha256(known.encode()).hexdigest()[:32]
