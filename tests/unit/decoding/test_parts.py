"""Small parts of decoding: processors on trees, counts, and the clock of steps."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.decoding import delivery
from mlx_redrafter.decoding.delivery import StepClock
from mlx_redrafter.decoding.processors import ProcessorChain
from mlx_redrafter.decoding.stats import DecodingStats, ShapeStats
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.trees.tree import NO_TOKEN
from tests.helpers.drafts import make_tree


def test_each_node_sees_the_text_and_its_ancestors() -> None:
    seen: list[list[int]] = []

    def record(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(np.array(tokens).tolist())
        return logits + 1

    chain = ProcessorChain([record], [1, 2])
    chain.extend(mx.array([7], dtype=mx.int32))  # the root
    tree = make_tree([7, 8, 9, 8, NO_TOKEN], [0, 0, 1, 1, 0], 2)
    found = np.array(chain.process_tree(mx.zeros((5, 4)), tree))
    assert seen == [[1, 2, 7], [1, 2, 7, 8], [1, 2, 7, 8, 9], [1, 2, 7, 8, 8]]
    assert found[:4].min() == found[:4].max() == 1
    assert found[4].max() == 0  # padding keeps its own


def test_processors_run_in_order_and_may_write_in_place() -> None:
    def write(tokens: mx.array, logits: mx.array) -> mx.array:
        logits[:, tokens] = 5.0
        return logits

    chain = ProcessorChain([write, lambda tokens, logits: logits * 2], [0])
    assert np.array(chain.process(mx.ones((1, 3)))).tolist() == [[10, 2, 2]]
    both = mx.ones((2, 3))
    tree = make_tree([0, 1], [0, 0], 1)
    assert np.array(chain.process_tree(both, tree)).tolist() == [[10, 2, 2], [10, 10, 2]]
    assert np.array(both).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_four_steps_that_accept_drafts() -> None:
    """They yield 3 + 1 + 3 + 2 tokens after the first."""
    stats = DecodingStats(num_tokens=10)
    for num_accepted in (2, 0, 2, 1):
        stats.count_step(num_accepted, num_verified=9, num_unmerged=17)
    assert stats.accepted_counts == [1, 1, 2]
    assert stats.steps == 4
    assert stats.tokens_per_step == pytest.approx(9 / 4)
    assert stats.acceptance_rate_by_depth == [0.75, 0.5]
    assert (stats.num_verified, stats.num_unmerged) == (36, 68)
    assert DecodingStats().accepted_counts == [], "requests do not share counts"


def test_a_kind_of_step_shows_what_was_found_and_expected() -> None:
    plan = DraftPlan(DraftShape(2, 6), 8)
    shown = str(ShapeStats(plan, 0.0061, 4, 10, 0.0052, 12.0))
    assert shown == "2x6:8, 4 steps: 2.50 (3.00) tokens, 6.1 (5.2) ms"
    assert str(ShapeStats(None, 0.004, 0, 0, 0.004, 0.0)).startswith("plain, 0 steps: 0.00 (0.00)")


def test_steps_last_from_outcome_to_outcome_unless_the_caller_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, clock = [0.0], StepClock()
    monkeypatch.setattr(delivery, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def step(seconds: float, away: float = 0.0) -> float | None:
        clock.leave_out(away)
        now[0] += seconds
        return clock.lap()

    assert [step(seconds) for seconds in (1.0, 0.5, 2.0)] == [None, 0.5, 2.0]
    assert step(1.0, away=0.05) == 1.0
    assert step(1.0, away=0.5) is None
    assert step(1.0) == 1.0, "forgiven with the next step"
