"""Costs of steps by their parts: timed on this machine, once, in rounds over all kinds of steps.

Whole steps are timed, because the host's work counts if a forward pass is short.
"""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_redrafter.decoding.delivery import Request
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.protocols import Drafting, Proposer, Step
from mlx_redrafter.decoding.sampling import GumbelNoise, KeyedSampler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.decoding.step import decode
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.generation_options import Quantisation, SamplingParams
from mlx_redrafter.kernels.layers import choices
from mlx_redrafter.measured import doubt, fastest, load_or_time
from mlx_redrafter.policy.plans import LOOKUP, SIZES, StepCosts
from mlx_redrafter.proposers.speculate_ahead import SpeculateAhead
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree

logger = logging.getLogger(__name__)


class Kind(NamedTuple):
    """A kind of step to time, with a plan of its drafts; None for plain decoding.

    ``waits`` is whether the host reads the drafts before the target verifies them, and ``verifies``
    whether the target verifies any.
    """

    plan: DraftPlan | None
    waits: bool = False
    verifies: bool = True

    def does_as_much(self, other: Kind) -> bool:
        """Return True if a step of this kind does all the work of the other's."""
        return all(map(operator.ge, self._work(), other._work()))

    def _work(self) -> tuple[int, ...]:
        if self.plan is None:
            return (0,) * 5
        shape = self.plan.shape
        return shape.width, shape.length, self.plan.num_nodes, self.waits, self.verifies


Seconds = Mapping[Kind, float]

# Shape of the search that is timed with trees of all sizes, and without verification.
BASE = DraftShape(2, 6)
# Number of nodes of the trees in the other timings.
FEW = 3
# Beam length of the short search of every width; a level's cost follows from both lengths.
SHORT = 3
# Beam length of the long search of every width.
LONG = 9
# Beam widths of those searches; the costs of others are interpolated.
TIMED_WIDTHS = (1, BASE.width, 4)

PLAIN = Kind(None)
VERIFY = {size: Kind(DraftPlan(BASE, size)) for size in SIZES}
SEARCH = {
    (width, length): Kind(DraftPlan(DraftShape(width, length), FEW))
    for width in TIMED_WIDTHS
    for length in (SHORT, LONG)
}
READ = Kind(DraftPlan(BASE, FEW), waits=True)
DRAFT = Kind(DraftPlan(BASE, FEW), verifies=False)
LOOKUPS = {size: Kind(DraftPlan(LOOKUP.shape, size, from_text=True), waits=True) for size in SIZES}

# Number of rounds; the fastest turn of a kind counts, as other work disturbed the others.
ROUNDS = 2
# Number of steps of a kind in a row, which are its turn in a round.
STEPS = 5
# Relative difference between the two fastest turns of a kind that leaves doubt.
DOUBT = 0.15
# Maximum number of rounds, if ROUNDS leave doubt.
MAX_ROUNDS = 4
# Seconds in which a further round must end: long steps are hardly disturbed.
PATIENCE = 10.0
# Maximum seconds of steps that prepare kernels: with longer steps, a kernel costs little beside.
MAX_WARM_UP = 5.0
# Minimum seconds of such steps that are reported to the user.
LONG_WARM_UP = 1.0

# Minimum cost of verification, in plain steps, which read as many weights. On the smallest models
# noise would leave less than nothing once the cost of drafting is subtracted.
MIN_VERIFY = 0.8
# Minimum cost of reading the drafts, in seconds: the host's part, for the same reason.
MIN_WAIT = 15e-5

# Tokens in the cache while timing.
CONTEXT = 128
# The same for the second timing, of sequences that begin with a long prompt.
LONG_CONTEXT = 2048
# Minimum length of such a prompt, in tokens; costs that grow later show while decoding.
MIN_LONG = 512


class Setting(NamedTuple):
    """The setting of timed steps: model, network (None: prompt lookup), tokens before them."""

    target: Target
    proposer: Proposer | None
    context: int
    quantisation: Quantisation | None = None


