"""Medusa heads leave every text as plain decoding has it, with trees of either kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.sample_utils import make_sampler

from mlx_redrafter.engine import engine
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.engine.stored_costs import step_costs
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.proposers.medusa.network import Medusa
from tests.helpers.equality import (
    assert_same_tokens,
    assert_turns,
    ids,
    stock_tokens,
    stream,
    tokens,
)
from tests.helpers.medusa import fitted_medusa, random_medusa, with_static_tree
from tests.helpers.models import tiny_llama, tiny_qwen3, wrapped_tokenizer
from tests.models.tiny_models import build, tiny_config

VOCAB_SIZE = 64
PROMPT = [5, 17, 3, 60, 9]
NUM_TOKENS = 30
SHAPES: list[dict[str, Any]] = [
    {},
    {"beam_width": 1, "beam_length": 5},
    {"beam_width": 3, "beam_length": 4, "tree_nodes": 12},
    {"beam_width": 2, "beam_length": 4, "select": "beam"},
]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: tiny_llama(seed=4),
    "qwen3": lambda: tiny_qwen3(seed=4),
    "gemma2": lambda: build(tiny_config("gemma2", "default")),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return MODELS[request.param]()


@pytest.fixture(scope="module", params=["dynamic", "static"])
def heads(request: pytest.FixtureRequest, model: nn.Module) -> Medusa:
    """Heads that are right in a good part of the greedy text."""
    text = ids(stock_tokens(model, PROMPT, NUM_TOKENS))
    network = fitted_medusa(model, [*PROMPT, *text[: NUM_TOKENS // 2]])
    return with_static_tree(network) if request.param == "static" else network


def test_texts_are_those_of_plain_decoding(model: nn.Module, heads: Medusa) -> None:
    expected = stock_tokens(model, PROMPT, NUM_TOKENS)
    for shape in SHAPES:
        responses = list(stream(model, PROMPT, heads, max_tokens=NUM_TOKENS, **shape))
        assert_same_tokens(expected, [response.token for response in responses], shape)
        if shape:
            counts = responses[-1].stats.accepted_counts
            assert sum(counts[2:]) > 0, "nothing was accepted"
    options = {"temp": 0.8, "top_p": 0.95, "seed": 11, "max_tokens": NUM_TOKENS}
    sampled = tokens(model, PROMPT, **options)
    for shape in (*SHAPES[:3], {**SHAPES[2], "couple": False}):
        assert tokens(model, PROMPT, heads, **options, **shape) == sampled, shape


def test_a_stock_sampler() -> None:
    model, heads = tiny_llama(seed=4), random_medusa(num_heads=4)
    options: dict[str, Any] = {"max_tokens": 16, "sampler": make_sampler(temp=0.8)}
    mx.random.seed(3)
    expected = stock_tokens(model, PROMPT, **options)
    mx.random.seed(3)
    assert_same_tokens(expected, tokens(model, PROMPT, heads, **options, **SHAPES[2]))


def test_turns_on_one_prompt_cache(model: nn.Module, heads: Medusa) -> None:
    for shape in SHAPES[:3]:
        assert_turns(model, heads, (PROMPT, [60], [7, 8, 9]), **shape)


def test_the_policy_never_asks_for_more_than_the_heads_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_llama(seed=4)
    heads = random_medusa(num_heads=2)
    asked: list[int] = []
    original = heads.open

    def spy(*args: Any) -> Any:
        drafting = original(*args)
        propose = drafting.propose

        def note(flight: Any, plan: Any, noise: Any) -> Any:
            asked.append(plan.shape.length)
            return propose(flight, plan, noise)

        drafting.propose = note  # type: ignore[method-assign]
        return drafting

    monkeypatch.setattr(heads, "open", spy)
    monkeypatch.setattr(engine, "step_costs", step_costs)  # the real ones, whose plans are longer
    tokens(model, PROMPT, heads, max_tokens=60)
    assert len(asked) > 20
    assert max(asked) == 3
    with pytest.raises(ConfigError, match=r"beam_length must be at most 3 \(the root counts"):
        tokens(model, PROMPT, heads, beam_length=4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((64, 16), "hidden_size 16 does not match"), ((65, 32), "vocab_size 65 does not match")],
)
def test_heads_for_another_model_are_refused(sizes: tuple[int, int], message: str) -> None:
    heads = random_medusa(*sizes)
    with pytest.raises(CheckpointError, match=message):
        Engine(tiny_llama(), wrapped_tokenizer(VOCAB_SIZE), heads)
