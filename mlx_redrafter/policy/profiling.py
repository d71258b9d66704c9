"""Times of steps on this machine, measured once and remembered.

Whole steps of running decoding are timed: the host's work, and what it does beside the device,
count where a forward pass takes little time.

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
    """A kind of step that is timed.

    Attributes:
        plan: Plan of its drafts; None for plain decoding.
        waits: Whether the drafts are looked at before they are verified.
        verifies: Whether any are verified.
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
        """Whether no part of a step of this kind is less than in the other's."""
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


# Searches timed for a network: one with trees of all sizes, and without any, from which the time
# of the search follows; and of every width a long and a short one, for that of a level.
WIDTH, FEW = 2, 3
BASE = DraftShape(WIDTH, 6)
SHORT, LONG = 3, 9
TIMED_WIDTHS = (1, WIDTH, 4)
PLAIN, UNTIMED = Kind(None), Kind(None, waits=True)
VERIFY = {size: Kind(DraftPlan(BASE, size)) for size in SIZES}
SEARCH = {
    (width, length): Kind(DraftPlan(DraftShape(width, length), FEW))
    for width in TIMED_WIDTHS
    for length in (SHORT, LONG)
}
READ = Kind(DraftPlan(BASE, FEW), waits=True)
DRAFT = Kind(DraftPlan(BASE, FEW), verifies=False)
TIMED = (PLAIN, *VERIFY.values(), *SEARCH.values(), READ, DRAFT)
# Steps timed where drafts come out of the text.
LOOKUPS = {size: Kind(DraftPlan(LOOKUP.shape, size, from_text=True), waits=True) for size in SIZES}
TIMED_LOOKUPS = (PLAIN, *LOOKUPS.values())

# Tokens in the cache while timing. A long context is only timed for a text that begins with at
# least LEAST_LONG tokens; slowdowns of a growing text show while decoding.
CONTEXT = 128
LONG_CONTEXT = 2048
LEAST_LONG = 512
# Rounds over all kinds, and steps of a kind in a row; the fastest turn counts, as the others were
# disturbed.
ROUNDS = 2
STEPS = 5
# Where the two fastest turns of a kind differ by more than DOUBT, it has more, up to MOST_ROUNDS.
# After PATIENCE seconds no kind has one that it can do without: steps that take long are hardly
# disturbed.
DOUBT = 0.15
MOST_ROUNDS = 4
PATIENCE = 10.0
# Least time of verifying any number of nodes, in plain steps, which read as many weights: on the
# smallest models noise leaves less than nothing of a step, once the drafts' time is taken away.
LEAST_VERIFY = 0.8
# Least seconds of looking at drafts before they are verified: the host's part, for the same reason.
LEAST_WAIT = 15e-5

Seconds = dict[Kind, float]
# Times by whether a network drafts, context in tokens, and how rows are quantised.
Known = dict[tuple[bool, int, Quantisation | None], Seconds]


class StepTimes(NamedTuple):
    """Times of steps, and whether something disturbed some of them."""

    seconds: Seconds
    is_doubtful: bool = False


