"""Links: scores of a token that depend on the draft before it.

A link adds ``<feature(p, h, s), table[t]>`` to the logit of token t after token p. Here h is the
block's output at the depth of t, and s a state of the beam.

Axes: W beams, H hidden size, r rank, V rows of the head, K candidates.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.proposers.block.config import BlockConfig


class Selector(nn.Module):
    """The candidate selector of DFlash 2: ``feature = predecessor[p] * hidden_projection(h)``."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.predecessor_codebook = mx.zeros((config.vocab_size, config.rank))
        self.successor_codebook = mx.zeros((config.head_rows, config.rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.rank, bias=False)

    def feature(
        self, previous: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        return self.predecessor_codebook[previous] * self.hidden_projection(hidden), None

    def scores(self, feature: mx.array, rows: mx.array | None) -> mx.array:
        table = self.successor_codebook
        return feature @ table.T if rows is None else _scores(feature, table[rows])


class MarkovHead(nn.Module):
    """The Markov head of DSpark.

    With ``e = w1[p]``, the feature is ``e``, ``sigmoid(gate_proj([h, e])) * e``, or the output of a
    recurrent cell: ``[g, c, o] = joint_proj([s, e, h])``, feature ``tanh(o)``, next state
    ``sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)``, which begins with zeros.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.kind, rank = config.link, config.rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.head_rows, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        if self.kind == "recurrent":
            self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def feature(
        self, previous: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        e = self.markov_w1(previous)
        if self.kind == "vanilla":
            return e, None
        h = mx.broadcast_to(hidden, (e.shape[0], hidden.shape[-1])).astype(e.dtype)
        if self.kind == "gated":
            return mx.sigmoid(self.gate_proj(mx.concatenate([h, e], axis=-1))) * e, None
        state = mx.zeros_like(e) if state is None else state
        joint = self.joint_proj(mx.concatenate([state, e, h], axis=-1))
        gate, candidate, output = mx.split(joint, 3, axis=-1)
        gate = mx.sigmoid(gate)
        return mx.tanh(output), gate * state + (1 - gate) * mx.tanh(candidate)

    def scores(self, feature: mx.array, rows: mx.array | None) -> mx.array:
        if rows is None:
            return self.markov_w2(feature)
        table = self.markov_w2
        weight = table.weight[rows]
        if "scales" in table:
            weight = mx.dequantize(
                weight, table.scales[rows], table.biases[rows], table.group_size, table.bits
            )
        return _scores(feature, weight)


def _scores(feature: mx.array, weight: mx.array) -> mx.array:
    """Multiply features, (W, r), with rows of a table, (1, K, r) or (W, K, r), to (W, K)."""
    return (weight @ feature[..., None]).squeeze(-1)
