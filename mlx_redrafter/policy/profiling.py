"""Measure the costs of steps on this machine, once, and store them.

Whole steps of running decoding are timed, because the host's work counts if a forward pass is
short.

Axes: W beam width, L beam length, N tree nodes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from statistics import mean
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.decoding.decode import decode
from mlx_redrafter.decoding.protocols import Drafting, Proposer, Step
from mlx_redrafter.decoding.records import PendingPass, Request
from mlx_redrafter.decoding.sampling import GumbelNoise, KeyedSampler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.generation_options import Quantisation, SamplingParams
from mlx_redrafter.kernels.layers import choices
from mlx_redrafter.measured import Timed, load_or_measure, measure_again
from mlx_redrafter.policy.plans import LOOKUP, SIZES
from mlx_redrafter.policy.step_costs import StepCosts
from mlx_redrafter.proposers.speculate_ahead import SpeculateAhead
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree

logger = logging.getLogger(__name__)


class Kind(NamedTuple):
    """A kind of step to time.

    Attributes:
        plan: Plan of its drafts; None for plain decoding.
        waits: Whether the host reads the drafts before the target verifies them.
        verifies: Whether the target verifies any.
    """

    plan: DraftPlan | None
    waits: bool = False
    verifies: bool = True

    def __str__(self) -> str:
        if self.plan is None:
            return "plain"
        shape = self.plan.shape
        read, only = " read" * self.waits, " drafted only" * (not self.verifies)
        return f"{shape.width}x{shape.length}:{self.plan.num_nodes}{read}{only}"

    def does_as_much(self, other: Kind) -> bool:
        """Whether a step of this kind does all the work of the other's."""
        if self.plan is None or other.plan is None:
            return other.plan is None
        mine, its = self.plan.shape, other.plan.shape
        return (
            mine.width >= its.width
            and mine.length >= its.length
            and self.plan.num_nodes >= other.plan.num_nodes
            and self.waits >= other.waits
            and self.verifies >= other.verifies
        )


# Beam width of the search that is timed with trees of all sizes, and without verification.
WIDTH = 2
# Number of nodes of the trees in the other timings.
FEW = 3
# Shape of that search.
BASE = DraftShape(WIDTH, 6)
# Length of the short search of every width; the cost of a level follows from both lengths.
SHORT = 3
# Length of the long search of every width.
LONG = 9
# Widths of those searches; the costs of others are interpolated.
TIMED_WIDTHS = (1, WIDTH, 4)

PLAIN = Kind(None)
UNTIMED = Kind(None, waits=True)
VERIFY = {size: Kind(DraftPlan(BASE, size)) for size in SIZES}
SEARCH = {
    (width, length): Kind(DraftPlan(DraftShape(width, length), FEW))
    for width in TIMED_WIDTHS
    for length in (SHORT, LONG)
}
READ = Kind(DraftPlan(BASE, FEW), waits=True)
DRAFT = Kind(DraftPlan(BASE, FEW), verifies=False)
TIMED = (PLAIN, *VERIFY.values(), *SEARCH.values(), READ, DRAFT)
# Steps of prompt lookup to time, by number of nodes.
LOOKUPS = {size: Kind(DraftPlan(LOOKUP.shape, size, from_text=True), waits=True) for size in SIZES}

TIMED_LOOKUPS = (PLAIN, *LOOKUPS.values())

# Tokens in the cache while timing.
CONTEXT = 128
# The same for the second timing, of sequences that begin with a long prompt.
LONG_CONTEXT = 2048
# Minimum length of such a prompt, in tokens; costs that grow later show while decoding.
MIN_LONG = 512
# Number of rounds over all kinds; the fastest turn counts, as other work disturbed the others.
ROUNDS = 2
# Number of steps of a kind in a row, which are one turn.
STEPS = 5
# Relative difference between the two fastest turns of a kind that demands another round.
DOUBT = 0.15
# Maximum number of rounds.
MAX_ROUNDS = 4
# Seconds after which doubt demands no further round: long steps are hardly disturbed.
PATIENCE = 10.0
# Minimum cost of verification, in plain steps, which read as many weights. On the smallest models
# noise would leave less than nothing once the cost of drafting is subtracted.
MIN_VERIFY = 0.8
# Minimum cost of reading the drafts, in seconds: the host's part, for the same reason.
MIN_WAIT = 15e-5

Seconds = dict[Kind, float]
# Costs by whether a network drafts, context in tokens, and quantisation of the K/V entries.
Known = dict[tuple[bool, int, Quantisation | None], Seconds]


class StepTimes(NamedTuple):
    """Costs of steps, and whether other work seems to have disturbed the timing."""

    seconds: Seconds
    is_doubtful: bool = False


