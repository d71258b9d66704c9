"""Speculative speculative decoding: drafts for the likeliest outcomes of a pass while it runs.

Source: Kumar, Dao, May, arXiv 2603.03251. Axes: N nodes of the tree in flight, R outcomes, W beam
width, H hidden size, V tokens that the network proposes.

An outcome is the last accepted node and the target's token after it. The network scores every
outcome by its probabilities along the path and of the token, with the noise that a sampling target
will use, and drafts below the R likeliest. That runs on the CPU next to the pass. If the pass has
one of these outcomes, its drafts are there; if not, the network drafts as it does alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_redrafter.checks import check_int
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.decoding.sampling import GumbelNoise, gumbel_noise, top_k
from mlx_redrafter.device_read import to_rows
from mlx_redrafter.draft_plan import MAX_OUTCOMES, DraftPlan
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.draft_model import DraftLevels, DraftModel, ModelDrafting
from mlx_redrafter.proposers.kind import Wrapper
from mlx_redrafter.proposers.redrafter.network import Drafter, RecurrentDrafting, RecurrentLevels
from mlx_redrafter.proposers.search import (
    LEAST_LOG_PROB,
    Expansion,
    bounded,
    build_tree,
    log_probs,
    rank_from,
    search_all,
)
from mlx_redrafter.target.caches.draft_cache import DraftLineage
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree, ancestor_mask

# Stream of the drafts: the CPU next to a target on a GPU, or a second stream of the CPU.
_ahead = mx.new_thread_local_stream(mx.cpu)


@dataclass
class Hits:
    """Counts of passes over trees during which the network drafted ahead.

    It had drafted for the outcomes of those that are ``foreseen``.
    """

    passes: int = 0
    foreseen: int = 0


class SpeculateAhead(Wrapper):
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


class SpeculateAheadDrafting:
    reader = None

    def __init__(self, drafting: RecurrentDrafting | ModelDrafting, num_outcomes: int, hits: Hits):
        self.drafting, self.num_outcomes, self.hits = drafting, num_outcomes, hits
        # The tree after the newest pass, unless another proposer drafted it, its root, and the
        # state that predicted that.
        self._tree: TokenTree | None = None
        self._root: mx.array | None = None
        self._origin: mx.array | None = None

    def matches(self, least: float) -> Sequence[float] | None:
        return self.drafting.matches(least)

    def propose(self, flight: Pass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree | None:
        """Draft after a pass; while the host waits for a pass over a tree, draft ahead."""
        ahead = found = None
        if flight.has_path:
            with mx.stream(_ahead):
                ahead = self._draft_ahead(flight, plan, noise)
        if ahead is not None:
            found = _find(*ahead, flight)
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
    ) -> tuple[mx.array, Expansion] | None:
        """Dispatch drafts for the likeliest outcomes of a pass; None if its tree is unknown.

        The outcomes are last accepted nodes and the tokens after them, int32, shape (R, 2). The
        arrays of the drafts have an axis of R before their own.
        """
        tree, origin = self._tree_of(flight), self._origin
        if tree is None or origin is None:
            return None
        if noise is not None:
            # The noise of depth 0 is that of the choice after the root of the tree.
            positions = flight.length + 1 + mx.arange(tree.max_depth + 1 + plan.shape.length)
            seed, vocab_size = noise.params.seed, noise.values.shape[-1]
            noise = GumbelNoise(noise.params, gumbel_noise(seed, positions, vocab_size))
        drafting, rank = self.drafting, self.drafting.rank(noise)
        branches: RecurrentBranches | ModelBranches
        if isinstance(drafting, ModelDrafting):
            branches = ModelBranches(drafting, tree)
        else:
            branches = RecurrentBranches(drafting, tree, origin, rank is not None)
        log_probs = branches.after_nodes()
        if rank is not None:
            log_probs = rank(log_probs, tree.depths)
        ids = branches.to_token_ids(mx.arange(log_probs.shape[-1]))
        nodes, rows = likeliest_outcomes(tree, log_probs, ids, self.num_outcomes)
        tokens = ids[rows]
        outcomes = mx.stack([nodes, tokens], axis=1)
        mx.async_eval(outcomes)
        branches.begin(nodes, tokens)
        drafts = search_all(branches, plan.shape, rank_from(tree.depths[nodes] + 1, rank))
        mx.async_eval(drafts)
        return outcomes, drafts

    def _tree_of(self, flight: Pass) -> TokenTree | None:
        """Return the tree in flight, from arrays that exist before the pass is over."""
        if flight.known is not None:
            assert self._root is not None
            return TokenTree.below(self._root, flight.known)
        if self._tree is None:
            return None
        tree = self._tree.first(flight.num_nodes)
        return replace(tree, ancestors=ancestor_mask(tree.parents, tree.max_depth))


def _find(outcomes: mx.array, drafts: Expansion, flight: Pass) -> Expansion | None:
    """Return the drafts for the outcome of a pass, if there are any; waits for the device."""
    if not flight.is_finite:
        return None
    known, outcome = to_rows(outcomes), [flight.rows[-1], flight.tokens[-1]]
    return drafts.of_root(known.index(outcome)) if outcome in known else None


def likeliest_outcomes(
    tree: TokenTree, log_probs: mx.array, token_ids: mx.array, count: int
) -> tuple[mx.array, mx.array]:
    """Choose the R outcomes with the largest products of probabilities along path and token.

    An outcome may be below any node: less probable paths get fewer of them, geometrically along a
    chain. ``log_probs`` after the tree's nodes have shape (N, V), ``token_ids`` of their columns
    are int32, (V,). Return the last accepted nodes, and columns of the tokens after them, int32,
    (R,).
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


