"""Profile of a step: verifying T tokens at several lengths, drafting level by level, the rest.

Axes: T tokens per forward pass, W beam width, L beam length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from mlx_redrafter.bench.lab.contexts import bushy_tree, filled_cache
from mlx_redrafter.bench.lab.overhead import Overhead, measure_overhead
from mlx_redrafter.bench.lab.rounds import take_turns
from mlx_redrafter.bench.timing import MedianEstimate, OnProgress, estimate, timed
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.proposers.expansion import best_nodes
from mlx_redrafter.proposers.redrafter.beam import expand
from mlx_redrafter.proposers.redrafter.input_table import input_lookup
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree

WARM_UP = 2


@dataclass(frozen=True)
class VerifyCost:
    """Cost of a forward pass over T tokens.

    Attributes:
        context: Tokens in the cache before.
        tokens: Tokens of the pass, T: one as in plain decoding, more as a tree.
        seconds: Time, the host's part included.
        ratio: Median time relative to one token at the same length.
        samples: Raw seconds.
    """

    context: int
    tokens: int
    seconds: MedianEstimate
    ratio: float
    samples: list[float]


@dataclass(frozen=True)
class DraftCost:
    """Cost of drafting.

    Attributes:
        width: Beam width, W.
        length: Beam length, L; the search has L - 1 levels.
        seconds: Time of the whole search and the choice of the tree.
        samples: Raw seconds.
    """

    width: int
    length: int
    seconds: MedianEstimate
    samples: list[float]


@dataclass(frozen=True)
class Profile:
    """All costs."""

    verify: list[VerifyCost]
    draft: list[DraftCost]
    step: Overhead


def profile(
    model: nn.Module,
    drafter: Drafter,
    plan: DraftPlan,
    contexts: Sequence[int],
    tokens: Sequence[int],
    widths: Sequence[int],
    rounds: int = 20,
    on_progress: OnProgress = lambda done, total: None,
) -> Profile:
    """Measure everything, in turns where numbers are compared.

    Args:
        model: The target.
        drafter: Drafter of the target.
        plan: Plan of the step whose parts are measured.
        contexts: Lengths for verifying.
        tokens: Values of T; 1 is always measured.
        widths: Values of W; L goes from 2 to ``plan.shape.length``.
        rounds: Samples of each number.
        on_progress: Callback for the parts done and their number.
    """
    target = Target(model)
    total = len(contexts) + len(widths) + 1
    verify: list[VerifyCost] = []
    for context in contexts:
        on_progress(contexts.index(context), total)
        verify += _verify_costs(target, context, tokens, rounds)
    draft: list[DraftCost] = []
    for i, width in enumerate(widths):
        on_progress(len(contexts) + i, total)
        draft += _draft_costs(target, drafter, width, plan.shape.length, rounds)
    on_progress(total - 1, total)
    prompt = [token % target.vocab_size for token in range(min(contexts))]
    step = measure_overhead(model, drafter, prompt, plan, rounds)
    on_progress(total, total)
    return Profile(verify, draft, step)


def _verify_costs(
    target: Target, context: int, tokens: Sequence[int], rounds: int
) -> list[VerifyCost]:
    cache = filled_cache(target, context)
    sizes = sorted({1, *tokens})
    jobs = {
        str(size): partial(_time_verify, target, cache, context, bushy_tree(size)) for size in sizes
    }
    samples = take_turns(jobs, rounds, WARM_UP)
    found = {size: estimate(samples[str(size)]) for size in sizes}
    return [
        VerifyCost(context, size, seconds, seconds.median / found[1].median, samples[str(size)])
        for size, seconds in found.items()
    ]


def _time_verify(target: Target, cache: TreeCache, context: int, tree: TokenTree) -> float:
    cache.settle(context)
    with mx.stream(generation_stream):
        if tree.num_nodes == 1:
            return timed(lambda: mx.eval(*target.advance(tree.tokens, cache)))
        return timed(lambda: mx.eval(*target.verify(tree, cache)))


def _draft_costs(
    target: Target, drafter: Drafter, width: int, length: int, rounds: int
) -> list[DraftCost]:
    hidden, root = mx.zeros((target.hidden_size,)), mx.zeros((1,), dtype=mx.int32)
    plans = {str(size): DraftPlan.of(width, size) for size in range(2, length + 1)}
    project_input = input_lookup(drafter, target)

    def draft(plan: DraftPlan) -> float:
        def work() -> Any:
            expansion = expand(drafter, project_input, hidden, root, plan.shape)
            mx.eval(best_nodes(expansion, root, plan).arrays)

        with mx.stream(generation_stream):
            return timed(work)

    jobs = {name: partial(draft, plan) for name, plan in plans.items()}
    samples = take_turns(jobs, rounds, WARM_UP)
    return [
        DraftCost(width, int(name), estimate(values), values) for name, values in samples.items()
    ]