def step_costs(
    target: Target,
    proposer: Proposer | None,
    length: int = CONTEXT,
    known: Known | None = None,
    quantisation: Quantisation | None = None,
) -> StepCosts:
    """Return the costs of steps by their parts; time them unless they are stored.

    Timing needs some seconds. The user's cache folder stores the costs per model, dtype, kernels,
    proposer, device and MLX version. The cost of attention is proportional to the context, so one
    long context is timed and scaled.

    Args:
        target: The model.
        proposer: A network that drafts for it; None for prompt lookup.
        length: Number of tokens that the sequence begins with.
        known: Costs measured or read so far, for this model and network.
        quantisation: Quantisation of all K/V entries; None for none.
    """
    known = {} if known is None else known
    keys = [(proposer is not None, context, quantisation) for context in contexts(target, length)]
    for key in keys:
        if key not in known:
            known[key] = _known_seconds(target, proposer, key[1], quantisation)
    short, *long = [known[key] for key in keys]
    seconds = short
    if long:
        share = (length - CONTEXT) / (LONG_CONTEXT - CONTEXT)
        seconds = {
            kind: timed + share * max(0.0, long[0][kind] - timed) for kind, timed in short.items()
        }
    if proposer is None:
        return StepCosts(seconds[PLAIN], {size: seconds[kind] for size, kind in LOOKUPS.items()})
    # The cost of drafting does not depend on the context.
    return _by_parts(seconds, short, proposer.max_length)


def contexts(target: Target, length: int) -> list[int]:
    """Return the contexts to time for a sequence that begins with ``length`` tokens."""
    # A model with little more than the long one need not know the positions that timing uses.
    knows_long = target.context_length is None or target.context_length >= 2 * LONG_CONTEXT
    return [CONTEXT, LONG_CONTEXT] if length >= MIN_LONG and knows_long else [CONTEXT]


def time_steps(
    target: Target,
    proposer: Proposer | None,
    context: int = CONTEXT,
    quantisation: Quantisation | None = None,
) -> StepTimes:
    """Time steps of the kinds `TIMED` on meaningless tokens; blocks until MLX has run them.

    Args:
        target: The model.
        proposer: A network that drafts for it; None for prompt lookup, whose kinds are
            `TIMED_LOOKUPS`.
        context: Number of tokens before the steps.
        quantisation: Quantisation of their K/V entries; None for none.
    """
    schedule = _Schedule(TIMED_LOOKUPS)
    if isinstance(proposer, SpeculateAhead):
        proposer = proposer.proposer  # steps in use show the cost of speculating ahead
    if proposer is not None:
        schedule = _Schedule(TIMED, proposer.max_length)
    chooser = _Contrary(SamplingParams(), target.vocab_size)
    drafting: Drafting = _Junk() if proposer is None else proposer.open(target, [0], True, [])
    cache = target.blank_cache(context, quantisation)
    text = SequenceDecoder(target, cache, chooser, Request([0]), drafting, schedule)
    with closing(decode(text)) as tokens:  # type: ignore[type-var]
        while not schedule.is_done:
            next(tokens)
    return StepTimes(schedule.seconds, any(map(schedule.is_doubtful, schedule.seconds)))


def doubt_times(target: Target, proposer: Proposer | None, known: Known) -> bool:
    """Have costs measured again that are above those of steps in use.

    Args:
        target: The model.
        proposer: As in `step_costs`.
        known: Costs of the model and this network; those to measure again are removed.

    Returns:
        Whether the next sequence measures any again.
    """
    doubted = [
        key
        for key in list(known)
        if key[0] == (proposer is not None)
        and measure_again(*_description(target, proposer, *key[1:]), _kinds(proposer))
    ]
    for key in doubted:
        known.pop(key, None)  # another thread may have removed it
    return bool(doubted)


def _kinds(proposer: Proposer | None) -> dict[str, Kind]:
    return {str(kind): kind for kind in (TIMED_LOOKUPS if proposer is None else TIMED)}


def _description(
    target: Target, proposer: Proposer | None, context: int, quantisation: Quantisation | None
) -> tuple[object, tuple[nn.Module, ...]]:
    """Return a description of the steps to time, and the networks that they use."""
    kinds = tuple(_kinds(proposer).values())
    modules = () if proposer is None else proposer.networks
    return (kinds, context, quantisation, *choices(target.model)), (target.model, *modules)


def _known_seconds(
    target: Target, proposer: Proposer | None, context: int, quantisation: Quantisation | None
) -> Seconds:
    kinds = _kinds(proposer)

    def measure() -> Timed:
        logger.info(
            "timing steps on this machine after %d tokens, once for this model and %s",
            context,
            "prompt lookup" if proposer is None else "drafter",
        )
        times = time_steps(target, proposer, context, quantisation)
        return Timed({name: times.seconds[kind] for name, kind in kinds.items()}, times.is_doubtful)

    described = _description(target, proposer, context, quantisation)
    seconds = load_or_measure(*described, kinds, measure)
    return {kind: seconds[name] for name, kind in kinds.items()}


