"""Medusa heads: their network, which proposes from the target's newest state alone.

Axes: K heads, H hidden size of the target, V rows of a head, n states.

Source: arXiv 2401.10774 and FasterDecoding's ``medusa_model.py``, whose parameter names are kept
behind ``heads.``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.decoding.protocols import Group
from mlx_redrafter.decoding.sampling import top_k
from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH, DraftShape
from mlx_redrafter.proposers.draft_network import DraftNetwork, ResBlock, dtype_of
from mlx_redrafter.proposers.medusa.config import MedusaConfig
from mlx_redrafter.proposers.search import (
    Expansion,
    FactorisedLevels,
    NoiseRank,
    bounded,
    log_probs,
    search_all,
)


class Medusa(DraftNetwork):
    """K heads that propose the target's next tokens from its last hidden state.

        x = h;  x = x + silu(linear_k,i(x));  y = output_k(x)

    Head k proposes the tokens k + 1 after the root, whatever tokens stand between them.
    """

    config: MedusaConfig

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config, self.max_length = config, min(1 + config.num_heads, MAX_BEAM_LENGTH)
        self.heads: list[list[nn.Module]] = []
        for _ in range(config.num_heads):
            blocks = [ResBlock(config.hidden_size, config.bias) for _ in range(config.num_layers)]
            output = nn.Linear(config.hidden_size, config.head_rows, bias=False)
            self.heads.append([*blocks, output])
        if config.draft_vocab_size is not None:
            self.token_ids = mx.arange(config.draft_vocab_size, dtype=mx.int32)

    @property
    def dtype(self) -> mx.Dtype:
        return dtype_of(self.heads[0][-1])

    @property
    def num_rows(self) -> int:
        """Number of tokens that a head proposes; with a static tree, the number of ranks."""
        accuracies = self.config.static_accuracies
        return self.config.head_rows if accuracies is None else len(accuracies[0])

    def logits(self, hidden: mx.array, head: int) -> mx.array:
        """Compute the logits of head k, shape (n, V), in the network's dtype.

        ``hidden`` are the target's last hidden states after its final norm, shape (n, H).
        """
        x = hidden.astype(self.dtype)
        for layer in self.heads[head]:
            x = layer(x)
        return x

    def log_probs(self, hidden: mx.array, head: int, scale: float = 1.0) -> mx.array:
        """Compute natural log-probabilities of `logits` times ``scale``, float32, shape (n, V)."""
        return log_probs(self.logits(hidden, head).astype(mx.float32) * scale)

    def expand(self, group: Group, shape: DraftShape, rank: NoiseRank | None) -> Expansion:
        hidden = mx.stack([flight.hidden_state for _, flight in group])
        # The target's noise makes its choices as uncertain as the probabilities say.
        scale = self.config.inverse_temperature if rank is None else 1.0

        def score(depth: int) -> mx.array:
            found = self.log_probs(hidden, depth, scale)
            return found if rank is None else rank(found, depth)

        accuracies = self.config.static_accuracies
        if accuracies is None:
            levels = FactorisedLevels(score, self.to_token_ids)
        else:
            levels = ranked_levels(score, accuracies, self.to_token_ids)
        return search_all(levels, shape)


def ranked_levels(
    log_probs: Callable[[int], mx.array],
    accuracies: Sequence[Sequence[float]],
    to_token_ids: Callable[[mx.array], mx.array],
) -> FactorisedLevels:
    """Make levels of the paper's static tree, which propose ranks instead of rows of a head.

    The score of a path of ranks is the product of their measured ``accuracies``, by depth and rank,
    whatever the probabilities are at this step. The best paths are those that the paper finds one
    by one on calibration data, adding the best neighbour each time. ``log_probs`` ranks the tokens
    of a depth; ``to_token_ids`` returns the ids of rows of the head.
    """
    num_ranks = len(accuracies[0])
    logs = mx.log(mx.array([list(row) for row in accuracies], dtype=mx.float32))
    # Token ids by rank after each root, at the depth scored last.
    newest = mx.zeros((1, num_ranks), dtype=mx.int32)

    def score(depth: int) -> mx.array:
        nonlocal newest
        newest = to_token_ids(top_k(bounded(log_probs(depth)), num_ranks)[1])
        return mx.broadcast_to(logs[depth], newest.shape)

    return FactorisedLevels(score, lambda ranks: mx.take_along_axis(newest, ranks, axis=-1))
