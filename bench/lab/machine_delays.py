"""Plain and drafted texts over ranks whose messages come later, as over a slower network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_redrafter.bench.lab.machine_ends import SCRIPT
from mlx_redrafter.bench.lab.ranks import started
from mlx_redrafter.bench.plots import figure
from mlx_redrafter.errors import ResourceError

Times = Mapping[str, Any]


def time_with_delay(model: str, drafter: str, size: int, delay: float) -> Times:
    """Time texts over local ranks, every message of which is sent ``delay`` ms later.

    Raises:
        ResourceError: The ranks have failed, such as without a C compiler for the delay.
    """
    arguments = ["-m", SCRIPT, "time", model, drafter]
    with started(arguments, size, RING_DELAY_US=str(round(1e3 * delay))) as ranks:
        ended = ranks.wait(600.0)
    if any(one.code for one in ended):
        raise ResourceError(f"expected times, found {ended[0].out[-200:]!r}; look at its cause")
    found: Times = json.loads(ended[0].out.splitlines()[-1])
    return {"delay_ms": delay, **found}


def plot_delays(path: Path, found: Sequence[Times], heading: str) -> Path:
    """Draw milliseconds per token, plain and drafted, against the delay."""
    delays = [one["delay_ms"] for one in found]
    drafted = [one["drafted_ms"] / one["tokens_per_step"] for one in found]
    with figure(path, heading) as axes:
        axes.plot(delays, [one["plain_ms"] for one in found], marker="o", label="plain")
        axes.plot(delays, drafted, marker="o", label="drafted")
        axes.set_xlabel("delay of every message, ms")
        axes.set_ylabel("ms per token")
        axes.set_ylim(bottom=0)
        axes.legend()
    return path
