"""Medusa heads: their network, which proposes from the target's newest state alone.

They are calibrated, and the accuracies of their ranks measured, on sequences of the target.

Axes: K heads, H hidden size of the target, V rows of a head, n states, p predictions, R ranks.

Source: arXiv 2401.10774 and FasterDecoding's ``medusa_model.py``, whose parameter names are kept
behind ``heads.``.
"""

from collections.abc import Iterable

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_redrafter.decoding.passes import hidden_states_of
from mlx_redrafter.decoding.protocols import Group
from mlx_redrafter.decoding.sampling import top_k
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH, DraftShape
from mlx_redrafter.proposers.draft_network import DraftNetwork, ResBlock, dtype_of
from mlx_redrafter.proposers.fit import Prediction, ReadSequence, fit_depths, parts
from mlx_redrafter.proposers.medusa.config import MAX_RANKS, MedusaConfig
from mlx_redrafter.proposers.search import Expansion, NoiseRank, bounded, log_probs, search_all


class Medusa(DraftNetwork):
    """K heads that propose the target's next tokens from its last hidden state.

        x = h;  x = x + silu(linear_k,i(x));  y = output_k(x)

    Head k proposes the tokens k + 1 after the root, whatever tokens stand between them.
    """

    config: MedusaConfig

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        self.max_length = min(1 + config.num_heads, MAX_BEAM_LENGTH)
        self.heads: list[list[nn.Module]] = []
        for _ in range(config.num_heads):
            blocks = [ResBlock(config.hidden_size, config.bias) for _ in range(config.num_layers)]
            output = nn.Linear(config.hidden_size, config.head_rows, bias=False)
            self.heads.append([*blocks, output])

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
        hidden = hidden_states_of([flight for _, flight in group])
        return search_all(MedusaLevels(self, hidden, rank), shape)


class MedusaLevels:
    """The heads after R roots; a `LevelScorer`. A depth has the same tokens after all drafts.

    The paper's static tree has ranks instead of rows of a head. The score of a path of ranks is the
    product of their measured accuracies, whatever the probabilities are at this step. The best
    paths are those that the paper finds one by one on calibration data, adding the best neighbour
    each time.
    """

    def __init__(self, network: Medusa, hidden: mx.array, rank: NoiseRank | None):
        self.network, self.hidden, self.rank = network, hidden, rank
        # The target's noise makes its choices as uncertain as the probabilities say.
        self.scale = network.config.inverse_temperature if rank is None else 1.0
        self.accuracies = network.config.static_accuracies

    def first(self) -> mx.array:
        return self._score(0)

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        rows = self._score(depth)
        if rows.shape[0] == 1:
            return mx.broadcast_to(rows, (tokens.shape[0], rows.shape[1]))
        return mx.repeat(rows, tokens.shape[0] // rows.shape[0], axis=0)

    def to_token_ids(self, rows: mx.array) -> mx.array:
        if self.accuracies is None:
            return self.network.to_token_ids(rows)
        return mx.take_along_axis(self._newest, rows, axis=-1)

    def _score(self, depth: int) -> mx.array:
        """Compute log-probabilities of the tokens, or ranks, of a depth, float32, shape (R, V)."""
        found = self.network.log_probs(self.hidden, depth, self.scale)
        if self.rank is not None:
            found = self.rank(found, depth)
        if self.accuracies is None:
            return found
        logs = mx.log(mx.array(self.accuracies[depth]))
        # Token ids by rank after each root.
        self._newest = self.network.to_token_ids(top_k(bounded(found), logs.size)[1])
        return mx.broadcast_to(logs, self._newest.shape)


def predict(network: Medusa, text: ReadSequence) -> list[Prediction]:
    """Predict with each head and each generated token as the root, up to the end."""
    hidden, length = text.states[text.num_prompt - 1 :], text.top_ids.shape[0]
    return [
        Prediction(
            network.logits(hidden[: length - ahead], head),
            text.top_ids[ahead:],
            text.top_log_probs[ahead:],
        )
        for head in range(network.config.num_heads)
        if (ahead := head + 1) < length
    ]


def calibrate(network: Medusa, texts: Iterable[ReadSequence]) -> MedusaConfig:
    """Return the config with scalars fitted to sequences, the same for all heads; waits."""
    found = (predict(network, part) for text in texts for part in parts(text, 2))
    return fit_depths(network, found)[0]


def rank_accuracies(
    network: Medusa, texts: Iterable[ReadSequence]
) -> tuple[tuple[float, ...], ...]:
    """Estimate the chances that the target's token is the r-th most probable one of each head.

    The count of every rank begins with half a token, as even a rank that few texts never show has
    some chance. Waits for the device.
    """
    config = network.config
    num_ranks = min(MAX_RANKS, config.head_rows)
    counts = np.full((config.num_heads, num_ranks), 0.5)
    totals = np.full((config.num_heads, 1), 0.5 * num_ranks)
    for text in texts:
        for head, prediction in enumerate(predict(network, text)):
            best = mx.argsort(-prediction.logits.astype(mx.float32), axis=-1)[:, :num_ranks]
            is_right = network.to_token_ids(best) == prediction.chosen[:, None]  # (p, R)
            counts[head] += to_ints(mx.sum(is_right, axis=0))
            totals[head] += is_right.shape[0]
    return tuple(map(tuple, (counts / totals).tolist()))
