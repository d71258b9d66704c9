"""Drafts made ahead, for the likeliest outcomes of a forward pass while it runs.

Speculative speculative decoding (Kumar, Dao, May, arXiv 2603.03251). Axes: N nodes of the tree in
flight, R outcomes, L beam length, H hidden size, V tokens that the network proposes.

An outcome is the last accepted node and the target's token after it, which is none of that node's
children. The network scores all of them by what it thinks of the path and the token, at a
temperature with the noise that the target will use, and drafts on below the R likeliest. That runs
on the CPU beside the pass. Once the pass is read, its drafts are there if it is among them; if not,
the network drafts as it does alone. Which of both it is shows in the time and not in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.checks import check_int
from mlx_redrafter.decoding.protocols import Drafting, Proposer, StateReader
from mlx_redrafter.decoding.records import PendingPass
from mlx_redrafter.decoding.sampling import GumbelNoise, gumbel_noise
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import MAX_OUTCOMES, DraftPlan
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.draft_model import DraftModel
from mlx_redrafter.proposers.expansion import Expansion, build_tree
from mlx_redrafter.proposers.kv_network import KvNetwork
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.redrafter.proposer import RecurrentProposer
from mlx_redrafter.proposers.search import LEAST_LOG_PROB, LevelScorer, Rank, bounded, search_all
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.topk import top_k
from mlx_redrafter.trees.tree import Drafts, TokenTree, ancestor_mask

# Beside the target on a GPU; where that runs on the CPU, too, a second stream of it.
_ahead = mx.new_thread_local_stream(mx.cpu)


class Branches(LevelScorer, Protocol):
    """A network along a tree: after all nodes of it, then after tokens below some of them."""

    def after_nodes(self) -> mx.array:
        """Natural log-probabilities of the tokens after every node, float32, shape (N, V)."""
        ...

    def begin(self, nodes: mx.array, tokens: mx.array) -> None:
        """Make roots of the `LevelScorer` of tokens after some nodes.

        Args:
            nodes: Node indices, int32, shape (R,).
            tokens: Token ids, int32, shape (R,).
        """
        ...


class Branching(Drafting, Protocol):
    """Drafts of a network that can follow a tree before it knows the target's states there."""

    def origin(self, flight: PendingPass) -> mx.array | None:
        """What it reads of a pass to draft after its bonus token, shape (H,); None for nothing."""
        ...

    def branch(
        self, tree: TokenTree, origin: mx.array | None, noise: GumbelNoise | None
    ) -> Branches:
        """The network along a tree; nothing that it does there changes its drafts elsewhere.

        Args:
            tree: The tree in flight, padding maybe among its nodes.
            origin: `origin` of the pass before it.
            noise: Noise that `rank` is given; None where there is none.
        """
        ...

    def rank(self, noise: GumbelNoise | None) -> Rank | None:
        """What ranks drafts given the noise of the target's choices; None without."""
        ...


@dataclass
class Hits:
    """How often drafts made ahead were of use.

    Attributes:
        passes: Passes over trees during which was drafted.
        foreseen: Those of them whose outcome was among the ones that were drafted for.
    """

    passes: int = 0
    foreseen: int = 0


class Predrafted:
    """A proposer whose drafts are made ahead where its guess is right; see `Proposer`.

    Args:
        drafter: A recurrent drafter or a draft model; all others are refused.
        num_outcomes: Outcomes of a pass to draft for, R.

    Attributes:
        proposer: The proposer of that drafter.
        hits: Counts over all texts.

    Raises:
        ConfigError: The drafter is of another kind, or the number is out of range.
    """

    def __init__(self, drafter: Drafter | KvNetwork | Proposer, num_outcomes: int = 8):
        check_int("predraft", num_outcomes, 1, MAX_OUTCOMES)
        proposer = RecurrentProposer(drafter) if isinstance(drafter, Drafter) else drafter
        if not isinstance(proposer, (RecurrentProposer, DraftModel)):
            raise ConfigError(
                "expected a recurrent drafter or a smaller model to draft ahead with, found a "
                f"drafter of the kind {type(drafter).__name__}; leave predraft out"
            )
        self.proposer = proposer
        self.num_outcomes = num_outcomes
        self.hits = Hits()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """See `Proposer.modules`."""
        return self.proposer.modules

    @property
    def num_layers(self) -> int:
        """See `Proposer.num_layers`."""
        return self.proposer.num_layers

    @property
    def num_rows(self) -> int:
        """See `Proposer.num_rows`."""
        return self.proposer.num_rows

    @property
    def max_length(self) -> int | None:
        """See `Proposer.max_length`."""
        return self.proposer.max_length

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        """See `Proposer.check_fit`."""
        self.proposer.check_fit(target, tokenizer)

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> PredraftedDrafting:
        """See `Proposer.open`."""
        drafting = self.proposer.open(target, prompt, couple_noise, cached)
        return PredraftedDrafting(drafting, self.num_outcomes, self.hits)


