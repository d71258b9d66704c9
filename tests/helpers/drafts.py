"""Drafts of known quality: trees built from the true text with some tokens corrupted."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.protocols import DraftPolicy, Proposer, Step
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.policy.calibration import Calibration, ScoredDrafts
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree


def make_tree(tokens: Sequence[int], parents: Sequence[int], depth: int) -> TokenTree:
    """Make a tree of lists; ``depth`` is that of the deepest node there may be."""
    scores = [-1.0 * node for node in range(1, len(tokens))]
    tree = TokenTree.of(tokens, parents, scores)
    return replace(tree, max_depth=depth, is_chain=tree.is_chain and tree.max_depth == depth)


def scored(tree: TokenTree, scores: Sequence[float]) -> TokenTree:
    """Give a tree scores as a network does, in arrays that the host has not read."""
    values = mx.array(scores, dtype=mx.float32)
    places = () if tree.is_chain else (tree.parents[1:], tree.depths[1:])
    columns = tree.tokens[1:], values.view(mx.int32), *places
    return replace(tree, packed=mx.concatenate(columns))


def grow(
    rng: random.Random,
    root: int,
    future: Sequence[int],
    plan: DraftPlan,
    vocab_size: int,
    accuracy: float,
) -> tuple[list[int], list[int]]:
    """Tokens and parents of a random tree along whose trunk a draft is right with ``accuracy``.

    Wrong drafts have siblings and children too, so that accepted nodes are neither first nor last.
    """
    size = plan.num_nodes if plan.shape.select == "top_n" else 1 + plan.shape.levels
    tokens, parents, depths = [root], [0], [0]
    truth: dict[int, int] = {0: 0}  # how many tokens of the future a node has right
    children: dict[int, set[int]] = {}
    while len(tokens) < size:
        growing = [n for n in range(len(tokens)) if depths[n] < plan.shape.levels]
        # Deep nodes first, so that there is a trunk.
        node = max(rng.sample(growing, min(2, len(growing))))
        right = future[truth[node]] if node in truth and truth[node] < len(future) else None
        token = rng.randrange(vocab_size)
        is_right = right is not None and rng.random() < accuracy
        if is_right:
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


class Scripted:
    """A proposer of trees from the text to come; a draft on the trunk is right by ``accuracy``."""

    num_layers = 0
    num_rows: int | None = None
    max_length: int | None = None
    networks: tuple[nn.Module, ...] = ()

    def __init__(
        self, script: Sequence[int], vocab_size: int, accuracy: float = 0.7, seed: int = 7
    ):
        self.script = list(script)
        self.vocab_size = vocab_size
        self.accuracy = accuracy
        self.seed = seed

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        """Fits every target."""

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> "ScriptedDrafting":
        return ScriptedDrafting(self)


class ScriptedDrafting:
    """One text's drafts of a `Scripted` proposer."""

    reader = None

    def __init__(self, proposer: Scripted):
        self.proposer = proposer
        self.rng = random.Random(proposer.seed)
        self.num_tokens = 0

    def matches(self, least: float) -> None:
        """It always has something to propose."""

    def propose(self, flight: Pass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        """A random tree along the script; how far the pass got is read."""
        self.skip(flight)
        script = self.proposer
        future = script.script[self.num_tokens :]
        tokens, parents = grow(
            self.rng, flight.tokens[-1], future, plan, script.vocab_size, script.accuracy
        )
        return make_tree(tokens, parents, plan.shape.levels)

    def skip(self, flight: Pass) -> None:
        self.num_tokens += len(flight.tokens)

    def trim_to(self, length: int) -> None:
        """Nothing to trim."""


# Every width and length that a policy may choose, with all drafts that a search scores.
ALL_PLANS = [
    DraftPlan(shape, shape.max_nodes)
    for shape in (DraftShape(width, length) for width in range(1, 5) for length in range(2, 11))
]


class RandomShapes:
    """Any shape after any other, plain decoding among them, and any number of its nodes.

    Some are of shadow drafts.
    """

    reads_drafts = True
    least_chance = 0.0

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.seen: set[DraftPlan | None] = set()
        self.last: int | None = None
        # Drafts of a lookup that were merged with a network's.
        self.num_others = 0

    def choose(self, matches: Sequence[float] | None) -> DraftPlan | None:
        merged = DraftPlan.of(3, 4, select="beam")
        plan = self.rng.choice([None, None, merged, *ALL_PLANS])
        self.seen.add(plan)
        if plan is not None and plan != merged and self.rng.random() < 0.3:
            return replace(plan, num_nodes=1)
        return plan

    def select(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        self.last = None
        if plan.shape.select == "beam":
            return tree
        self.last = 1 if plan.is_shadow else self.rng.randint(1, tree.size)
        if self.rng.random() < 0.5:
            return tree.first(self.last)
        drafts, among = tree.read(), None
        if not plan.is_shadow and self.rng.random() < 0.5:  # also those that a lookup has
            of_network = ScoredDrafts(plan.searched, tree)
            of_network.score(Calibration())
            among, _ = of_network.with_others()
            drafts = among or drafts
            self.num_others += len(drafts.tokens) - len(of_network.drafts.tokens)
            self.last = self.rng.randint(1, 1 + len(drafts.tokens))
        # Any drafts whose parents are there, too.
        parents, kept = drafts.parents, [0]
        while len(kept) < self.last:
            kept.append(
                self.rng.choice(
                    [i + 1 for i, p in enumerate(parents) if p in kept and i + 1 not in kept]
                )
            )
        return tree.subtree([node - 1 for node in kept[1:]], among)

    def observe(self, step: Step) -> None:
        if step.plan is None:
            assert len(step.tokens) == 1
        elif step.plan.shape.select == "top_n":
            assert step.num_nodes == self.last
            assert len(step.tokens) <= step.num_nodes


def use_policy(patch: pytest.MonkeyPatch, policy: DraftPolicy) -> None:
    """Let ``policy`` say how much the texts of all engines draft."""
    plan = Engine._plan

    def plan_with_policy(*args: Any) -> tuple[Proposer, DraftPolicy]:
        proposer, _ = plan(*args)
        return proposer, policy

    patch.setattr(Engine, "_plan", plan_with_policy)
