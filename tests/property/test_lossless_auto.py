"""Whatever shapes are chosen, step by step, the text is the target's."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from typing import Any

import mlx.nn as nn
import pytest

from mlx_redrafter.engine import engine, generation
from mlx_redrafter.engine.stored_costs import step_costs
from mlx_redrafter.policy.plans import SIZES, WIDTHS, StepCosts
from tests.helpers.drafts import RandomShapes, Scripted, use_policy
from tests.helpers.equality import assert_same_tokens, ids, plain_tokens, stream, tokens
from tests.helpers.models import random_drafter, tiny_llama

VOCAB_SIZE = 64
PROMPT = [5, 17, 3, 60]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_llama(seed=5, vocab_size=VOCAB_SIZE, spread=3.0)


@pytest.mark.parametrize(
    "sampling", [{}, {"temp": 1.0, "seed": 7}, {"temp": 0.6, "top_p": 0.9, "seed": 1}]
)
def test_text_does_not_depend_on_the_shapes(
    model: nn.Module, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plain_tokens(model, PROMPT, max_tokens=60, **sampling)
    for drafter in (random_drafter(VOCAB_SIZE, 32), Scripted(ids(plain), VOCAB_SIZE)):
        policy = RandomShapes(3)
        use_policy(monkeypatch, policy)
        found = tokens(model, PROMPT, drafter, max_tokens=60, **sampling)
        assert_same_tokens(plain, found, sampling)
        assert len(policy.seen) > 8


@pytest.mark.parametrize("sampling", [{}, {"temp": 1.0, "seed": 7}])
def test_auto_is_the_default_and_leaves_the_text_alone(
    model: nn.Module, sampling: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(engine, "step_costs", step_costs)  # the real ones
    plain = plain_tokens(model, PROMPT, max_tokens=80, **sampling)
    drafter = random_drafter(VOCAB_SIZE, 32)
    found = tokens(model, PROMPT, drafter, max_tokens=80, **sampling)
    assert_same_tokens(plain, found, sampling)
    assert (tmp_path / "mlx-redrafter").is_dir(), "step times were measured"


def test_texts_stay_the_same_where_drafts_are_dear_and_teach_the_next_text(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = dict.fromkeys(WIDTHS, 0.0)
    dear = StepCosts(1.0, dict.fromkeys(SIZES, 2.2), none, dict.fromkeys(WIDTHS, 0.05), 0.1)
    monkeypatch.setattr(engine, "step_costs", lambda *_: dear)
    drafter = random_drafter(VOCAB_SIZE, 32)
    texts = [tokens(model, PROMPT, drafter, max_tokens=120) for _ in range(2)]
    memory = generation._memories.of(model, drafter)
    carried_over = memory.policy
    assert carried_over is not None
    tokens(model, PROMPT, drafter, max_tokens=120, couple=False)
    assert memory.policy is carried_over, "uncoupled drafts say nothing of coupled ones"
    assert texts == [tokens(model, PROMPT, max_tokens=120)] * 2


def test_a_text_that_is_broken_off_teaches_too(model: nn.Module) -> None:
    drafter = random_drafter(VOCAB_SIZE, 32)
    responses = stream(model, PROMPT, drafter, max_tokens=120)
    memory = generation._memories.of(model, drafter)
    with closing(responses):
        *_, last = islice(responses, 60)
        assert memory.policy is None
    assert memory.policy is not None
    assert last.stats.shapes