# Costs by whether a network drafts, context in tokens, and quantisation of the K/V entries.
Known = dict[tuple[bool, int, Quantisation | None], Seconds]


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
    long context is timed and scaled. ``proposer`` is a network that drafts, None for prompt lookup.
    ``length`` is the number of tokens that the sequence begins with. ``known`` has the costs
    measured or read so far, for this model and network.
    """
    known = {} if known is None else known
    keys = [(proposer is not None, context, quantisation) for context in contexts(target, length)]
    for key in keys:
        if key not in known:
            setting = Setting(target, proposer, *key[1:])
            if builds_kernels():
                warm_up(setting)
            known[key] = _load_or_time(setting)
    short, *long = [known[key] for key in keys]
    seconds = short
    if long:
        share = (length - CONTEXT) / (LONG_CONTEXT - CONTEXT)
        seconds = {
            kind: timed + share * max(0.0, long[0][kind] - timed) for kind, timed in short.items()
        }
    return by_parts(seconds, short, proposer)


def contexts(target: Target, length: int) -> list[int]:
    """Return the contexts to time for a sequence that begins with ``length`` tokens."""
    # A model with little more than the long one need not know the positions that timing uses.
    knows_long = target.context_length is None or target.context_length >= 2 * LONG_CONTEXT
    return [CONTEXT, LONG_CONTEXT] if length >= MIN_LONG and knows_long else [CONTEXT]


def doubt_times(target: Target, proposer: Proposer | None, known: Known) -> None:
    """Have the next run time steps again, as they cost less than ``known``; see `step_costs`."""
    for is_network, context, quantisation in list(known):
        if is_network == (proposer is not None):
            doubt(*_description(Setting(target, proposer, context, quantisation)))


def _load_or_time(setting: Setting) -> Seconds:
    def time_rounds() -> Sequence[Seconds]:
        logger.info(
            "timing steps on this machine after %d tokens, for this and later runs of this model "
            "with %s",
            setting.context,
            "prompt lookup" if setting.proposer is None else "drafter",
        )
        return time_steps(setting)

    return fastest(load_or_time(*_description(setting), is_doubtful, time_rounds))


def _description(setting: Setting) -> tuple[object, tuple[nn.Module, ...], Sequence[Kind]]:
    """Return a description of the steps to time, the networks that they use, and their kinds."""
    target, proposer, context, quantisation = setting
    kinds = kinds_of(proposer)
    modules = () if proposer is None else proposer.networks
    passes = ("compiled",) if target.compiled.are_used else ()
    described = kinds, context, quantisation, *choices(target.model), *target.devices, *passes
    return described, (target.model, *modules), kinds


def kinds_of(proposer: Proposer | None) -> tuple[Kind, ...]:
    """Return the kinds to time with a network, or with prompt lookup (None)."""
    if proposer is None:
        return PLAIN, *LOOKUPS.values()
    return PLAIN, *VERIFY.values(), *SEARCH.values(), READ, DRAFT


def builds_kernels() -> bool:
    """Return whether MLX builds kernels for single shapes, which takes longer than steps do."""
    return mx.cuda.is_available()


def warm_up(setting: Setting) -> None:
    """Run all kinds of steps, greedily and at a temperature, so that no text waits for kernels."""
    start = time.perf_counter()

    def is_enough(schedule: _Schedule) -> bool:
        return bool(schedule.rounds) or time.perf_counter() - start > MAX_WARM_UP

    for temp in (0.0, 1.0):
        _run(setting, SamplingParams(temp=temp), is_enough)
    seconds = time.perf_counter() - start
    if seconds > LONG_WARM_UP:
        logger.info("prepared the kernels of drafted steps in %.1f s", seconds)


def time_steps(setting: Setting) -> Sequence[Seconds]:
    """Time rounds of the kinds on meaningless tokens; blocks until MLX has run them."""
    return _run(setting, SamplingParams(), operator.attrgetter("is_done"))


def _run(
    setting: Setting, params: SamplingParams, is_enough: Callable[[_Schedule], bool]
) -> Sequence[Seconds]:
    """Decode with a schedule until it is enough; passes are compiled at their first use."""
    target, proposer, context, quantisation = setting
    if isinstance(proposer, SpeculateAhead):
        proposer = proposer.proposer  # steps in use show the cost of speculating ahead
    drafting: Drafting = _Junk() if proposer is None else proposer.open(target, [0], True, [])
    max_length = None if proposer is None else proposer.max_length
    schedule = _Schedule(kinds_of(proposer), max_length)
    cache = blank_cache(target, context, quantisation)
    sampler = _Contrary(params, target.vocab_size)
    text = SequenceDecoder(target, cache, sampler, Request([0]), drafting, schedule)
    with target.compiled.warming_up(), closing(decode(text)) as tokens:  # type: ignore[type-var]
        while not is_enough(schedule):
            next(tokens)
    return schedule.rounds


def blank_cache(target: Target, length: int, quantisation: Quantisation | None = None) -> TreeCache:
    """Create a cache with K/V entries of zeros in place of ``length`` tokens.

    Layers with a state hold that after one token. Blocks until MLX has made the entries.
    """
    cache = target.caches.new(quantisation=quantisation)
    mx.eval(target.advance(mx.array([0], dtype=mx.int32), cache).logits)
    target.caches.reserve(cache, length)
    cache.trim_to(length)
    mx.eval([layer.state for layer in cache.stock])
    return cache


def is_doubtful(rounds: Sequence[Seconds]) -> bool:
    """Return True if the two fastest turns of a kind differ, or more work costs less."""
    first = fastest(rounds)
    for kind in first:
        second = sorted(one[kind] for one in rounds)[:2][-1]
        least = min(seconds for other, seconds in first.items() if other.does_as_much(kind))
        if second > (1 + DOUBT) * least:
            return True
    return False


def by_parts(seconds: Seconds, short: Seconds, proposer: Proposer | None) -> StepCosts:
    """Split costs into parts; the cost of drafting is that after a ``short`` context."""
    if proposer is None:
        return StepCosts(seconds[PLAIN], {size: seconds[kind] for size, kind in LOOKUPS.items()})
    max_length = proposer.max_length
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

    def sample(self, log_probs: mx.array, *others: Any, **named: Any) -> mx.array:
        return super().sample(-log_probs, *others, **named)


class _Junk:
    """Meaningless drafts that the host makes once it knows the tokens, like those of a lookup."""

    reader = None

    def matches(self, least: float) -> Sequence[float]:
        return [1.0]

    def propose(self, flight: Pass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        drafts = range(plan.num_nodes - 1)
        scores = [-1.0 * node for node in drafts]
        return TokenTree.of([flight.tokens[-1], *(0 for _ in drafts)], [0, *drafts], scores)

    def skip(self, flight: Pass) -> None:
        """Nothing is stored."""

    def trim_to(self, length: int) -> None:
        """Nothing is stored."""


class _Schedule:
    """A policy that gives every kind of step one turn per round, and stores the costs.

    The host dispatches a plain step or a draft before it reads the previous outcome. So the first
    and the last step of a turn partly measure the neighbouring kinds. Plans that are longer than
    ``max_length`` are cut to it, and padding makes their trees as large. ``rounds`` has the mean
    seconds of the inner steps of every turn, for each complete round.
    """

    reads_drafts = True
    least_chance = 0.0

    def __init__(self, kinds: Sequence[Kind], max_length: int | None = None):
        self.rounds: list[Seconds] = []
        self.is_done = False
        self._kinds, self._max_length = kinds, max_length
        self._start = time.perf_counter()
        self._num_chosen = 0
        # Seconds of the steps of the current round.
        self._seconds: list[float] = []

    def choose(self, matches: Sequence[float] | None) -> DraftPlan | None:
        plan = self._kind(self._num_chosen).plan
        self._num_chosen += 1
        return plan and plan.within(self._max_length)

    def select(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        kind = self._kind(self._num_chosen - 1)
        if kind.waits:
            tree.read()
        if not kind.verifies:
            return tree.first(1)
        assert kind.plan is not None
        return tree.padded(kind.plan.num_nodes)

    def select_early(self, plan: DraftPlan, tree: TokenTree) -> TokenTree | None:
        kind = self._kind(self._num_chosen - 1)
        return self.select(plan, tree) if kind.verifies and not kind.waits else None

    def observe(self, step: Step) -> None:
        # The clock leaves out single steps, such as those at which MLX's cache is cleared.
        self._seconds.append(math.nan if step.seconds is None else step.seconds)
        if len(self._seconds) == STEPS * len(self._kinds):
            turns = np.nanmean(np.reshape(self._seconds, (-1, STEPS))[:, 2:-1], axis=1).tolist()
            self.rounds.append(dict(zip(self._kinds, turns, strict=True)))
            self._seconds = []
            self.is_done = self._suffices()

    def _kind(self, step: int) -> Kind:
        return self._kinds[step // STEPS % len(self._kinds)]

    def _suffices(self) -> bool:
        done = len(self.rounds)
        is_late = (time.perf_counter() - self._start) * (done + 1) / done > PATIENCE
        return is_late or done == MAX_ROUNDS or (done >= ROUNDS and not is_doubtful(self.rounds))
