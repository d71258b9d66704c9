"""Beam search with the recurrent drafter.

Axes: N nodes of a tree, R roots, W beam width, H hidden size, V head rows.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.proposers.expansion import Expansion
from mlx_redrafter.proposers.redrafter.network import Drafter, Embed
from mlx_redrafter.proposers.search import Rank, search
from mlx_redrafter.trees.tree import TokenTree


def ranking(drafter: Drafter, noise: GumbelNoise) -> Rank:
    """`GumbelNoise.rank` for the rows of a drafter's head, with its coupling weight."""
    token_ids = drafter.token_ids if drafter.has_draft_vocab else None
    return partial(noise.rank, token_ids=token_ids, weight=drafter.config.coupling_weight)


class RecurrentLevels:
    """A recurrent drafter after one root; see `LevelScorer`.

    Args:
        drafter: The network.
        project_input: `Drafter.project_input` of tokens: ids of shape (n,) to rows of shape (n, H).
        hidden_state: The target's last hidden state that predicted the root, shape (H,).
        root: The newest token, integer, shape (1,).
        scale: Factor on the logits.
    """

    def __init__(
        self,
        drafter: Drafter,
        project_input: Embed,
        hidden_state: mx.array,
        root: mx.array,
        scale: float,
    ):
        self.drafter = drafter
        self.project_input = project_input
        self.hidden_state = hidden_state.astype(drafter.dtype)
        self.hidden_term = drafter.hidden_term(self.hidden_state)
        self.root = root
        self.scale = scale

    @property
    def num_rows(self) -> int:
        """See `LevelScorer.num_rows`."""
        return self.drafter.config.head_rows

    def first(self) -> mx.array:
        """See `LevelScorer.first`."""
        self._state = self.drafter.start(self.project_input(self.root))  # (1, H)
        return self._log_probs()

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        """See `LevelScorer.following`; the beams of the first level share the root's state."""
        state = self._state if beams is None else self._state[beams]
        self._state = self.drafter.advance(state, self.project_input(tokens))  # (W, H)
        return self._log_probs()

    def to_token_ids(self, rows: mx.array) -> mx.array:
        """See `LevelScorer.to_token_ids`."""
        return self.drafter.to_token_ids(rows)

    def _log_probs(self) -> mx.array:
        return self.drafter.log_probs(self.hidden_state, self._state, self.hidden_term, self.scale)


class RecurrentBranches(RecurrentLevels):
    """A recurrent drafter along a tree, all from the state that predicted its root.

    See `Branches`; further arguments are those of `RecurrentLevels`.
    """

    def __init__(
        self,
        drafter: Drafter,
        project_input: Embed,
        hidden_state: mx.array,
        tree: TokenTree,
        scale: float,
    ):
        super().__init__(drafter, project_input, hidden_state, tree.tokens[:1], scale)
        self.tree = tree

    def after_nodes(self) -> mx.array:
        """See `Branches.after_nodes`."""
        tree = self.tree
        inputs = self.project_input(mx.maximum(tree.tokens, 0))  # padding has no token
        first = self.drafter.start(inputs)
        self._state = first
        for _ in range(tree.max_depth):  # right for nodes of depth d from round d on
            advanced = self.drafter.advance(self._state[tree.parents], inputs)
            self._state = mx.where(tree.depths[:, None] > 0, advanced, first)
        return self._log_probs()

    def begin(self, nodes: mx.array, tokens: mx.array) -> None:
        """See `Branches.begin`."""
        self._state = self.drafter.advance(self._state[nodes], self.project_input(tokens))

    def first(self) -> mx.array:
        """See `LevelScorer.first`."""
        return self._log_probs()


def expand(
    drafter: Drafter,
    project_input: Embed,
    hidden_state: mx.array,
    root: mx.array,
    shape: DraftShape,
    rank: Rank | None = None,
) -> Expansion:
    """`search` with a recurrent drafter; the arguments are those of `RecurrentLevels`.

    The noise of a sampling target makes its choices as uncertain as the drafter takes them for, so
    the drafter's inverse temperature applies only where no noise ranks.
    """
    scale = drafter.config.inverse_temperature if rank is None else 1.0
    return search(RecurrentLevels(drafter, project_input, hidden_state, root, scale), shape, rank)
