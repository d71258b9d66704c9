"""A drafter's weights in 8 bits, where it drafts faster with them on this device.

The text does not depend on it, and drafts hardly do. Where reading the weights is what drafting
takes, as on GPUs, half the bytes are half the time; where unpacking them is, they are not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from statistics import median

import mlx.core as mx

from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.measured import Timed, load_or_measure
from mlx_redrafter.proposers.redrafter.beam import expand
from mlx_redrafter.proposers.redrafter.checkpoint import copy_drafter, quantize_drafter
from mlx_redrafter.proposers.redrafter.input_table import input_lookup
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.target import Target

logger = logging.getLogger(__name__)

# The search that is timed.
SHAPE = DraftShape(2, 8)
BITS = 8
GROUP_SIZE = 64
# How much faster 8 bits must be, so that no noise decides.
GAIN = 1.1
# Drafts timed of either, in turns, after one that is not; fewer where these take so many seconds.
ROUNDS = 5
ENOUGH = 2.0
GIVEN, QUANTISED = "given", f"{BITS} bits"


def choose_precision(drafter: Drafter, target: Target) -> Drafter:
    """The drafter, or a copy with quantised weights if that drafts faster here.

    Timed once per drafter and machine, which takes a moment, and kept. A drafter that is quantised
    already stays as it is, and so does one of which no layer is a multiple of a group wide.

    Args:
        drafter: The drafter.
        target: The model it drafts for.
    """
    if bits_of(drafter) is not None or drafter.config.head_rows < SHAPE.width:
        return drafter

    def measure() -> Timed:
        return Timed(time_drafts({GIVEN: drafter, QUANTISED: quantised_copy(drafter)}, target))

    try:
        seconds = load_or_measure(("drafts", SHAPE), [drafter], (GIVEN, QUANTISED), measure)
    except ConfigError:
        return drafter
    if seconds[QUANTISED] * GAIN > seconds[GIVEN]:
        return drafter
    logger.info(
        "the drafter is used in %d bits: a tree of drafts takes %.1f ms, and %.1f ms as it is",
        BITS,
        1e3 * seconds[QUANTISED],
        1e3 * seconds[GIVEN],
    )
    quantised = quantised_copy(drafter)
    mx.eval(quantised.parameters())
    return quantised


def bits_of(drafter: Drafter) -> int | None:
    """Bits of quantised weights; None where there are none."""
    return None if drafter.quantization is None else drafter.quantization["bits"]


def quantised_copy(drafter: Drafter) -> Drafter:
    """A copy in 8 bits, not computed yet.

    Raises:
        ConfigError: No layer can be quantised so.
    """
    copy = copy_drafter(drafter)
    quantize_drafter(copy, BITS, GROUP_SIZE)
    return copy


def time_drafts(drafters: Mapping[str, Drafter], target: Target) -> dict[str, float]:
    """Median seconds that drafting the largest shape takes. Waits for the device."""
    root = mx.zeros((1,), dtype=mx.int32)
    enter = {name: input_lookup(drafter, target) for name, drafter in drafters.items()}
    times: dict[str, list[float]] = {name: [] for name in drafters}
    deadline = time.perf_counter() + ENOUGH
    for done in range(1 + ROUNDS):
        if done > 1 and time.perf_counter() > deadline:
            break
        for name, drafter in drafters.items():
            hidden = mx.zeros((drafter.config.hidden_size,), dtype=drafter.dtype)
            start = time.perf_counter()
            mx.eval(expand(drafter, enter[name], hidden, root, SHAPE))
            times[name].append(time.perf_counter() - start)
    return {name: median(found[1:]) for name, found in times.items()}
