"""Slow and obvious versions of the array code, in numpy and plain Python.

Axes: W beam width, L beam length (root included), V vocabulary, H hidden size.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_redrafter.bench.lab.contexts import prefill
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.kernels.small_t import as_integers
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import NO_TOKEN, TokenTree
from tests.helpers.drafts import grow, make_tree

Path = tuple[int, ...]
Array = np.ndarray


class NumpyDrafter:
    """The drafter's equations in float64, from its weights alone."""

    def __init__(self, drafter: Drafter):
        self.config = drafter.config
        leaves = named_parameters(drafter)
        self.weights = {name: np.array(leaf, dtype=np.float64) for name, leaf in leaves.items()}

    def start(self) -> Array:
        return np.zeros(self.config.hidden_size)

    def advance(self, state: Array, embedding: Array) -> Array:
        if not self.config.rnn:
            return state + embedding
        return silu(
            self.weights["rnn_w.weight"] @ embedding
            + self.weights["rnn_u.weight"] @ state
            + self.weights["rnn_u.bias"]
        )

    def log_probs(self, hidden: Array, state: Array) -> Array:
        """Log-probabilities of the next token, shape (V,)."""
        x = np.concatenate([hidden, state])
        if "input_proj.weight" in self.weights:
            x = self.weights["input_proj.weight"] @ x + self.weights["input_proj.bias"]
        layers = self.config.num_draft_layers
        for i in range(layers):
            name = f"lm_head.{i}.linear"
            x = x + silu(self.weights[f"{name}.weight"] @ x + self.weights[f"{name}.bias"])
        logits = self.weights[f"lm_head.{layers}.weight"] @ x
        logits = logits - logits.max()
        return np.asarray(logits - np.log(np.exp(logits).sum()))


def silu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(x / 2)))  # exp would overflow


class Search(NamedTuple):
    """The W beams of a beam search, and every path it scored with its score."""

    beams: list[Path]
    scores: dict[Path, float]


def beam_search(
    drafter: NumpyDrafter, embedding: Array, hidden: Array, root: int, width: int, length: int
) -> Search:
    """Literal beam search: every level ranks all W * V continuations."""
    state = drafter.advance(drafter.start(), embedding[root])
    beams: list[tuple[Path, float, Array]] = [((root,), 0.0, state)]
    scores: dict[Path, float] = {}
    for _ in range(length - 1):
        continuations = []
        for path, score, state in beams:
            log_probs = drafter.log_probs(hidden, state)
            order = np.argsort(-log_probs, kind="stable")
            for token in order:
                continuations.append(((*path, int(token)), score + log_probs[token], state))
        continuations.sort(key=lambda item: -item[1])
        for path, score, _ in continuations[: 1 if width == 1 else min(4 * width, len(order))]:
            scores[path] = score
        beams = [
            (path, score, drafter.advance(state, embedding[path[-1]]))
            for path, score, state in continuations[:width]
        ]
    return Search([path for path, _, _ in beams], scores)


def dedup_and_pack(beams: Array) -> tuple[list[int], list[int]]:
    """Tokens and parents of Apple's packed beams: ``dedup_prefix``, then ``pack_beam``.

    ``first[i, j]`` is the first beam that shares the prefix ``beams[i, :j + 1]``; a position is
    packed where that is the beam itself.
    """
    width, length = beams.shape
    same = np.cumprod(beams[:, None] == beams[None], axis=2)
    first = same.argmax(axis=1)
    index = {}
    tokens: list[int] = []
    parents: list[int] = []
    for i in range(width):
        for j in range(length):
            if first[i, j] == i:
                index[i, j] = len(tokens)
                tokens.append(int(beams[i, j]))
                parents.append(index[first[i, j - 1], j - 1] if j else 0)
    return tokens, parents


def node_paths(parents: Sequence[int]) -> list[list[int]]:
    """The nodes from the root to each node, both included."""
    paths = [[0]]
    for node in range(1, len(parents)):
        paths.append([*paths[parents[node]], node])
    return paths


def assert_scores(model: nn.Module, text: Sequence[int], tree: TokenTree, tolerance: float) -> None:
    """Every node's score is the sum of the log-probabilities that a model gives to its path."""
    tokens: list[int] = np.array(tree.tokens).tolist()
    assert tokens[0] == text[-1]
    for path, score in zip(
        node_paths(np.array(tree.parents).tolist())[1:], tree.read().scores, strict=True
    ):
        drafts = [tokens[node] for node in path[1:]]
        logits = model(mx.array([[*text, *drafts]]))[0].astype(mx.float32)
        log_probs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        expected = sum(log_probs[len(text) - 1 + i, draft] for i, draft in enumerate(drafts))
        assert score == pytest.approx(expected, abs=tolerance)


def logits_of_tree(model: nn.Module, follow: bool) -> list[mx.array]:
    """Bits of the logits of a tree's nodes, at once or, to ``follow``, token by token."""
    target, text, plan = Target(model), mx.array([1, 5, 9]), DraftPlan.of(4, 5, 9)
    tokens, parents = grow(random.Random(0), 6, [], plan, target.vocab_size, accuracy=0)

    def start() -> Any:
        cache = target.caches.new()
        prefill(target, text, cache, 512)
        return cache

    if not follow:
        logits = target.verify(make_tree(tokens, parents, 4), start()).logits
        return [as_integers(row) for row in logits[: len(tokens)]]
    found = []
    for path in node_paths(parents):
        cache = start()
        for above in path:
            logits = target.advance(mx.array([tokens[above]]), cache).logits
        found.append(as_integers(logits[0]))
    return found


def are_equal(first: list[mx.array], second: list[mx.array]) -> bool:
    return all(mx.array_equal(*pair) for pair in zip(first, second, strict=True))


def paths_of(tokens: list[int], parents: list[int]) -> list[Path]:
    """For every node that is no padding, the tokens from the root to it."""
    paths = [tuple(tokens[node] for node in path) for path in node_paths(parents)]
    return [path for path in paths if NO_TOKEN not in path]


def tree_paths(tree: TokenTree) -> list[Path]:
    """`paths_of` a tree, which must agree with itself in all its arrays."""
    tokens: list[int] = np.array(tree.tokens).tolist()
    parents: list[int] = np.array(tree.parents).tolist()
    depths: list[int] = np.array(tree.depths).tolist()
    assert parents[0] == depths[0] == 0
    for node in range(1, len(tokens)):
        assert parents[node] < node
        is_padding = tokens[node] == NO_TOKEN
        assert depths[node] == (0 if is_padding else depths[parents[node]] + 1)
    paths = paths_of(tokens, parents)
    assert len(set(paths)) == len(paths) == tree.num_nodes
    assert np.array_equal(np.array(tree.ancestors), ancestors(parents))
    return paths


def ancestors(parents: list[int]) -> Array:
    """The ancestor mask, from the path to every node."""
    mask = np.zeros((len(parents), len(parents)), dtype=bool)
    for node, path in enumerate(node_paths(parents)):
        mask[node, path] = True
    return mask


def walk(tokens: list[int], parents: list[int], chosen: list[int]) -> list[int]:
    """Node indices of the longest path along which every draft is what its parent chose."""
    path = [0]
    while True:
        here = path[-1]
        below = [
            node
            for node in range(1, len(tokens))
            if parents[node] == here and tokens[node] == chosen[here]
        ]
        if not below:
            return path
        (node,) = below
        path.append(node)
