"""Where decoding ends, and the law that every schedule of drafts obeys."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_redrafter.decoding.decode import decode
from mlx_redrafter.decoding.delivery import find_end
from mlx_redrafter.decoding.records import Request
from mlx_redrafter.decoding.sampling import KeyedSampler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.policy.plans import FixedPolicy
from mlx_redrafter.target.target import Target
from tests.helpers.drafts import Scripted
from tests.helpers.models import tiny_llama

VOCAB_SIZE = 8  # small, so that random drafts are often right


def test_ends() -> None:
    for tokens, max_tokens, expected in (
        ([4, 5, 6], -1, (None, 3)),
        ([4, 5, 6], 14, (None, 3)),
        ([4, 5, 6], 13, ("length", 3)),
        ([4, 5, 6], 11, ("length", 1)),
        ([4, 9, 6], -1, ("stop", 2)),
        ([9, 9, 9], -1, ("stop", 1)),
        ([4, 9, 6], 12, ("stop", 2)),  # a stop token at the limit is a stop
        ([4, 9, 6], 11, ("length", 1)),
    ):
        request = Request(prompt=[1], stop_tokens=frozenset({9}), max_tokens=max_tokens)
        assert find_end(request, tokens, 10) == expected


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
@settings(max_examples=25)
def test_any_drafts_leave_the_text_alone(
    target: Target, seed: int, temp: float, top_p: float, top_k: int, nodes: int
) -> None:
    options: dict[str, Any] = {"temp": temp, "top_p": top_p, "top_k": top_k, "nodes": nodes}
    drafted = _decode(target, True, seed, **options)
    assert drafted == _decode(target, False, seed, **options)