class _DraftedAhead(NamedTuple):
    """Drafts for R outcomes, dispatched.

    Attributes:
        keys: Last accepted nodes, and the tokens after them, int32, shape (2 R,).
        drafts: Scored nodes below each outcome, each array with an axis of R before its own.
    """

    keys: mx.array
    drafts: Expansion

    def find(self, flight: PendingPass) -> Expansion | None:
        """The drafts for the outcome of a pass, if they are there; waits for the device."""
        if not flight.is_finite:
            return None
        keys = to_ints(self.keys)
        count = len(keys) // 2
        outcomes = list(zip(keys[:count], keys[count:], strict=True))
        outcome = (flight.rows[-1], flight.tokens[-1])
        return self.drafts.of_root(outcomes.index(outcome)) if outcome in outcomes else None


class PredraftedDrafting:
    """One text's drafts; see `Drafting`.

    Args:
        drafting: The network's.
        num_outcomes: R.
        hits: Counts that it adds to.
    """

    def __init__(self, drafting: Branching, num_outcomes: int, hits: Hits):
        self.drafting = drafting
        self.num_outcomes = num_outcomes
        self.hits = hits
        # Of the newest pass: what predicted the root of the tree that follows it, that root, and
        # the tree, unless it is another proposer's.
        self._origin: mx.array | None = None
        self._root: mx.array | None = None
        self._tree: TokenTree | None = None

    @property
    def reader(self) -> StateReader | None:
        """See `Drafting.reader`."""
        return self.drafting.reader

    def outlook(self) -> Sequence[float] | None:
        """See `Drafting.outlook`."""
        return self.drafting.outlook()

    def propose(
        self, flight: PendingPass, plan: DraftPlan, noise: GumbelNoise | None
    ) -> TokenTree | None:
        """See `Drafting.propose`; waits for a pass over a tree, and drafts meanwhile."""
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

    def skip(self, flight: PendingPass) -> None:
        """See `Drafting.skip`."""
        self.drafting.skip(flight)
        self._remember(flight)
        self._tree = None

    def settle(self, length: int) -> None:
        """See `Drafting.settle`."""
        self.drafting.settle(length)

    def _remember(self, flight: PendingPass) -> None:
        self._origin, self._root = self.drafting.origin(flight), flight.root
        # What is left for the next graph of the target's stream is not there before its end.
        mx.async_eval(self._origin)

    def _draft_ahead(
        self, flight: PendingPass, plan: DraftPlan, noise: GumbelNoise | None
    ) -> _DraftedAhead | None:
        """Dispatch drafts for the likeliest outcomes of a pass; None where its tree is unknown."""
        tree = self._tree_of(flight)
        if tree is None:
            return None
        if noise is not None:
            # The choice after the root of the tree is that of the token after it.
            positions = flight.length + 1 + mx.arange(tree.max_depth + 1 + plan.shape.length)
            seed, vocab_size = noise.params.seed, noise.values.shape[-1]
            noise = GumbelNoise(noise.params, gumbel_noise(seed, positions, vocab_size))
        branches, rank = self.drafting.branch(tree, self._origin, noise), self.drafting.rank(noise)
        log_probs = branches.after_nodes()
        if rank is not None:
            log_probs = rank(log_probs, tree.depths)
        ids = branches.to_token_ids(mx.arange(branches.num_rows))
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
        return _DraftedAhead(keys, drafts)

    def _tree_of(self, flight: PendingPass) -> TokenTree | None:
        """The tree in flight, of arrays that are there although the pass is not over."""
        if flight.known is not None:
            assert self._root is not None
            return _tree_below(self._root, flight.known)
        if self._tree is None:
            return None
        tree = self._tree.first(flight.num_nodes)
        return replace(tree, ancestors=ancestor_mask(tree.parents, tree.max_depth))


def likeliest_outcomes(
    tree: TokenTree, log_probs: mx.array, token_ids: mx.array, count: int
) -> tuple[mx.array, mx.array]:
    """The outcomes of a pass with the largest products of probabilities along path and token.

    The shares of the nodes fall as paths become less probable, geometrically along a chain, and as
    many outcomes as promise most are taken, wherever they are.

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
    # Which column each draft is; none for padding, and for drafts that the network cannot propose.
    columns = (tree.tokens[:, None] == token_ids) & is_draft[:, None]
    own = mx.max(mx.where(columns, log_probs[tree.parents], LEAST_LOG_PROB), axis=-1)
    paths = mx.where(tree.ancestors, mx.where(is_draft, own, 0.0), 0.0).sum(axis=-1)
    is_child = mx.zeros(columns.shape, dtype=mx.int32).at[tree.parents].maximum(columns)
    scores = paths[:, None] + mx.where(is_child == 1, LEAST_LOG_PROB, log_probs)
    flat = bounded(scores).reshape(1, -1)
    best = top_k(flat, min(count, flat.shape[-1])).indices[0].astype(mx.int32)
    width = token_ids.shape[0]
    return best // width, best % width


def _tree_below(root: mx.array, known: Drafts) -> TokenTree:
    """The tree of these drafts, below a root that the host need not know, int32, shape (1,)."""
    tree = TokenTree.of([0, *known.tokens], [0, *known.parents])
    drafts = mx.array(known.tokens, dtype=mx.int32)
    return replace(tree, tokens=mx.concatenate([root, drafts]))
