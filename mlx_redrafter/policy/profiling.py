"""What a step of every shape costs on this machine, timed once and remembered.

Whole steps of the running decoder are timed: what the host does, and what it does beside the
device, counts where a forward pass takes little time.

Axes: W beam width, L beam length, N tree nodes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import closing
from statistics import mean

import mlx.core as mx

from mlx_redrafter.config import SamplingParams, TreeShape
from mlx_redrafter.decoding.sampling import GumbelNoise, KeyedChooser
from mlx_redrafter.decoding.text import Decoder, Request
from mlx_redrafter.policy.adaptive import LONGEST, SHORTEST, SIZES, TREES, Drafts
from mlx_redrafter.policy.timing_cache import load_or_measure
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.target import Target

logger = logging.getLogger(__name__)

# What is timed: trees of all sizes and of the greatest length, and the smallest of the least, as a
# level of drafting takes the same whatever is verified.
SMALLEST = TREES[SHORTEST][SIZES[0]]
TIMED = (None, *TREES[LONGEST].values(), SMALLEST)

# Tokens in the cache while timing. A long context is only timed for a text that begins with at
# least so many tokens; how steps take longer as a text grows shows while decoding.
CONTEXT = 128
LONG_CONTEXT = 2048
LEAST_LONG = 512
# Rounds over all shapes, and steps of a shape in a row; the fastest turn counts, as the others were
# disturbed.
ROUNDS = 2
STEPS = 6

Seconds = dict[TreeShape | None, float]


def step_costs(target: Target, drafter: Drafter, length: int = CONTEXT) -> Seconds:
    """Seconds per step by shape, of plain decoding under None; timed unless a file knows them.

    Times take a few seconds and are kept per model, dtype, drafter, device and MLX version in the
    user's cache folder. Attention takes time in proportion to the context, so what a long one adds
    is timed once and scaled.

    Args:
        target: The model.
        drafter: Its drafter.
        length: Tokens that the text begins with.
    """
    short, *long = [_known_costs(target, drafter, context) for context in contexts(target, length)]
    seconds = short
    if long:
        share = (length - CONTEXT) / (LONG_CONTEXT - CONTEXT)
        seconds = {
            shape: timed + share * max(0.0, long[0][shape] - timed)
            for shape, timed in short.items()
        }
    # What drafting takes does not depend on the context.
    return _of_all_lengths(seconds, _level_seconds(short))


def contexts(target: Target, length: int) -> list[int]:
    """The contexts to time for a text that begins with ``length`` tokens."""
    # A model with little more than the long one need not know the positions that timing uses.
    knows_long = target.context_length is None or target.context_length >= 2 * LONG_CONTEXT
    return [CONTEXT, LONG_CONTEXT] if length >= LEAST_LONG and knows_long else [CONTEXT]


def time_steps(target: Target, drafter: Drafter, context: int = CONTEXT) -> Seconds:
    """Time steps of the shapes `TIMED` in a text of no meaning. Waits for the device.

    Args:
        target: The model.
        drafter: Its drafter.
        context: Tokens before the steps.
    """
    schedule = _Schedule()
    chooser = _Contrary(SamplingParams(), target.vocab_size)
    decoder = Decoder(target, target.blank_cache(context), chooser, drafter, schedule)
    with closing(decoder.decode(Request([0]))) as tokens:  # type: ignore[type-var]
        while schedule.missing:
            next(tokens)
    return schedule.seconds


def _known_costs(target: Target, drafter: Drafter, context: int) -> Seconds:
    shapes = {_key(shape): shape for shape in TIMED}

    def measure() -> dict[str, float]:
        logger.info(
            "timing what steps take on this machine after %d tokens, once for this model and "
            "drafter",
            context,
        )
        seconds = time_steps(target, drafter, context)
        return {key: seconds[shape] for key, shape in shapes.items()}

    seconds = load_or_measure((TIMED, context), (target.model, drafter), shapes, measure)
    return {shape: seconds[key] for key, shape in shapes.items()}


def _level_seconds(timed: Seconds) -> float:
    """What drafting a level takes."""
    smallest = TREES[LONGEST][SIZES[0]]
    levels = LONGEST.beam_length - SHORTEST.beam_length
    return max(0.0, timed[smallest] - timed[SMALLEST]) / levels


def _of_all_lengths(timed: Seconds, level_seconds: float) -> Seconds:
    """Seconds of all candidates, from those of the longest."""
    seconds: Seconds = {None: timed[None]}
    for tree, shapes in TREES.items():
        saved = (LONGEST.beam_length - tree.beam_length) * level_seconds
        for size, shape in shapes.items():
            # No step with drafts is shorter than one without.
            seconds[shape] = max(timed[TREES[LONGEST][size]] - saved, timed[None])
    return seconds


class _Contrary(KeyedChooser):
    """Chooses what no drafter proposes, so that the text grows by one token a step.

    Where drafts are accepted, the shapes that come last meet hundreds of tokens more than the
    first, which costs the largest trees most.
    """

    def choose(
        self,
        log_probs: mx.array,
        depths: mx.array,
        noise: GumbelNoise | None,
        beam_length: int,
    ) -> mx.array:
        """The least probable tokens."""
        return mx.argmin(log_probs, axis=-1)


class _Schedule:
    """A controller that lets every shape have its turns, and remembers what their steps took.

    A plain step is dispatched before the outcome of the one before is read, a draft likewise; so
    the first and the last step of a turn are partly ones of the shapes beside them.
    """

    def __init__(self) -> None:
        self.missing = ROUNDS * len(TIMED) * STEPS
        self._left = (s for _ in range(ROUNDS) for s in TIMED for _ in range(STEPS))
        self._times: list[float] = []

    def choose(self) -> TreeShape | None:
        """See `DraftPolicy.choose`."""
        return next(self._left, None)

    def cut(self, shape: TreeShape, read: Callable[[], Drafts]) -> TreeShape:
        """See `DraftPolicy.cut`; waits for the scores as decoding does."""
        read()
        return shape

    def observe(self, shape: TreeShape | None, accepted: int, seconds: float | None) -> None:
        """See `DraftPolicy.observe`."""
        self._times.append(math.inf if seconds is None else seconds)
        self.missing -= 1

    @property
    def seconds(self) -> Seconds:
        """Mean of the inner steps of a turn, of the fastest turn."""
        turns = [self._times[i : i + STEPS] for i in range(0, len(self._times), STEPS)]
        means = [mean(turn[2:-1]) for turn in turns]
        return {shape: min(means[i :: len(TIMED)]) for i, shape in enumerate(TIMED)}


def _key(shape: TreeShape | None) -> str:
    if shape is None:
        return "plain"
    return f"{shape.beam_width}x{shape.beam_length}:{shape.tree_nodes}"