class RecurrentBranches(RecurrentLevels):
    """A recurrent drafter along a tree: it scores tokens after all nodes, then below some of them.

    ``origin``, shape (H,), is the state that predicted the root of the tree.
    """

    def __init__(
        self, drafting: RecurrentDrafting, tree: TokenTree, origin: mx.array, with_noise: bool
    ):
        network, root = drafting.network, tree.tokens[:1]
        super().__init__(network, drafting.project_input, origin[None], root, with_noise)
        self.tree = tree

    def after_nodes(self) -> mx.array:
        """Return natural log-probabilities of tokens after every node, float32, shape (N, V)."""
        inputs = self.project_input(mx.maximum(self.tree.tokens, 0))  # padding has no token
        first = self.state = self.drafter.start(inputs)
        for _ in range(self.tree.max_depth):  # right for nodes of depth d from round d on
            advanced = self.drafter.advance(self.state[self.tree.parents], inputs)
            self.state = mx.where(self.tree.depths[:, None] > 0, advanced, first)
        return self.log_probs()

    def begin(self, nodes: mx.array, tokens: mx.array) -> None:
        """Make roots of the `LevelScorer` of tokens after some nodes, both int32, shape (R,)."""
        self.state = self.drafter.advance(self.state[nodes], self.project_input(tokens))

    def first(self) -> mx.array:
        return self.log_probs()


class ModelBranches(DraftLevels):
    """A draft model along a tree; the entries of all nodes stay aside, the root's too."""

    def __init__(self, drafting: ModelDrafting, tree: TokenTree):
        super().__init__(drafting)
        self.tree = tree

    def after_nodes(self) -> mx.array:
        drafting, tree = self.drafting, self.tree
        drafting.read_known()
        # The tree's root has an entry already, which no query sees: its logits are computed again.
        length = drafting.length - 1
        before = mx.array([length - 1], dtype=mx.int32)
        self._lineage = DraftLineage(length, before, drafting.cache.num_rows)
        tokens = mx.maximum(tree.tokens, 0)  # padding has no token
        return log_probs(drafting.read_level(tokens, *self._lineage.start_at_nodes(tree)))

    def begin(self, nodes: mx.array, tokens: mx.array) -> None:
        self._nodes, self._tokens = nodes, tokens

    def first(self) -> mx.array:
        return self.following(self._nodes, self._tokens, 0)

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        width, roots = tokens.shape[0], self._nodes.shape[0]
        # A child of a node of depth d stands at d + 2, as the tree's root is at 1.
        depths = mx.repeat(self.tree.depths[self._nodes], width // roots) + (2 + depth)
        level = self._lineage.extend(beams, width, depths, self.tree.max_depth + 2 + depth)
        return log_probs(self.drafting.read_level(tokens, *level))
