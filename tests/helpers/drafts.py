"""Drafts of known quality: trees built from the true text with some tokens corrupted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_redrafter.config import TreeShape
from mlx_redrafter.decoding.text import Decoder, InFlight, Proposal
from mlx_redrafter.host import to_ints
from mlx_redrafter.policy.adaptive import CANDIDATES, Drafts
from mlx_redrafter.tree import TokenTree, ancestor_mask


def make_tree(tokens: Sequence[int], parents: Sequence[int], depth: int) -> TokenTree:
    """A tree from lists; ``depth`` is that of the deepest node there may be."""
    depths = [0] * len(tokens)
    for node in range(1, len(tokens)):
        depths[node] = depths[parents[node]] + 1
    parent_nodes = mx.array(list(parents), dtype=mx.int32)
    return TokenTree(
        tokens=mx.array(list(tokens), dtype=mx.int32),
        parents=parent_nodes,
        depths=mx.array(depths, dtype=mx.int32),
        ancestors=ancestor_mask(parent_nodes, depth),
        num_nodes=len(tokens),
        num_unmerged=len(tokens),
        scores=-mx.arange(1, len(tokens), dtype=mx.float32),
    )


def grow(
    rng: random.Random,
    root: int,
    future: Sequence[int],
    shape: TreeShape,
    vocab_size: int,
    accuracy: float,
) -> tuple[list[int], list[int]]:
    """Tokens and parents of a random tree along whose trunk a draft is right with ``accuracy``.

    Wrong drafts have siblings and children too, so that accepted nodes are neither first nor last.
    """
    size = shape.tree_nodes or 1 + shape.draft_length
    tokens, parents, depths = [root], [0], [0]
    truth: dict[int, int] = {0: 0}  # how many tokens of the future a node has right
    children: dict[int, set[int]] = {}
    while len(tokens) < size:
        growing = [n for n in range(len(tokens)) if depths[n] < shape.draft_length]
        # Deep nodes first, so that there is a trunk.
        node = max(rng.sample(growing, min(2, len(growing))))
        right = future[truth[node]] if node in truth and truth[node] < len(future) else None
        token = rng.randrange(vocab_size)
        is_right = right is not None and rng.random() < accuracy
        if is_right:
            assert right is not None
            token = right
        if token in children.setdefault(node, set()):
            if len(children[node]) >= vocab_size:
                break
            continue
        children[node].add(token)
        if token == right:
            truth[len(tokens)] = truth[node] + 1
        tokens.append(token)
        parents.append(node)
        depths.append(depths[node] + 1)
    return tokens, parents


class ScriptedDecoder(Decoder):
    """Drafts trees from the text that is known to come, right 70% of the time."""

    script: Sequence[int] = ()
    accuracy = 0.7
    vocab_size = 64

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.rng = random.Random(7)

    def _draft(self, shape: TreeShape, flight: InFlight) -> Proposal:
        # The flight in hand is not read yet: how far it got is known from the script alone.
        (root,) = to_ints(flight.root)
        tokens_out = to_ints(flight.outcome)[0] + 1 if flight.num_nodes else 1
        future = self.script[self.stats.num_tokens + tokens_out :]
        tokens, parents = grow(self.rng, root, future, shape, self.vocab_size, self.accuracy)
        noise = self.chooser.noise(flight.position, shape.beam_length)
        return Proposal(shape, make_tree(tokens, parents, shape.draft_length), noise)


def scripted(script: Sequence[int], vocab_size: int, accuracy: float = 0.7) -> type[Decoder]:
    """A decoder class that drafts from ``script``, the tokens that plain decoding yields."""
    values = {"script": list(script), "vocab_size": vocab_size, "accuracy": accuracy}
    return type("Scripted", (ScriptedDecoder,), values)


class RandomShapes:
    """Any shape after any other, plain decoding among them, and any number of its nodes."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.seen: set[TreeShape | None] = set()
        self.last: TreeShape | None = None

    def choose(self) -> TreeShape | None:
        shape = self.rng.choice([None, None, TreeShape(3, 4, select="beam"), *CANDIDATES])
        self.seen.add(shape)
        return shape

    def cut(self, shape: TreeShape, read: Callable[[], Drafts]) -> TreeShape:
        if shape.tree_nodes is None:
            return shape
        self.last = replace(shape, tree_nodes=self.rng.randint(2, shape.tree_nodes))
        return self.last

    def observe(self, shape: TreeShape | None, accepted: int, seconds: float | None) -> None:
        if shape is None:
            assert accepted == 0
        elif shape.tree_nodes is not None:
            assert shape == self.last
            assert accepted < shape.tree_nodes
