"""Memory of decoding, beyond what is there when it is under way."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx


def peak_of(work: Callable[[], object], repeats: int = 3) -> int:
    """Bytes in use at the peak of ``work``, beyond those before it: the largest of ``repeats``.

    MLX's threads free the arrays of work that is over a little later, those of other tests too.
    What they free meanwhile is missing from a peak, so that the largest is nearest the truth.
    """
    peaks = []
    for _ in range(repeats):
        gc.collect()
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        work()
        peaks.append(int(mx.get_peak_memory()) - before)
    return max(peaks)


def peak_of_steps(responses: Iterator[Any], first: int, steps: int = 30) -> int:
    """Bytes in use at the peak of ``steps`` responses, beyond those after the ``first`` ones."""
    for _ in range(first):
        next(responses)
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(steps):
        next(responses)
    return int(mx.get_peak_memory()) - before
