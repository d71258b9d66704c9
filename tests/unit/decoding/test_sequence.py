"""Where decoding ends, and the law that every schedule of drafts obeys."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_redrafter.decoding.delivery import find_end
from mlx_redrafter.decoding.records import Request
from mlx_redrafter.decoding.sampling import KeyedSampler, normalise
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.decoding.step import decode
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.policy.plans import FixedPolicy
from mlx_redrafter.target.target import Target
from tests.helpers.drafts import Scripted
from tests.helpers.models import tiny_llama

VOCAB_SIZE = 8  # small, so that random drafts are often right


@pytest.mark.parametrize(
    ("tokens", "num_before", "max_tokens", "expected"),
    [
        ([4, 5, 6], 0, -1, (None, 3)),
        ([4, 5, 6], 10, 14, (None, 3)),
        ([4, 5, 6], 10, 13, ("length", 3)),
        ([4, 5, 6], 10, 12, ("length", 2)),
        ([4, 5, 6], 10, 11, ("length", 1)),
        ([4, 9, 6], 10, -1, ("stop", 2)),
        ([9, 9, 9], 10, -1, ("stop", 1)),
        ([4, 9, 6], 10, 12, ("stop", 2)),  # a stop token at the limit is a stop
        ([4, 9, 6], 10, 11, ("length", 1)),
        ([4, 5, 9], 10, 12, ("length", 2)),
    ],
)
def test_ends(
    tokens: list[int], num_before: int, max_tokens: int, expected: tuple[str | None, int]
) -> None:
    request = Request(prompt=[1], stop_tokens=frozenset({9}), max_tokens=max_tokens)
    assert find_end(request, tokens, num_before) == expected


def test_normalise_is_a_log_softmax() -> None:
    logits = np.array([[1.0, 2.0, -3.0], [0.0, 0.0, 100.0]], dtype=np.float32)
    found = np.array(normalise(mx.array(logits))[0])
    np.testing.assert_allclose(np.exp(found.astype(np.float64)).sum(axis=1), 1, rtol=1e-6)
    for row, scores in zip(found, logits, strict=True):
        np.testing.assert_allclose(row - row[0], scores - scores[0], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_llama(seed=8, vocab_size=VOCAB_SIZE, layers=2, spread=2.0))


def _decode(target: Target, drafts: bool, seed: int, **options: Any) -> list[int]:
    plan = DraftPlan.of(4, 5, options.pop("nodes"))
    chooser = KeyedSampler(SamplingParams(seed=seed, **options), VOCAB_SIZE)
    request = Request(prompt=[1, 2, 3], stop_tokens=frozenset({0}), max_tokens=16)
    # Without a script the drafts are any at all.
    anything = Scripted([], VOCAB_SIZE, accuracy=0, seed=seed)
    drafting = anything.open(target, request.prompt, True, []) if drafts else None
    policy = FixedPolicy(plan) if drafts else None
    text = SequenceDecoder(target, target.caches.new(), chooser, request, drafting, policy)
    tokens = [token.id for token in decode(text)]
    stats = text.delivery.stats
    assert stats.num_tokens == len(tokens)
    accepted = sum(count * n for n, count in enumerate(stats.accepted_counts))
    # The first token, and for every step its accepted drafts and one more, before the cut.
    assert len(tokens) <= 1 + accepted + stats.steps < len(tokens) + plan.shape.length
    return tokens


@given(
    seed=st.integers(0, 2**32 - 1),
    temp=st.sampled_from([0.0, 0.3, 0.8, 1.5]),
    top_p=st.sampled_from([0.0, 0.7]),
    top_k=st.sampled_from([0, 3]),
    nodes=st.integers(2, 30),
)
@settings(max_examples=40)
def test_any_drafts_leave_the_text_alone(
    target: Target, seed: int, temp: float, top_p: float, top_k: int, nodes: int
) -> None:
    options: dict[str, Any] = {"temp": temp, "top_p": top_p, "top_k": top_k, "nodes": nodes}
    drafted = _decode(target, True, seed, **options)
    assert drafted == _decode(target, False, seed, **options)
