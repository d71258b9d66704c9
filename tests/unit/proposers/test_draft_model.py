"""A draft model: what it proposes, its rows after accepted, rejected and skipped steps, its ids.

Axes: N nodes of a tree.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers import draft_model
from mlx_redrafter.proposers.draft_model import DraftModel
from mlx_redrafter.target.target import Target
from tests.helpers.flights import flight_of
from tests.helpers.models import tiny_llama, tiny_qwen3, wrapped_tokenizer

VOCAB_SIZE = 64
PROMPT = [5, 17, 3, 60, 9]
PLAN = DraftPlan.of(2, 5, 9)


def _open(model: nn.Module, prompt: Sequence[int] = PROMPT, cached: Sequence[Any] = ()) -> Any:
    proposer = DraftModel(model, None)
    return proposer.open(Target(model), prompt, True, cached)


def _assert_scores(model: nn.Module, text: Sequence[int], tree: Any) -> None:
    """Every node's score is the sum of log-probabilities that the model gives to its path."""
    tokens, parents = to_ints(tree.tokens), to_ints(tree.parents)
    scores = tree.read().scores
    assert tokens[0] == text[-1]
    for node in range(1, len(tokens)):
        path = [node]
        while parents[path[0]]:
            path.insert(0, parents[path[0]])
        drafts = [tokens[n] for n in path]
        logits = model(mx.array([[*text, *drafts]]))[0]
        log_probs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        expected = sum(log_probs[len(text) - 1 + i, draft] for i, draft in enumerate(drafts))
        assert scores[node - 1] == pytest.approx(expected, abs=2e-4)


@given(seed=st.integers(0, 10**6), steps=st.integers(1, 7))
@settings(max_examples=25)
def test_scores_are_those_of_the_whole_text_whatever_the_steps_before(
    seed: int, steps: int
) -> None:
    rng = random.Random(seed)
    model = MODELS["llama"]
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 9))]
    text, drafting, tree = list(prompt), _open(model, prompt), None
    for _ in range(steps):
        length = len(text) - 1  # committed before the root of the pass
        # What the pass verified: these drafts, or those of another proposer after a skip.
        drafts = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(5))]
        path = [text[-1], *(drafts if tree is None else _any_path(tree, rng))]
        num_accepted, bonus = rng.randrange(len(path)), rng.randrange(VOCAB_SIZE)
        flight = flight_of(path, num_accepted, bonus, length)
        text += flight.tokens
        if rng.random() < 0.4:
            drafting.skip(flight)
            tree = None
        else:
            shape = DraftShape(rng.choice((1, 3)), rng.choice((2, 4)))
            plan = DraftPlan(shape, min(rng.choice((2, 4, 12)), shape.max_nodes))
            with patch.object(draft_model, "READ_STEP_SIZE", 3):  # texts are read in chunks
                tree = drafting.propose(flight, plan, None)
            _assert_scores(model, text, tree)


def _any_path(tree: Any, rng: random.Random) -> list[int]:
    """Drafts of a tree from a child of the root on."""
    tokens, parents = to_ints(tree.tokens), to_ints(tree.parents)
    path, node = [], rng.randrange(len(tokens))
    while node:
        path.insert(0, tokens[node])
        node = parents[node]
    return path


MODELS: dict[str, nn.Module] = {"llama": tiny_llama(seed=3), "qwen3": tiny_qwen3(seed=3)}


def test_attention_of_common_models_has_two_parts() -> None:
    drafting = _open(MODELS["llama"])
    drafting.propose(flight_of([PROMPT[-1]], 0, 30, len(PROMPT) - 1), PLAN, None)
    assert all(layer.is_plain for layer in drafting.cache.layers)


def test_a_shared_cache_holds_the_text_in_the_end() -> None:
    model = MODELS["llama"]
    cached = make_prompt_cache(model)
    drafting = _open(model, PROMPT, cached)
    drafting.propose(flight_of([PROMPT[-1]], 0, 30, len(PROMPT) - 1), PLAN, None)
    flight = flight_of([30, 31, 32], 2, 33, len(PROMPT))
    drafting.propose(flight, PLAN, None)
    drafting.skip(flight_of([33], 0, 34, len(PROMPT) + 3))
    for length in (len(PROMPT) + 5, len(PROMPT) + 4, len(PROMPT) + 2):
        drafting.trim_to(length)
        text = [*PROMPT, 30, 31, 32, 33, 34][:length]
        expected = make_prompt_cache(model)
        model(mx.array([text]), cache=expected)
        for layer, reference in zip(cached, expected, strict=True):
            assert layer.offset == length
            for rows, truth in zip(layer.state[:2], reference.state[:2], strict=True):
                found, wanted = np.array(rows)[..., :length, :], np.array(truth)[..., :length, :]
                np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)


def test_equal_ids_fit_whatever_the_size_of_the_head() -> None:
    small, large = tiny_llama(vocab_size=64), tiny_llama(vocab_size=80)
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    for model, target in ((small, large), (large, small)):
        proposer = DraftModel(model, wrapped_tokenizer(VOCAB_SIZE))
        proposer.check_fit(Target(target), tokenizer)
        drafting: Any = proposer.open(Target(target), PROMPT, True, [])
        tree = drafting.propose(flight_of([PROMPT[-1]], 0, 3, len(PROMPT) - 1), PLAN, None)
        assert max(to_ints(tree.tokens)) < 64


def test_other_ids_are_refused_with_the_first_difference() -> None:
    vocab: dict[str, int] = wrapped_tokenizer(VOCAB_SIZE).get_vocab()
    exchanged = {**vocab, "A": vocab["B"], "B": vocab["A"]}
    shifted: Any = SimpleNamespace(get_vocab=lambda: exchanged)
    proposer = DraftModel(MODELS["llama"], shifted)
    first = ord("A") - 31
    with pytest.raises(CheckpointError, match=f"id {first} is 'B' for the draft model and 'A' for"):
        proposer.check_fit(Target(MODELS["llama"]), wrapped_tokenizer(VOCAB_SIZE))
