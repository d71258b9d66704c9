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

from mlx_redrafter.checkpoint import named_parameters, write_atomically
from mlx_redrafter.version import __version__

logger = logging.getLogger(__name__)

# No step takes longer.
MOST_SECONDS = 3600.0
# Measurements of what was disturbed, each in a run of its own; the fastest times of all count.
MOST_RUNS = 3
RUNS_LEFT = "runs left"


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
    path = cache_folder() / f"{_fingerprint(what, modules)}.json"
    seconds, runs = _read(path, keys)
    if not runs:
        return seconds
    if seconds:
        logger.info("other work disturbed the last timing; the fastest times of both count")
    timed = measure()
    seconds = {key: min(taken, seconds.get(key, taken)) for key, taken in timed.seconds.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(seconds | ({RUNS_LEFT: runs - 1} if timed.is_doubtful else {}))
        write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    except OSError as error:
        logger.warning("what was timed is not kept for the next run: %s", error)
    return seconds


def _read(path: Path, keys: Collection[str]) -> tuple[dict[str, float], int]:
    """The seconds in a file, and how many more runs may measure them; none where it is damaged."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        runs = range(MOST_RUNS).index(stored.get(RUNS_LEFT, 0))
        return {key: _check_seconds(stored[key]) for key in keys}, runs
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):
        return {}, MOST_RUNS


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
