"""A search of a recurrent drafter outside decoding."""

from collections.abc import Callable

import mlx.core as mx

from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.proposers.redrafter.network import Drafter, RecurrentLevels
from mlx_redrafter.proposers.search import Expansion, Rank, search_all


def expand(
    drafter: Drafter,
    embed: Callable[[mx.array], mx.array],
    hidden: mx.array,
    root: mx.array,
    shape: DraftShape,
    rank: Rank | None = None,
) -> Expansion:
    """Search after one root, given its hidden state, shape (H,), and the target's embedding."""

    def project_input(ids: mx.array) -> mx.array:
        return drafter.project_input(embed(ids))

    levels = RecurrentLevels(drafter, project_input, hidden[None], root, rank is not None)
    return search_all(levels, shape, rank).alone
