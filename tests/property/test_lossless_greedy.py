"""At temperature 0 the text is the target's own, whatever is drafted."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_redrafter.generation_options import GenerationOptions
from tests.conftest import Trained
from tests.helpers.drafts import Scripted
from tests.helpers.equality import Scored, assert_same_tokens, ids, stock_tokens, stream, tokens
from tests.helpers.models import shared_model

GOLDEN_TOKENS = 200
# Random drafts are wrong nearly always, so that every token is a step.
RANDOM_TOKENS = 32
BOS = 1

SHAPES: list[dict[str, Any]] = [
    {"beam_width": 1, "beam_length": 2},
    {"beam_width": 1, "beam_length": 16},
    {"beam_width": 2, "beam_length": 2, "tree_nodes": 2},
    {"beam_width": 2, "beam_length": 3, "tree_nodes": 7},
    {"beam_width": 4, "beam_length": 5},
    {"beam_width": 4, "beam_length": 5, "tree_nodes": 53},
    {"beam_width": 8, "beam_length": 7, "tree_nodes": 17},
    {"beam_width": 64, "beam_length": 2, "tree_nodes": 65},
    {"beam_width": 64, "beam_length": 3, "tree_nodes": 32},
    {"beam_width": 1, "beam_length": 4, "select": "beam"},
    {"beam_width": 3, "beam_length": 6, "select": "beam"},
    {"beam_width": 16, "beam_length": 3, "select": "beam"},
    {"beam_width": 64, "beam_length": 2, "select": "beam"},
]
LARGEST: dict[str, Any] = {"beam_width": 64, "beam_length": 16, "tree_nodes": 64}


@pytest.fixture(scope="module")
def golden_tokens(stories: Trained) -> list[Scored]:
    return stock_tokens(stories.model, [BOS], GOLDEN_TOKENS)


@pytest.fixture(scope="module")
def babyllama_tokens(babyllama: Trained) -> list[Scored]:
    return stock_tokens(babyllama.model, [BOS], 48)


def test_stock_mlx_lm_and_plain_decoding_write_the_published_text(
    stories: Trained, golden_tokens: list[Scored]
) -> None:
    published = (shared_model("stories260k") / "golden.txt").read_text(encoding="utf-8")
    assert stories.tokenizer.decode(ids(golden_tokens)) == published
    options = {"tokenizer": stories.tokenizer, "max_tokens": GOLDEN_TOKENS}
    responses = list(stream(stories.model, [BOS], **options))
    assert_same_tokens(golden_tokens, [response.token for response in responses])
    assert "".join(response.text for response in responses) == published


@pytest.mark.parametrize("shape", [*SHAPES, LARGEST], ids=str)
def test_random_drafts_leave_the_published_text(
    stories: Trained, golden_tokens: list[Scored], shape: dict[str, Any]
) -> None:
    found = tokens(stories.model, [BOS], stories.drafter, max_tokens=RANDOM_TOKENS, **shape)
    assert_same_tokens(golden_tokens[:RANDOM_TOKENS], found, shape)


@pytest.mark.parametrize("shape", [*SHAPES, LARGEST], ids=str)
def test_mostly_right_drafts_leave_the_published_text(
    stories: Trained, golden_tokens: list[Scored], shape: dict[str, Any]
) -> None:
    length = GOLDEN_TOKENS if shape is SHAPES[4] else GOLDEN_TOKENS // 2
    script = Scripted(ids(golden_tokens), vocab_size=512)
    responses = list(stream(stories.model, [BOS], script, max_tokens=length, **shape))
    assert_same_tokens(golden_tokens[:length], [response.token for response in responses], shape)
    last = responses[-1]
    assert last.stats.num_tokens == length
    # The drafts are in the text: with one that is right 7 times in 10, or more of them.
    assert last.tokens_per_step is not None
    assert last.tokens_per_step > 1.5


@pytest.mark.parametrize(("number", "shape"), list(enumerate(SHAPES)))
def test_babyllama_text_is_that_of_stock_mlx_lm(
    babyllama: Trained, babyllama_tokens: list[Scored], number: int, shape: dict[str, Any]
) -> None:
    script = Scripted(ids(babyllama_tokens), vocab_size=105)
    drafter = script if number % 2 else babyllama.drafter
    found = tokens(babyllama.model, [BOS], drafter, max_tokens=len(babyllama_tokens), **shape)
    assert_same_tokens(babyllama_tokens, found, shape)


def test_shapes_cover_both_selections_and_the_limits() -> None:
    plans = [GenerationOptions(**shape).plan for shape in [*SHAPES, LARGEST]]
    shapes = [plan.shape for plan in plans if plan is not None]
    assert len(shapes) >= 12
    assert {shape.select for shape in shapes} == {"top_n", "beam"}
    assert {1, 64} <= {shape.width for shape in shapes}
    assert {2, 16} <= {shape.length for shape in shapes}
