"""Beam search and both selections against literal versions in numpy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.search import Expansion, build_tree, merge_beams
from mlx_redrafter.trees.tree import TokenTree
from tests.helpers.models import random_drafter
from tests.helpers.oracles import (
    NumpyDrafter,
    Search,
    beam_search,
    dedup_and_pack,
    paths_of,
    tree_paths,
)
from tests.helpers.recurrent_search import expand

VOCAB_SIZE, HIDDEN_SIZE = 70, 16
ROOT = 11

WIDTHS_AND_LENGTHS = [(1, 2), (1, 16), (2, 3), (3, 5), (4, 5), (7, 4), (16, 6), (64, 2), (64, 3)]


def _context(seed: int, vocab_size: int = VOCAB_SIZE) -> tuple[mx.array, mx.array]:
    """An input embedding, shape (V, H), and a hidden state, shape (H,)."""
    keys = mx.random.split(mx.random.key(seed), 2)
    embedding = mx.random.normal((vocab_size, HIDDEN_SIZE), key=keys[0])
    return embedding, mx.random.normal((HIDDEN_SIZE,), key=keys[1])


def _expand(drafter: Drafter, shape: DraftShape, seed: int) -> tuple[Expansion, Search]:
    embedding, hidden = _context(seed, drafter.config.vocab_size)
    expansion = expand(
        drafter,
        lambda ids: embedding[ids],
        hidden,
        mx.array([ROOT]),
        shape,
    )
    literal = beam_search(
        NumpyDrafter(drafter),
        np.array(embedding, dtype=np.float64),
        np.array(hidden, dtype=np.float64),
        ROOT,
        shape.width,
        shape.length,
    )
    return expansion, literal


def _scored_paths(expansion: Expansion) -> dict[tuple[int, ...], float]:
    tokens: list[int] = np.array(expansion.tokens).tolist()
    parents: list[int] = np.array(expansion.parents).tolist()
    paths = paths_of([ROOT, *tokens], [0, *(parent + 1 for parent in parents)])[1:]
    return dict(zip(paths, np.array(expansion.scores).tolist(), strict=True))


def _tree(drafter: Drafter, plan: DraftPlan, seed: int) -> TokenTree:
    embedding, hidden = _context(seed, drafter.config.vocab_size)
    root = mx.array([ROOT])
    expansion = expand(drafter, lambda ids: embedding[ids], hidden, root, plan.shape)
    return build_tree(expansion, root, plan)


@pytest.mark.parametrize(("width", "length"), WIDTHS_AND_LENGTHS)
@pytest.mark.parametrize("rnn", [True, False])
def test_expansion_scores_the_nodes_of_a_literal_search(width: int, length: int, rnn: bool) -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, rnn=rnn, num_draft_layers=2)
    expansion, literal = _expand(drafter, DraftShape(width, length), seed=width)
    found = _scored_paths(expansion)
    assert found.keys() == literal.scores.keys()
    per_level = 1 if width == 1 else min(4 * width, VOCAB_SIZE)
    assert len(found) == per_level * (length - 1)
    for path, score in found.items():
        assert score == pytest.approx(literal.scores[path], abs=1e-4)


@pytest.mark.parametrize(("width", "length"), WIDTHS_AND_LENGTHS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_beam_selection_is_the_dedup_of_the_beams(width: int, length: int, seed: int) -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, seed=seed, num_draft_layers=2)
    shape = DraftShape(width, length, "beam")
    expansion, literal = _expand(drafter, shape, seed)
    tokens, parents = dedup_and_pack(np.array(literal.beams))
    tree = merge_beams(expansion, mx.array([ROOT]), shape)
    assert set(tree_paths(tree)) == set(paths_of(tokens, parents))
    assert tree.num_nodes == len(tokens)
    assert tree.num_unmerged == 1 + width * (length - 1)
    assert tree.num_nodes <= tree.tokens.shape[0] <= shape.max_nodes


@pytest.mark.parametrize(("width", "length"), WIDTHS_AND_LENGTHS)
@pytest.mark.parametrize("nodes", [2, 9, 30, None])
def test_top_n_selection_is_the_n_best_nodes(width: int, length: int, nodes: int | None) -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, seed=width + length)
    largest = 1 + (length - 1) * min(DraftShape(width, length).level_nodes, VOCAB_SIZE)
    plan = DraftPlan.of(width, length, largest if nodes is None else min(nodes, largest))
    expansion, literal = _expand(drafter, plan.shape, seed=4)
    best = sorted(literal.scores, key=lambda path: -literal.scores[path])
    assert plan.options["tree_nodes"] is not None
    tree = build_tree(expansion, mx.array([ROOT]), plan)
    assert set(tree_paths(tree)) == {(ROOT,), *best[: plan.num_nodes - 1]}
    assert tree.num_nodes == tree.tokens.shape[0] == plan.num_nodes
    assert tree.num_unmerged == 1 + width * (length - 1)


def test_merging_saves_nodes_where_beams_share_prefixes() -> None:
    # A drafter without a head that sees the state proposes the same continuations everywhere.
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, num_draft_layers=0)
    head: Any = drafter.lm_head[0]
    row = mx.zeros((VOCAB_SIZE,))
    row[3], row[5] = 8.0, 7.5
    hidden_only = mx.concatenate(
        [row[:, None], mx.zeros((VOCAB_SIZE, 2 * HIDDEN_SIZE - 1))], axis=1
    )
    head.weight = hidden_only
    hidden = mx.zeros((HIDDEN_SIZE,))
    hidden[0] = 1.0
    embedding, _ = _context(0)
    shape = DraftShape(4, 4, "beam")
    root = mx.array([ROOT])
    expansion = expand(drafter, lambda ids: embedding[ids], hidden, root, shape)
    tree = merge_beams(expansion, root, shape)
    beams = [(3, 3, 3), (3, 3, 5), (3, 5, 3), (5, 3, 3)]
    prefixes = {(ROOT, *beam[:length]) for beam in beams for length in range(4)}
    assert set(tree_paths(tree)) == prefixes
    assert (tree.num_nodes, tree.num_unmerged) == (10, 13)


@pytest.mark.parametrize("select", ["top_n", "beam"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["everywhere", "half", "one"])
def test_drafts_that_are_no_numbers_still_make_a_tree(
    select: Any, value: float, where: str
) -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, num_draft_layers=0)
    head: Any = drafter.lm_head[0]
    rows = {"everywhere": VOCAB_SIZE, "half": VOCAB_SIZE // 2, "one": 1}[where]
    head.weight[:rows] = value
    plan = DraftPlan.of(4, 4, select=select)
    embedding, hidden = _context(0)
    expansion = expand(
        drafter,
        lambda ids: embedding[ids],
        hidden,
        mx.array([ROOT]),
        plan.shape,
    )
    scores = np.array(expansion.scores)
    assert np.isfinite(scores).all()
    parents = np.array(expansion.parents)
    assert (scores[parents >= 0] <= scores[parents[parents >= 0]]).all()
    paths = tree_paths(_tree(drafter, plan, seed=0))
    assert all(0 <= token < VOCAB_SIZE for path in paths for token in path)


def test_head_over_part_of_the_vocabulary_proposes_its_token_ids() -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, draft_vocab_size=6)
    allowed = [60, 2, 33, 41, 7, 19]
    drafter.token_ids = mx.array(allowed, dtype=mx.int32)
    tree = _tree(drafter, DraftPlan.of(3, 4, 12), seed=0)
    drafts = {token for path in tree_paths(tree) for token in path[1:]}
    assert drafts
    assert drafts <= set(allowed)


def test_head_of_a_large_vocabulary() -> None:
    drafter = random_drafter(50_257, HIDDEN_SIZE, num_draft_layers=0)
    plan = DraftPlan.of(8, 4, 24)
    expansion, literal = _expand(drafter, plan.shape, seed=1)
    found = _scored_paths(expansion)
    assert found.keys() == literal.scores.keys()
    best = sorted(literal.scores, key=lambda path: -literal.scores[path])
    tree = build_tree(expansion, mx.array([ROOT]), plan)
    assert set(tree_paths(tree)) == {(ROOT,), *best[:23]}
