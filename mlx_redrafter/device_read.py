"""Read values of MLX arrays on the host, which blocks until MLX has computed them.

No other module of the decoding step reads arrays, or waits for them.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

# Times at which threads began to wait, in seconds of `time.monotonic`, by thread.
_waiting: dict[int, float] = {}


def to_ints(values: mx.array) -> list[int]:
    """Read an integer or bool array of shape (n,)."""
    with waiting():
        return cast("list[int]", values.tolist())


def to_rows(values: mx.array) -> list[list[int]]:
    """Read an integer or bool array of shape (n, m)."""
    with waiting():
        return cast("list[list[int]]", values.tolist())


def to_floats(values: mx.array) -> list[float]:
    """Read a floating-point array of shape (n,)."""
    with waiting():
        return cast("list[float]", values.tolist())


def as_rows(values: mx.array) -> npt.NDArray[np.float32]:
    """View a float32 array of shape (n, m) where it is, without a copy."""
    with waiting():
        return np.asarray(values)


def wait_for(arrays: Any) -> None:
    with waiting():
        mx.eval(arrays)


def longest_wait() -> float:
    """Return the seconds for which a thread has been waiting; 0 if none waits."""
    now = time.monotonic()
    return max((now - since for since in list(_waiting.values())), default=0.0)


@contextmanager
def waiting() -> Iterator[None]:
    """Count what happens inside, which may block, as a wait of this thread."""
    thread = threading.get_ident()
    if thread in _waiting:
        yield
        return
    _waiting[thread] = time.monotonic()
    try:
        yield
    finally:
        del _waiting[thread]
