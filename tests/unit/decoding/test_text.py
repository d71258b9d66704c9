"""Where decoding ends, and the law that every schedule of drafts obeys."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_redrafter.config import SamplingParams, TreeShape
from mlx_redrafter.decoding.sampling import KeyedChooser
from mlx_redrafter.decoding.text import (
    Decoder,
    InFlight,
    Proposal,
    Request,
    find_end,
    normalise,
)
from mlx_redrafter.host import to_ints
from mlx_redrafter.policy.adaptive import FixedPolicy
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.target import Target
from tests.helpers.drafts import grow, make_tree
from tests.helpers.models import random_drafter, tiny_llama

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
    assert find_end(tokens, num_before, request) == expected


def test_normalise_is_a_log_softmax() -> None:
    logits = np.array([[1.0, 2.0, -3.0], [0.0, 0.0, 100.0]], dtype=np.float32)
    found = np.array(normalise(mx.array(logits)))
    np.testing.assert_allclose(np.exp(found.astype(np.float64)).sum(axis=1), 1, rtol=1e-6)
    for row, scores in zip(found, logits, strict=True):
        np.testing.assert_allclose(row - row[0], scores - scores[0], rtol=1e-5, atol=1e-5)


class AdversarialDecoder(Decoder):
    """Drafts any tree at all."""

    rng: random.Random

    def _draft(self, shape: TreeShape, flight: InFlight) -> Proposal:
        (root,) = to_ints(flight.root)
        tokens, parents = grow(self.rng, root, [], shape, VOCAB_SIZE, accuracy=0)
        noise = self.chooser.noise(flight.position, shape.beam_length)
        return Proposal(shape, make_tree(tokens, parents, shape.draft_length), noise)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_llama(seed=8, vocab_size=VOCAB_SIZE, layers=2, spread=2.0))


def _decode(target: Target, drafter: Drafter | None, seed: int, **options: Any) -> list[int]:
    shape = TreeShape(4, 5, options.pop("nodes"))
    chooser = KeyedChooser(SamplingParams(seed=seed, **options), VOCAB_SIZE)
    kind = Decoder if drafter is None else AdversarialDecoder
    controller = FixedPolicy(shape if drafter is not None else None)
    decoder = kind(target, target.new_cache(), chooser, drafter, controller)
    if isinstance(decoder, AdversarialDecoder):
        decoder.rng = random.Random(seed)
    request = Request(prompt=[1, 2, 3], stop_tokens=frozenset({0}), max_tokens=16)
    tokens = [token.id for token in decoder.decode(request)]
    stats = decoder.stats
    assert stats.num_tokens == len(tokens)
    accepted = sum(count * n for n, count in enumerate(stats.accepted_counts))
    # The first token, and for every step its accepted drafts and one more, before the cut.
    assert len(tokens) <= 1 + accepted + stats.steps < len(tokens) + shape.beam_length
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
    drafter = random_drafter(VOCAB_SIZE, 32)
    options: dict[str, Any] = {"temp": temp, "top_p": top_p, "top_k": top_k, "nodes": nodes}
    drafted = _decode(target, drafter, seed, **options)
    assert drafted == _decode(target, None, seed, **options)