def step_costs(
    target: Target,
    proposer: Proposer | None,
    length: int = CONTEXT,
    known: Known | None = None,
    quantisation: Quantisation | None = None,
) -> StepCosts:
    """What steps take, by their parts; timed unless a file knows it.

    Timing takes some seconds. Times are kept per model, dtype, kernels, proposer, device and MLX
    version in the user's cache folder. Attention takes time in proportion to the context, so the
    part of a long one is timed once and scaled.

    Args:
        target: The model.
        proposer: A network that drafts for it; None where drafts come out of the text.
        length: Tokens that the text begins with.
        known: Times of the model and this network, for those that are asked for again.
        quantisation: Quantisation of all rows of the text; None for none.
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
    # The time of drafting does not depend on the context.
    return _by_parts(seconds, short, proposer.max_length)


def contexts(target: Target, length: int) -> list[int]:
    """The contexts to time for a text that begins with ``length`` tokens."""
    # A model with little more than the long one need not know the positions that timing uses.
    knows_long = target.context_length is None or target.context_length >= 2 * LONG_CONTEXT
    return [CONTEXT, LONG_CONTEXT] if length >= LEAST_LONG and knows_long else [CONTEXT]


def time_steps(
    target: Target,
    proposer: Proposer | None,
    context: int = CONTEXT,
    quantisation: Quantisation | None = None,
) -> StepTimes:
    """Time steps of the kinds `TIMED` in a text of no meaning. Waits for the device.

    Args:
        target: The model.
        proposer: A network that drafts for it; None where drafts come out of the text, for steps
            of the kinds `TIMED_LOOKUPS`.
        context: Tokens before the steps.
        quantisation: Quantisation of the rows of all of them; None for none.
    """
    schedule = _Schedule(TIMED_LOOKUPS)
    if isinstance(proposer, SpeculateAhead):
        proposer = proposer.proposer  # what drafting ahead takes or saves, steps show themselves
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
    """Have times that are too long, as steps in use take less, measured again for the next text.

    Args:
        target: The model.
        proposer: As in `step_costs`.
        known: Times of the model and this network; those that will be measured again are removed.

    Returns:
        Whether any will be.
    """
    doubted = [
        key
        for key in list(known)
        if key[0] == (proposer is not None)
        and measure_again(*_description(target, proposer, *key[1:]), _kinds(proposer))
    ]
    for key in doubted:
        known.pop(key, None)  # another thread's text may have ended, too
    return bool(doubted)


def _kinds(proposer: Proposer | None) -> dict[str, Kind]:
    return {str(kind): kind for kind in (TIMED_LOOKUPS if proposer is None else TIMED)}


def _description(
    target: Target, proposer: Proposer | None, context: int, quantisation: Quantisation | None
) -> tuple[object, tuple[nn.Module, ...]]:
    """What is timed, and the networks."""
    kinds = tuple(_kinds(proposer).values())
    modules = () if proposer is None else proposer.networks
    return (kinds, context, quantisation, *choices(target.model)), (target.model, *modules)


def _known_seconds(
    target: Target, proposer: Proposer | None, context: int, quantisation: Quantisation | None
) -> Seconds:
    kinds = _kinds(proposer)

    def measure() -> Timed:
        logger.info(
            "timing what steps take on this machine after %d tokens, once for this model and %s",
            context,
            "drafts out of the text" if proposer is None else "drafter",
        )
        times = time_steps(target, proposer, context, quantisation)
        return Timed({name: times.seconds[kind] for name, kind in kinds.items()}, times.is_doubtful)

    described = _description(target, proposer, context, quantisation)
    seconds = load_or_measure(*described, kinds, measure)
    return {kind: seconds[name] for name, kind in kinds.items()}


def _by_parts(seconds: Seconds, short: Seconds, max_length: int | None) -> StepCosts:
    """Parts of steps; those of drafting as they are after a short context."""
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
            size: max(LEAST_VERIFY * seconds[PLAIN], seconds[kind] - drafting)
            for size, kind in VERIFY.items()
        },
        first={
            width: max(0.0, short[SEARCH[width, SHORT]] - few - few_levels * level[width])
            for width in TIMED_WIDTHS
        },
        level=level,
        wait=max(LEAST_WAIT, short[READ] - short[VERIFY[FEW]]),
    )


class _Contrary(KeyedSampler):
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

    reader = None

    def outlook(self) -> Sequence[float]:
        """See `Drafting.outlook`."""
        return [1.0]

    def propose(self, flight: PendingPass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        """See `Drafting.propose`; a chain."""
        drafts = range(plan.num_nodes - 1)
        scores = [-1.0 * node for node in drafts]
        return TokenTree.of([flight.tokens[-1], *(0 for _ in drafts)], [0, *drafts], scores)

    def skip(self, flight: PendingPass) -> None:
        """See `Drafting.skip`."""

    def settle(self, length: int) -> None:
        """See `Drafting.settle`."""


class _Schedule:
    """A policy that lets every kind of step have its turns, and remembers their times.

    A plain step is dispatched before the outcome of the one before is read, a draft likewise; so
    the first and the last step of a turn are partly ones of the kinds beside them.

    Args:
        timed: The kinds.
        max_length: Longest beams of the proposer, None where nothing bounds them: those of longer
            plans are as long, and their trees as large, with padding.
        clock: Seconds so far.
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
        # Kinds of the steps chosen and not observed, and of the one whose drafts are there.
        self._chosen: list[Kind] = []

    def choose(self, outlook: Sequence[float] | None) -> DraftPlan | None:
        """See `DraftPolicy.choose`."""
        self._chosen.append(next(self._order, UNTIMED))
        wanted = self._chosen[-1].plan
        return wanted and wanted.within(self._max_length)

    def keep(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        """See `DraftPolicy.keep`; waits for the drafts as decoding does."""
        kind = self._chosen[0]
        if kind.waits:
            tree.read()
        if not kind.verifies:
            return tree.first(1)
        assert kind.plan is not None
        return tree.padded(kind.plan.num_nodes)

    def observe(self, step: Step) -> None:
        """See `DraftPolicy.observe`."""
        turns = self._turns.get(self._chosen.pop(0))
        if turns is None:
            return
        if not turns or len(turns[-1]) == STEPS:
            turns.append([])
        turns[-1].append(math.inf if step.seconds is None else step.seconds)

    @property
    def seconds(self) -> Seconds:
        """Mean of the inner steps of a turn, of the fastest turn."""
        return {kind: self._fastest(kind)[0] for kind in self._turns}

    def _schedule(self) -> Iterator[Kind]:
        end = self._clock() + PATIENCE
        for done in range(MOST_ROUNDS):
            if done:
                yield UNTIMED  # meanwhile the last of the turns before is observed
            for kind in list(self._turns):
                if not done or (self._clock() < end and (done < ROUNDS or self.is_doubtful(kind))):
                    yield from [kind] * STEPS
        yield UNTIMED
        self.is_done = True

    def is_doubtful(self, kind: Kind) -> bool:
        """Whether turns differ, or steps that do more have taken less."""
        first, *others = self._fastest(kind)
        most = (1 + DOUBT) * min(
            self._fastest(other)[0] for other in self._turns if other.does_as_much(kind)
        )
        return first > most or (bool(others) and others[0] > (1 + DOUBT) * first)

    def _fastest(self, kind: Kind) -> list[float]:
        turns = [turn for turn in self._turns[kind] if len(turn) == STEPS]
        return sorted(mean(turn[2:-1]) for turn in turns)
