"""Timings on this machine, kept in the user's cache folder until something changes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.checkpoint_files import named_parameters, write_atomically
from mlx_redrafter.version import __version__

logger = logging.getLogger(__name__)

# Seconds of a step that no machine needs: stored times of an hour or more are damaged.
MOST_SECONDS = 3600.0
# Number of runs that time steps which other work disturbed; the fastest times of all count.
MOST_RUNS = 3
# Key of the number of further runs that may time.
RUNS_LEFT = "runs left"
# Key of the number of times that steps in use were faster than the stored times.
DOUBTS = "doubts"
# Number of doubts that lead to new timings: parts of steps may seem faster in use for ever.
MOST_DOUBTS = 2
# Key of the ratios of paired timings.
RATIOS = "ratios"


# Errors of files that are missing or damaged.
DAMAGED = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)


class Timed(NamedTuple):
    """A measurement.

    Attributes:
        seconds: Seconds by key.
        is_doubtful: Whether other work disturbed it, so that the next run measures again.
    """

    seconds: Mapping[str, float]
    is_doubtful: bool = False


def load_or_measure(
    what: object,
    modules: Collection[nn.Module],
    keys: Collection[str],
    measure: Callable[[], Timed],
) -> dict[str, float]:
    """Return the stored seconds by key, or measure and store them.

    If other work disturbed a measurement, the next runs repeat it, `MOST_RUNS` in all.

    Args:
        what: Description of the measurement; its ``repr`` is part of the file's name, and so are
            names, shapes and dtypes of the weights, the device, and the versions of MLX and of this
            package.
        modules: Networks that are timed.
        keys: Names of the seconds.
        measure: Function that measures.
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
    """Let the next run measure again, as steps in use are faster than the stored seconds.

    The arguments are those of `load_or_measure`.

    Returns:
        Whether it will. It will not after `MOST_DOUBTS` such calls, or if the file cannot be
        written.
    """
    path = _path(what, modules)
    stored = _read(path, keys)
    if not stored.seconds or stored.doubts == MOST_DOUBTS:
        return False
    return _write(path, Stored(stored.seconds, max(1, stored.runs), stored.doubts + 1))


def load_or_compare(
    what: object, modules: Collection[nn.Module], time_pairs: Callable[[], list[float]], gain: float
) -> bool:
    """Return whether one of two ways is faster by a margin, from paired timings kept in a file.

    A load that changes in between shifts both timings of a pair alike. If at least a quarter of the
    pairs are beyond the margin, the next run times pairs once more, and all pairs decide for good:
    one disturbed moment does not. Three quarters of the pairs have to be beyond the margin.

    Args:
        what: As in `load_or_measure`.
        modules: As in `load_or_measure`.
        time_pairs: Function that returns, for several pairs, the seconds of the slower way over
            those of the faster one.
        gain: The margin, a ratio above 1.
    """
    path = _path(what, modules)
    ratios, runs = _read_ratios(path)
    if runs:
        is_first = not ratios
        ratios = [*ratios, *time_pairs()]
        may_gain = quantiles(ratios, n=4)[2] > gain
        _write_values(path, {RATIOS: ratios, RUNS_LEFT: int(is_first and may_gain)})
    return quantiles(ratios, n=4)[0] > gain


class Stored(NamedTuple):
    """Content of a file.

    Attributes:
        seconds: Seconds by key, none if the file is damaged.
        runs: Number of further runs that may measure them.
        doubts: Number of times that steps in use were faster.
    """

    seconds: dict[str, float]
    runs: int
    doubts: int


def _write(path: Path, stored: Stored) -> bool:
    counts = {name: n for name, n in ((RUNS_LEFT, stored.runs), (DOUBTS, stored.doubts)) if n}
    return _write_values(path, {**stored.seconds, **counts})


def _write_values(path: Path, values: Mapping[str, object]) -> bool:
    """Write a file, or warn; return whether it is written."""
    text = json.dumps(values)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    except OSError as error:
        logger.warning("timings are not kept for the next run: %s", error)
        return False
    return True


def _read(path: Path, keys: Collection[str]) -> Stored:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        runs = range(MOST_RUNS).index(stored.get(RUNS_LEFT, 0))
        doubts = range(MOST_DOUBTS + 1).index(stored.get(DOUBTS, 0))
        return Stored({key: _check_seconds(stored[key]) for key in keys}, runs, doubts)
    except DAMAGED:
        return Stored({}, MOST_RUNS, 0)


def _read_ratios(path: Path) -> tuple[list[float], int]:
    """Read ratios of pairs, and the number of further runs that may time; none from a bad file."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        ratios = [_check_seconds(ratio) for ratio in stored[RATIOS]]
        runs = range(2).index(stored[RUNS_LEFT])
        quantiles(ratios, n=4)
        return ratios, runs
    except DAMAGED:
        return [], 1


def _path(what: object, modules: Collection[nn.Module]) -> Path:
    return cache_folder() / f"{_fingerprint(what, modules)}.json"


def cache_folder() -> Path:
    """Return the folder of stored timings: ``mlx-redrafter`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-redrafter"


def _check_seconds(value: object) -> float:
    """Return the time in seconds, or raise ValueError if no step can have taken it."""
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
