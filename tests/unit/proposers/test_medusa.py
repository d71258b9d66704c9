"""Medusa heads: which trees they make, their files, and what their configs may say.

Axes: K heads, R ranks, V vocabulary.
"""

import json
from collections.abc import Sequence
from itertools import product
from math import log, prod
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.decoding.sampling import GumbelNoise, gumbel_noise
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.proposers.fit import ReadSequence
from mlx_redrafter.proposers.medusa.config import MedusaConfig
from mlx_redrafter.proposers.medusa.network import Medusa, calibrate, rank_accuracies
from mlx_redrafter.trees.tree import TokenTree
from tests.helpers.flights import flight_of
from tests.helpers.medusa import random_medusa, with_static_tree
from tests.helpers.oracles import Path as Node
from tests.helpers.oracles import paths_of

VOCAB_SIZE = 64
NUM_HEADS = 4
HIDDEN = mx.random.normal((32,), key=mx.random.key(5))


def propose(network: Medusa, plan: DraftPlan, noise: Any = None, couple: bool = True) -> TokenTree:
    flight = flight_of([9], 0, 9, 1, hidden_state=HIDDEN)
    target: Any = None
    return network.open(target, [1], couple, []).propose(flight, plan, noise)


def paths(tree: TokenTree) -> dict[Node, float]:
    """Tokens from the root to each node, and its score."""
    found = paths_of(to_ints(tree.tokens), to_ints(tree.parents))[1:]
    return {path[1:]: score for path, score in zip(found, tree.read().scores, strict=True)}


def marginals(network: Medusa, scale: float = 1.0) -> np.ndarray:
    """Log-probabilities of every head by themselves, shape (K, V)."""
    return np.stack([np.array(network.log_probs(HIDDEN[None], k, scale)[0]) for k in range(4)])


def best_products(scores: np.ndarray, count: int) -> dict[Node, float]:
    """The paths with the largest sums of scores of their tokens, among the 10 best of each head."""
    best = [np.argsort(-row)[:10] for row in scores]
    found = {
        tuple(map(int, path)): float(sum(scores[d, token] for d, token in enumerate(path)))
        for depth in range(1, len(scores) + 1)
        for path in product(*best[:depth])
    }
    return dict(sorted(found.items(), key=lambda item: -item[1])[:count])


def test_the_dynamic_tree_has_the_largest_products_of_probabilities():
    network = random_medusa(num_heads=NUM_HEADS)
    for count in (4, 12):
        found = paths(propose(network, DraftPlan.of(16, 5, count + 1)))
        assert found == pytest.approx(best_products(marginals(network), count), abs=1e-4)


def test_calibration_applies_where_no_noise_ranks():
    network = random_medusa(num_heads=NUM_HEADS, inverse_temperature=0.5, coupling_weight=0.7)
    plan = DraftPlan.of(16, 5, 9)
    assert paths(propose(network, plan)) == pytest.approx(
        best_products(marginals(network, 0.5), 8), abs=1e-4
    )
    params = SamplingParams(temp=0.8)
    noise = GumbelNoise(params, gumbel_noise(7, mx.arange(5), VOCAB_SIZE))
    scores = marginals(network) / 0.8 + 0.7 * np.array(noise.values[:NUM_HEADS])
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    assert paths(propose(network, plan, noise)) == pytest.approx(best_products(scores, 8), abs=1e-4)
    uncoupled = paths(propose(network, plan, noise, couple=False))
    assert uncoupled == paths(propose(network, plan))


def explored(accuracies: np.ndarray, num_nodes: int) -> list[Node]:
    """The paper's search: the best neighbour of the nodes so far, one after another."""
    nodes: list[Node] = []
    while len(nodes) < num_nodes:
        neighbours = {(0,)} | {(*node, 0) for node in nodes if len(node) < len(accuracies)}
        neighbours |= {(*node[:-1], node[-1] + 1) for node in nodes}
        waiting = [n for n in neighbours - set(nodes) if n[-1] < accuracies.shape[1]]
        nodes.append(max(waiting, key=lambda n: prod(accuracies[d, r] for d, r in enumerate(n))))
    return nodes


