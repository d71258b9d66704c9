"""Step times of every plan on this machine, measured once and remembered.

Whole steps of running decoding are timed: the host's work, and what it does beside the device,
count where a forward pass takes little time.

Axes: W beam width, L beam length, N tree nodes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import closing
from statistics import mean

import mlx.core as mx

from mlx_redrafter.config import DraftPlan, SamplingParams
from mlx_redrafter.decoding.protocols import Drafting, Proposer, Step
from mlx_redrafter.decoding.records import InFlight, Request
from mlx_redrafter.decoding.sampling import GumbelNoise, KeyedChooser
from mlx_redrafter.decoding.text import Text, decode
from mlx_redrafter.policy.adaptive import LONGEST, LOOKUPS, SHORTEST, SIZES, TREES
from mlx_redrafter.policy.timing_cache import load_or_measure
from mlx_redrafter.target.target import Target
from mlx_redrafter.tree import TokenTree

logger = logging.getLogger(__name__)

# Plans timed for a network: trees of all sizes and of the greatest length, and the smallest of the
# least, as a level of drafting takes the same whatever is verified.
SMALLEST = TREES[SHORTEST][SIZES[0]]
TIMED = (None, *TREES[LONGEST].values(), SMALLEST)
# Plans timed where drafts come out of the text.
TIMED_LOOKUPS = (None, *LOOKUPS.values())

# Tokens in the cache while timing. A long context is only timed for a text that begins with at
# least LEAST_LONG tokens; slowdowns of a growing text show while decoding.
CONTEXT = 128
LONG_CONTEXT = 2048
LEAST_LONG = 512
# Rounds over all plans, and steps of a plan in a row; the fastest turn counts, as the others were
# disturbed.
ROUNDS = 2
STEPS = 6

Seconds = dict[DraftPlan | None, float]


def step_costs(
    target: Target,
    proposer: Proposer | None,
    length: int = CONTEXT,
    known: dict[int, Seconds] | None = None,
) -> Seconds:
    """Seconds per step by plan, of plain decoding under None; timed unless a file knows them.

    Times take a few seconds and are kept per model, dtype, proposer, device and MLX version in the
    user's cache folder. Attention takes time in proportion to the context, so the part of a long
    one is timed once and scaled.

    Args:
        target: The model.
        proposer: A network that drafts for it; None where drafts come out of the text.
        length: Tokens that the text begins with.
        known: Times of these networks by context, for those that are asked for again.
    """
    known = {} if known is None else known
    for context in contexts(target, length):
        if context not in known:
            known[context] = _known_costs(target, proposer, context)
    short, *long = [known[context] for context in contexts(target, length)]
    seconds = short
    if long:
        share = (length - CONTEXT) / (LONG_CONTEXT - CONTEXT)
        seconds = {
            plan: timed + share * max(0.0, long[0][plan] - timed) for plan, timed in short.items()
        }
    # The time of drafting does not depend on the context.
    return seconds if proposer is None else _of_all_lengths(seconds, _level_seconds(short))


def lookup_costs(costs: Seconds) -> Seconds:
    """Seconds of plans with drafts out of the text, from the `step_costs` of a network."""
    saved = costs[LONGEST] - costs[TREES[SHORTEST][LONGEST.num_nodes]]
    per_level = saved / (LONGEST.shape.levels - SHORTEST.shape.levels)
    drafting = per_level * LONGEST.shape.levels
    return {
        plan: max(costs[TREES[LONGEST][size]] - drafting, costs[None])
        for size, plan in LOOKUPS.items()
    }


def contexts(target: Target, length: int) -> list[int]:
    """The contexts to time for a text that begins with ``length`` tokens."""
    # A model with little more than the long one need not know the positions that timing uses.
    knows_long = target.context_length is None or target.context_length >= 2 * LONG_CONTEXT
    return [CONTEXT, LONG_CONTEXT] if length >= LEAST_LONG and knows_long else [CONTEXT]


def time_steps(target: Target, proposer: Proposer | None, context: int = CONTEXT) -> Seconds:
    """Time steps of the plans `TIMED` in a text of no meaning. Waits for the device.

    Args:
        target: The model.
        proposer: A network that drafts for it; None where drafts come out of the text, for steps
            of the plans `TIMED_LOOKUPS`.
        context: Tokens before the steps.
    """
    schedule = _Schedule(TIMED_LOOKUPS if proposer is None else TIMED)
    chooser = _Contrary(SamplingParams(), target.vocab_size)
    drafting: Drafting = _Junk() if proposer is None else proposer.open(target, [0], True, [])
    text = Text(target, target.blank_cache(context), chooser, Request([0]), drafting, schedule)
    with closing(decode(text)) as tokens:  # type: ignore[type-var]
        while schedule.missing:
            next(tokens)
    return schedule.seconds


def _known_costs(target: Target, proposer: Proposer | None, context: int) -> Seconds:
    timed = TIMED_LOOKUPS if proposer is None else TIMED
    plans = {_key(plan): plan for plan in timed}
    modules = () if proposer is None else proposer.modules

    def measure() -> dict[str, float]:
        logger.info(
            "timing what steps take on this machine after %d tokens, once for this model and %s",
            context,
            "drafts out of the text" if proposer is None else "drafter",
        )
        seconds = time_steps(target, proposer, context)
        return {key: seconds[plan] for key, plan in plans.items()}

    seconds = load_or_measure((timed, context), (target.model, *modules), plans, measure)
    return {plan: seconds[key] for key, plan in plans.items()}


def _level_seconds(timed: Seconds) -> float:
    """Time of drafting a level."""
    smallest = TREES[LONGEST][SIZES[0]]
    levels = LONGEST.shape.levels - SHORTEST.shape.levels
    return max(0.0, timed[smallest] - timed[SMALLEST]) / levels


def _of_all_lengths(timed: Seconds, level_seconds: float) -> Seconds:
    """Seconds of all candidates, from those of the longest."""
    seconds: Seconds = {None: timed[None]}
    for tree, plans in TREES.items():
        saved = (LONGEST.shape.levels - tree.shape.levels) * level_seconds
        for size, plan in plans.items():
            # No step with drafts is shorter than one without.
            seconds[plan] = max(timed[TREES[LONGEST][size]] - saved, timed[None])
    return seconds


class _Contrary(KeyedChooser):
    """Chooses tokens that no drafter proposes, so that the text grows by one token a step.

    Where drafts are accepted, the plans that come last meet hundreds of tokens more than the
    first, which costs the largest trees most.
    """

    def sample(
        self,
        log_probs: mx.array,
        depths: mx.array,
        noise: GumbelNoise | None,
        num_levels: int,
    ) -> mx.array:
        """The least probable tokens."""
        return mx.argmin(log_probs, axis=-1)


class _Junk:
    """Drafts without meaning, made by the host once it knows the text, as those of a lookup."""

    def outlook(self) -> Sequence[float]:
        """See `Drafting.outlook`."""
        return [1.0]

    def propose(self, flight: InFlight, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        """See `Drafting.propose`; a chain."""
        drafts = range(plan.num_nodes - 1)
        scores = [-1.0 * node for node in drafts]
        return TokenTree.of([flight.tokens[-1], *(0 for _ in drafts)], [0, *drafts], scores)

    def skip(self, flight: InFlight) -> None:
        """See `Drafting.skip`."""

    def settle(self, length: int) -> None:
        """See `Drafting.settle`."""


class _Schedule:
    """A policy that lets every plan have its turns, and remembers the time of their steps.

    A plain step is dispatched before the outcome of the one before is read, a draft likewise; so
    the first and the last step of a turn are partly ones of the plans beside them.
    """

    def __init__(self, timed: Sequence[DraftPlan | None]):
        self.missing = ROUNDS * len(timed) * STEPS
        self._timed = timed
        self._left = (plan for _ in range(ROUNDS) for plan in timed for _ in range(STEPS))
        self._times: list[float] = []

    def choose(self, outlook: Sequence[float] | None) -> DraftPlan | None:
        """See `DraftPolicy.choose`."""
        return next(self._left, None)

    def keep(self, plan: DraftPlan, tree: TokenTree) -> int:
        """See `DraftPolicy.keep`; waits for the scores as decoding does."""
        tree.read()
        return tree.size

    def observe(self, step: Step) -> None:
        """See `DraftPolicy.observe`."""
        self._times.append(math.inf if step.seconds is None else step.seconds)
        self.missing -= 1

    @property
    def seconds(self) -> Seconds:
        """Mean of the inner steps of a turn, of the fastest turn."""
        turns = [self._times[i : i + STEPS] for i in range(0, len(self._times), STEPS)]
        means = [mean(turn[2:-1]) for turn in turns]
        return {plan: min(means[i :: len(self._timed)]) for i, plan in enumerate(self._timed)}


def _key(plan: DraftPlan | None) -> str:
    if plan is None:
        return "plain"
    return f"{plan.shape.width}x{plan.shape.length}:{plan.num_nodes}"
