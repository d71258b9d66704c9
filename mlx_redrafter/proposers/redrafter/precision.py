"""A drafter's weights in 8 bits, or unpacked, if it drafts faster with them on this machine.

The text does not depend on them, and the drafts hardly do. Half the bytes cost half the time if
reading the weights bounds drafting, as on GPUs; on CPUs unpacking them costs as much.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from statistics import mean

import mlx.core as mx
from mlx_lm.utils import dequantize_model

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.measured import load_or_time
from mlx_redrafter.proposers.quantization import quantization_of, quantize_drafter
from mlx_redrafter.proposers.redrafter.network import Drafter, RecurrentLevels, input_lookup
from mlx_redrafter.proposers.search import search_all
from mlx_redrafter.target.target import Target

logger = logging.getLogger(__name__)

SHAPE = DraftShape(2, 8)
BITS = 8
# Weights per scale.
GROUP_SIZE = 64
# Size in bytes of the smallest drafter to time. Reading a smaller one costs less than MLX needs to
# dispatch its operations: 0.1 ms of memory at 100 GB/s.
MIN_BYTES = 2**23
# Minimum speedup of a search. A smaller one is within the spread of paired timings.
GAIN = 1.1
# Share of pairs with that speedup from which the quantised drafter is used.
CLEAR = 0.75
# Share of the first run's pairs above which a later run times more.
DOUBTFUL = 0.25
# Number of timed pairs, after a warm-up of both drafters.
PAIRS = 9
# Number of pairs that are timed however long they last.
MIN_PAIRS = 3
# Seconds of timing after which no pair follows.
ENOUGH = 2.0

# Seconds of a search by drafter, "given" or "quantised".
Pair = Mapping[str, float]


def time_pairs(given: Drafter, quantised: Drafter, target: Target) -> Sequence[Pair]:
    """Time pairs of searches in alternating order; waits for the device."""
    root = mx.zeros((1,), dtype=mx.int32)
    drafters = {"given": given, "quantised": quantised}
    inputs = {name: input_lookup(drafter, target) for name, drafter in drafters.items()}

    def seconds(name: str) -> float:
        drafter = drafters[name]
        hidden = mx.zeros((1, drafter.config.hidden_size), dtype=drafter.dtype)
        start = time.perf_counter()
        mx.eval(search_all(RecurrentLevels(drafter, inputs[name], hidden, root), SHAPE))
        return time.perf_counter() - start

    order = list(drafters)
    for name in order:
        seconds(name)
    pairs: list[Pair] = []
    deadline = time.perf_counter() + ENOUGH
    while len(pairs) < MIN_PAIRS or (len(pairs) < PAIRS and time.perf_counter() < deadline):
        order.reverse()
        pairs.append({name: seconds(name) for name in order})
    return pairs


def choose_precision(drafter: Drafter, target: Target) -> Drafter:
    """Return the drafter, or a copy with quantised or unpacked weights if that drafts faster here.

    The first run on a machine times both. If the copy may be faster, the next run times them again,
    and the pairs of both runs decide for good. A quantised drafter is unpacked in place on a CPU,
    where MLX multiplies float32 weights faster.
    """
    if quantization_of(drafter) is not None:
        if mx.default_device() == mx.Device(mx.cpu):
            dequantize_model(drafter)
            drafter.set_dtype(mx.float32)
            mx.eval(drafter.parameters())
        return drafter
    num_bytes = sum(array.nbytes for array in named_parameters(drafter).values())
    if num_bytes < MIN_BYTES or drafter.num_rows < SHAPE.width:
        return drafter
    try:
        quantised = quantised_copy(drafter)
    except ConfigError:
        return drafter
    pairs = load_or_time(
        ("drafts", SHAPE, BITS),
        [drafter],
        ("given", "quantised"),
        lambda pairs: _share_faster(pairs) > DOUBTFUL,
        lambda: time_pairs(drafter, quantised, target),
    )
    if _share_faster(pairs) < CLEAR:
        return drafter
    logger.info("the drafter is used in %d bits, with which it drafts faster here", BITS)
    mx.eval(quantised.parameters())
    return quantised


def _share_faster(pairs: Sequence[Pair]) -> float:
    """Return the share of pairs in which the quantised drafter is faster by GAIN."""
    return mean(pair["given"] > GAIN * pair["quantised"] for pair in pairs)


def quantised_copy(drafter: Drafter) -> Drafter:
    """Make a copy in 8 bits, not computed yet."""
    copy = Drafter(drafter.config)
    copy.update(drafter.parameters())
    copy.eval()
    quantize_drafter(copy, BITS, GROUP_SIZE)
    return copy