def _by_parts(seconds: Seconds, short: Seconds, max_length: int | None) -> StepCosts:
    """Split costs into parts; those of drafting are costs after a short context."""
    few_levels, levels = (min(length, max_length or length) - 1 for length in (SHORT, LONG))
    level = {
        width: max(0.0, short[SEARCH[width, LONG]] - short[SEARCH[width, SHORT]])
        / max(1, levels - few_levels)
        for width in TIMED_WIDTHS
    }
    drafting = max(0.0, short[DRAFT] - short[PLAIN])
    few = short[VERIFY[FEW]] - drafting
    return StepCosts(
        plain=seconds[PLAIN],
        verify={
            size: max(MIN_VERIFY * seconds[PLAIN], seconds[kind] - drafting)
            for size, kind in VERIFY.items()
        },
        first={
            width: max(0.0, short[SEARCH[width, SHORT]] - few - few_levels * level[width])
            for width in TIMED_WIDTHS
        },
        level=level,
        wait=max(MIN_WAIT, short[READ] - short[VERIFY[FEW]]),
    )


class _Contrary(KeyedSampler):
    """Sampler of tokens that no drafter proposes, so that the sequence grows by one token a step.

    If drafts were accepted, the plans that are timed last would meet hundreds of tokens more than
    the first, which costs the largest trees most.
    """

    def sample(
        self,
        log_probs: mx.array,
        depths: mx.array,
        noise: GumbelNoise | None,
        num_levels: int,
    ) -> mx.array:
        return mx.argmin(log_probs, axis=-1)


class _Junk:
    """Meaningless drafts that the host makes once it knows the tokens, like those of a lookup."""

    reader = None

    def outlook(self) -> Sequence[float]:
        return [1.0]

    def propose(self, flight: PendingPass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        drafts = range(plan.num_nodes - 1)
        scores = [-1.0 * node for node in drafts]
        return TokenTree.of([flight.tokens[-1], *(0 for _ in drafts)], [0, *drafts], scores)

    def skip(self, flight: PendingPass) -> None:
        """Nothing is stored."""

    def settle(self, length: int) -> None:
        """Nothing is stored."""


class _Schedule:
    """A policy that gives every kind of step its turns, and stores their costs.

    The host dispatches a plain step or a draft before it reads the previous outcome. So the first
    and the last step of a turn partly measure the neighbouring kinds.

    Args:
        timed: The kinds.
        max_length: Longest beams of the proposer; None if it has no bound. Longer plans are cut to
            it, and padding makes their trees as large.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        timed: Sequence[Kind],
        max_length: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.is_done = False
        self._clock = clock
        self._max_length = max_length
        self._turns: dict[Kind, list[list[float]]] = {kind: [] for kind in timed}
        self._order = self._schedule()
        # Kinds of the steps that are chosen and not observed.
        self._chosen: list[Kind] = []

    def choose(self, outlook: Sequence[float] | None) -> DraftPlan | None:
        self._chosen.append(next(self._order, UNTIMED))
        wanted = self._chosen[-1].plan
        return wanted and wanted.within(self._max_length)

    def keep(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        kind = self._chosen[0]
        if kind.waits:
            tree.read()
        if not kind.verifies:
            return tree.first(1)
        assert kind.plan is not None
        return tree.padded(kind.plan.num_nodes)

    def observe(self, step: Step) -> None:
        turns = self._turns.get(self._chosen.pop(0))
        if turns is None:
            return
        if not turns or len(turns[-1]) == STEPS:
            turns.append([])
        turns[-1].append(math.inf if step.seconds is None else step.seconds)

    @property
    def seconds(self) -> Seconds:
        """Mean of the inner steps of the fastest turn, by kind."""
        return {kind: self._fastest(kind)[0] for kind in self._turns}

    def _schedule(self) -> Iterator[Kind]:
        end = self._clock() + PATIENCE
        for done in range(MAX_ROUNDS):
            if done:
                yield UNTIMED  # meanwhile the last step of the previous turn is observed
            for kind in list(self._turns):
                if not done or (self._clock() < end and (done < ROUNDS or self.is_doubtful(kind))):
                    yield from [kind] * STEPS
        yield UNTIMED
        self.is_done = True

    def is_doubtful(self, kind: Kind) -> bool:
        """Whether turns differ, or steps that do more cost less."""
        first, *others = self._fastest(kind)
        most = (1 + DOUBT) * min(
            self._fastest(other)[0] for other in self._turns if other.does_as_much(kind)
        )
        return first > most or (bool(others) and others[0] > (1 + DOUBT) * first)

    def _fastest(self, kind: Kind) -> list[float]:
        turns = [turn for turn in self._turns[kind] if len(turn) == STEPS]
        return sorted(mean(turn[2:-1]) for turn in turns)