@pytest.mark.parametrize("has_noise", [False, True])
def test_the_static_tree_is_the_papers_whatever_the_probabilities(has_noise):
    random = np.random.default_rng(2)
    accuracies = -np.sort(-random.uniform(0.001, 0.5, (NUM_HEADS, 32)), axis=1)
    network = with_static_tree(random_medusa(num_heads=NUM_HEADS), accuracies.tolist())
    noise, scores = None, marginals(network)
    if has_noise:
        noise = GumbelNoise(SamplingParams(temp=1.0), gumbel_noise(3, mx.arange(5), VOCAB_SIZE))
        scores = scores + 0.5 * np.array(noise.values[:NUM_HEADS])
    ranked = np.argsort(-scores, axis=1)
    explored_places = [list(enumerate(node)) for node in explored(accuracies, 24)]
    expected = {
        tuple(int(ranked[place]) for place in places): sum(log(accuracies[one]) for one in places)
        for places in explored_places
    }
    found = paths(propose(network, DraftPlan.of(32, 5, 25), noise))
    assert found == pytest.approx(expected, abs=1e-4)


def test_heads_of_few_tokens():
    network = random_medusa(num_heads=2, draft_vocab_size=3)
    network.token_ids = mx.array([60, 2, 33], dtype=mx.int32)
    for one in (network, with_static_tree(network)):
        assert one.num_rows == 3
        tree = propose(one, DraftPlan.of(3, 3, 7))
        assert set(to_ints(tree.tokens)[1:]) == {60, 2, 33}


def right_text(network: Medusa, shift: Sequence[int]) -> ReadSequence:
    """A text whose tokens are of some rank for each head, shape (n,)."""
    hidden = mx.random.normal((40, 32), key=mx.random.key(2))
    chosen = np.zeros(40, dtype=np.int32)
    for i in range(1, 40):
        order = np.argsort(-np.array(network.log_probs(hidden[i - 1 : i], 0)[0]))
        chosen[i] = order[shift[i % len(shift)]]
    others = (chosen[:, None] + np.arange(8)) % VOCAB_SIZE
    log_probs = mx.broadcast_to(-mx.arange(8.0), (40, 8))
    return ReadSequence(mx.array([0, *chosen.tolist()]), 1, hidden, mx.array(others), log_probs)


def test_accuracies_of_ranks_are_counted():
    network = random_medusa(num_heads=2)
    text = right_text(network, [0, 0, 0, 2])  # three in four are the first, one the third
    first, second = rank_accuracies(network, [text])
    counts = [(39 + 16) * chance - 0.5 for chance in first]
    assert counts[:4] == pytest.approx([29, 0, 10, 0], abs=1e-6)
    assert sum(first) == pytest.approx(1)
    assert len(second) == 32
    single = random_medusa(num_heads=1)
    assert calibrate(single, [right_text(single, [0])]).inverse_temperature > 1
    assert calibrate(single, [right_text(single, [9])]).inverse_temperature < 1
    config = MedusaConfig(64, 32, 2, 1, tree="static", rank_accuracies=(first, second))
    assert MedusaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


ROWS, THREE = [[0.1] * 32] * 3, "rank_accuracies must be 3 lists of 32 numbers above 0"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_heads": 0}, "num_heads must be an integer from 1 to 64"),
    ({"num_layers": -1}, "num_layers must be an integer from 0"),
    ({"bias": 1}, "bias must be true or false"),
    ({"tree": "wide"}, "tree must be one of dynamic, static, got 'wide'"),
    ({"tree": "static"}, "'static' needs rank_accuracies"),
    *(
        ({"rank_accuracies": bad}, THREE)
        for bad in (ROWS[:2], [*ROWS[:2], [0.1] * 31], [*ROWS[:2], [0.0] * 32], [1, 2, 3], "abc")
    ),
    ({"draft_vocab_size": 65}, "draft_vocab_size must be an integer from 1 to 64"),
    ({"score_scale": 0}, "score_scale must be a number above 0 and at most 100"),
    ({"noise_share": 2}, "noise_share must be a number from 0 to 1"),
    ({"model_type": "llama"}, "expected a drafter with model_type 'redrafter_medusa'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_configs_out_of_range(changes, message):
    good = random_medusa().config.to_dict()
    with pytest.raises(CheckpointError, match=message):
        MedusaConfig.from_dict({**good, **changes})
    del good["num_heads"]
    with pytest.raises(CheckpointError, match="lacks num_heads"):
        MedusaConfig.from_dict(good)
