"""Speculative speculative decoding: drafts for the likeliest outcomes of a pass while it runs.

Source: Kumar, Dao, May, arXiv 2603.03251. Axes: N nodes of the tree in flight, R outcomes, L beam
length, H hidden size, V tokens that the network proposes.

An outcome is the last accepted node and the target's token after it, which is none of that node's
children. The network scores every outcome by its probabilities along the path and of the token,
with the noise that a sampling target will use, and drafts below the R likeliest. That runs on the
CPU next to the pass. Once the host has read the pass, its drafts are there if its outcome was among
the R; if not, the network drafts as it does alone. The difference costs time and changes no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_redrafter.checks import check_int
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.decoding.sampling import GumbelNoise, gumbel_noise, top_k
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import MAX_OUTCOMES, DraftPlan
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.draft_model import DraftModel
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.search import (
    LEAST_LOG_PROB,
    Expansion,
    bounded,
    build_tree,
    search_all,
)
from mlx_redrafter.proposers.speculate_ahead.branches import Branching, branches_of
from mlx_redrafter.proposers.wrapper import Wrapper
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree, ancestor_mask

# Stream of the drafts: the CPU next to a target on a GPU, or a second stream of the CPU.
_ahead = mx.new_thread_local_stream(mx.cpu)


@dataclass
class Hits:
    """Counts of outcomes that the network had drafted for.

    Attributes:
        passes: Passes over trees during which it drafted.
        foreseen: Those of them whose outcome was among the R that it drafted for.
    """

    passes: int = 0
    foreseen: int = 0


class SpeculateAhead(Wrapper[Drafter | DraftModel]):
    """A proposer that drafts for likely outcomes of a pass while the pass runs."""

    def __init__(self, drafter: Proposer, num_outcomes: int = 8):
        check_int("predraft", num_outcomes, 1, MAX_OUTCOMES)
        if not isinstance(drafter, (Drafter, DraftModel)):
            raise ConfigError(
                "expected a recurrent drafter or a smaller model to draft ahead with, found a "
                f"drafter of the kind {type(drafter).__name__}; leave predraft out"
            )
        super().__init__(drafter)
        self.num_outcomes = num_outcomes
        self.hits = Hits()

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> SpeculateAheadDrafting:
        drafting = self.proposer.open(target, prompt, couple_noise, cached)
        return SpeculateAheadDrafting(drafting, self.num_outcomes, self.hits)


class _Speculation(NamedTuple):
    """Dispatched drafts for R outcomes.

    Attributes:
        keys: Last accepted nodes, and the tokens after them, int32, shape (2 R,).
        drafts: Scored nodes below each outcome, each array with an axis of R before its own.
    """

    keys: mx.array
    drafts: Expansion

    def find(self, flight: Pass) -> Expansion | None:
        """Return the drafts for the outcome of a pass, if there are any; waits for the device."""
        if not flight.is_finite:
            return None
        keys = to_ints(self.keys)
        count = len(keys) // 2
        outcomes = list(zip(keys[:count], keys[count:], strict=True))
        outcome = (flight.rows[-1], flight.tokens[-1])
        return self.drafts.of_root(outcomes.index(outcome)) if outcome in outcomes else None


class SpeculateAheadDrafting:
    """Drafts of one sequence."""

    reader = None

    def __init__(self, drafting: Branching, num_outcomes: int, hits: Hits):
        self.drafting = drafting
        self.num_outcomes = num_outcomes
        self.hits = hits
        # State that predicted the root of the tree after the newest pass.
        self._origin: mx.array | None = None
        # The root of that tree.
        self._root: mx.array | None = None
        # That tree; None if another proposer drafted it.
        self._tree: TokenTree | None = None

    def matches(self, least: float) -> Sequence[float] | None:
        return self.drafting.matches(least)

    def propose(self, flight: Pass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree | None:
        """Draft after a pass; while the host waits for a pass over a tree, draft ahead."""
        ahead = found = None
        if flight.path is not None:
            with mx.stream(_ahead):
                ahead = self._draft_ahead(flight, plan, noise)
        if ahead is not None:
            found = ahead.find(flight)
            self.hits.passes += 1
            self.hits.foreseen += found is not None
        self._remember(flight)
        if found is None:
            self._tree = self.drafting.propose(flight, plan, noise)
        else:
            self.drafting.skip(flight)
            self._tree = build_tree(found, flight.root, plan)
        return self._tree

    def skip(self, flight: Pass) -> None:
        self.drafting.skip(flight)
        self._remember(flight)
        self._tree = None

    def trim_to(self, length: int) -> None:
        self.drafting.trim_to(length)

    def _remember(self, flight: Pass) -> None:
        self._origin, self._root = flight.hidden_state, flight.root
        # Dispatch it: in the next graph of the target's stream it would be there only at the end.
        mx.async_eval(self._origin)

    def _draft_ahead(
        self, flight: Pass, plan: DraftPlan, noise: GumbelNoise | None
    ) -> _Speculation | None:
        """Dispatch drafts for the likeliest outcomes of a pass; None if its tree is unknown."""
        tree, origin = self._tree_of(flight), self._origin
        if tree is None or origin is None:
            return None
        if noise is not None:
            # The noise of depth 0 is that of the choice after the root of the tree.
            positions = flight.length + 1 + mx.arange(tree.max_depth + 1 + plan.shape.length)
            seed, vocab_size = noise.params.seed, noise.values.shape[-1]
            noise = GumbelNoise(noise.params, gumbel_noise(seed, positions, vocab_size))
        branches = branches_of(self.drafting, tree, origin, noise)
        rank = self.drafting.rank(noise)
        log_probs = branches.after_nodes()
        if rank is not None:
            log_probs = rank(log_probs, tree.depths)
        ids = branches.to_token_ids(mx.arange(log_probs.shape[-1]))
        nodes, rows = likeliest_outcomes(tree, log_probs, ids, self.num_outcomes)
        keys = mx.concatenate([nodes, ids[rows]])
        mx.async_eval(keys)
        branches.begin(nodes, ids[rows])
        depths = tree.depths[nodes] + 1

        def rank_below(log_probs: mx.array, depth: int | mx.array) -> mx.array:
            assert rank is not None
            places = mx.repeat(depths, log_probs.shape[0] // depths.shape[0]) + depth
            return rank(log_probs, places)

        drafts = search_all(branches, plan.shape, None if rank is None else rank_below)
        mx.async_eval(drafts)
        return _Speculation(keys, drafts)

    def _tree_of(self, flight: Pass) -> TokenTree | None:
        """Return the tree in flight, from arrays that exist before the pass is over."""
        if flight.known is not None:
            assert self._root is not None
            return TokenTree.below(self._root, flight.known)
        if self._tree is None:
            return None
        tree = self._tree.first(flight.num_nodes)
        return replace(tree, ancestors=ancestor_mask(tree.parents, tree.max_depth))


def likeliest_outcomes(
    tree: TokenTree, log_probs: mx.array, token_ids: mx.array, count: int
) -> tuple[mx.array, mx.array]:
    """Choose the outcomes with the largest products of probabilities along path and token.

    An outcome may be below any node: less probable paths get fewer of them, geometrically along a
    chain.

    Args:
        tree: The tree in flight.
        log_probs: Natural log-probabilities after its nodes, shape (N, V).
        token_ids: Token ids of the V columns, int32, shape (V,).
        count: Outcomes to return, R.

    Returns:
        Last accepted nodes, and columns of the tokens after them, int32, both of shape (R,).
    """
    log_probs = bounded(log_probs)
    is_draft = mx.arange(tree.size) > 0
    # Column of each draft; none for padding, and for drafts that the network cannot propose.
    columns = (tree.tokens[:, None] == token_ids) & is_draft[:, None]
    own = mx.max(mx.where(columns, log_probs[tree.parents], LEAST_LOG_PROB), axis=-1)
    paths = mx.where(tree.ancestors, mx.where(is_draft, own, 0.0), 0.0).sum(axis=-1)
    is_child = mx.zeros(columns.shape, dtype=mx.int32).at[tree.parents].maximum(columns)
    scores = paths[:, None] + mx.where(is_child == 1, LEAST_LOG_PROB, log_probs)
    flat = bounded(scores).reshape(1, -1)
    best = top_k(flat, min(count, flat.shape[-1]))[1][0].astype(mx.int32)
    width = token_ids.shape[0]
    return best // width, best % width
