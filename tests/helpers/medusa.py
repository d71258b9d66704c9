"""Medusa heads for tests: random ones, and ones that know a text of a model by heart.

Axes: n tokens of a text, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_redrafter.proposers.medusa.config import MedusaConfig
from mlx_redrafter.proposers.medusa.network import Medusa
from mlx_redrafter.target.hooks import captured
from mlx_redrafter.target.target import Target
from tests.helpers.models import draw_weights


def random_medusa(
    vocab_size: int = 64, hidden_size: int = 32, num_heads: int = 3, **config: Any
) -> Medusa:
    """Untrained heads with one block each, in float32."""
    values = {"num_layers": 1, **config}
    return draw_weights(Medusa(MedusaConfig(vocab_size, hidden_size, num_heads, **values)))


def fitted_medusa(model: nn.Module, text: Sequence[int], num_heads: int = 4) -> Medusa:
    """Heads that are mostly right where ``model`` continues ``text`` as it stands.

    Their blocks do little, and their final layers solve for the tokens that follow by least
    squares.
    """
    size = Target(model).vocab_size
    with captured() as outputs:
        model(mx.array([list(text)]))
    hidden = np.array(outputs[-1][0].astype(mx.float32))
    hidden_size = hidden.shape[-1]
    network = random_medusa(size, hidden_size, num_heads)
    for k in range(num_heads):
        block: Any = network.heads[k][0]
        block.linear.weight = 0.01 * block.linear.weight
        block.linear.bias = 0.01 * block.linear.bias
        states = hidden[: len(text) - k - 2]
        wanted = 12 * np.eye(size)[list(text)[k + 2 :]]
        ridge = states.T @ states + 1e-2 * np.eye(hidden_size)
        output: Any = network.heads[k][-1]
        output.weight = mx.array(np.linalg.solve(ridge, states.T @ wanted).T, dtype=mx.float32)
    mx.eval(network.parameters())
    return network


def with_static_tree(
    network: Medusa, accuracies: Sequence[Sequence[float]] | None = None
) -> Medusa:
    """The same heads with a static tree, by default for accuracies that halve with the rank."""
    config = network.config
    num_ranks = min(32, config.head_rows)
    table = accuracies or [
        [0.8**k * 0.5 ** (r + 1) for r in range(num_ranks)] for k in range(config.num_heads)
    ]
    other = Medusa(
        replace(config, tree="static", rank_accuracies=tuple(tuple(row) for row in table))
    )
    other.update(network.parameters())
    return other
