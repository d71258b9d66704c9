"""With a temperature, drafted text equals plain text for the same seed, token for token."""

from __future__ import annotations

import itertools
import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_redrafter import stream_generate
from tests.conftest import Trained
from tests.helpers.drafts import Scripted
from tests.helpers.equality import Scored, assert_same_tokens, ids, stock_tokens
from tests.helpers.models import random_drafter, tiny_llama, tiny_qwen3, wrapped_tokenizer

VOCAB_SIZE = 100  # no multiple of a vector's length
PROMPT = [5, 17, 3, 60]
NUM_TOKENS = 16

TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 7},
    {"min_p": 0.05},
    {"top_p": 0.95, "top_k": 20},
    {"top_p": 0.8, "min_p": 0.02, "top_k": 12},
]
SHAPES: list[dict[str, Any]] = [
    {"beam_width": 1, "beam_length": 4},
    {"beam_width": 4, "beam_length": 5},
    {"beam_width": 3, "beam_length": 3, "tree_nodes": 13},
    {"beam_width": 5, "beam_length": 4, "select": "beam"},
    {"beam_width": 8, "beam_length": 2, "tree_nodes": 6},
]
EXTREME_SEEDS = (0, 1, 2**31, 2**32 - 1)


def _combinations() -> list[tuple[int, float, dict[str, Any], dict[str, Any]]]:
    """Every temperature with every filter and every shape, each with a seed of its own."""
    rng = random.Random(1)
    cases = itertools.product(TEMPERATURES, FILTERS, SHAPES)
    seeds = itertools.chain(EXTREME_SEEDS, iter(lambda: rng.randrange(2**32), None))
    return [
        (seed, temp, filters, shape)
        for seed, (temp, filters, shape) in zip(seeds, cases, strict=False)
    ]


COMBINATIONS = _combinations()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_llama(seed=3, vocab_size=VOCAB_SIZE, layers=2, spread=3.0)


@pytest.fixture(scope="module")
def greedy(model: nn.Module) -> list[Scored]:
    """What stock mlx-lm writes at temperature 0."""
    return stock_tokens(model, PROMPT, NUM_TOKENS)


@pytest.fixture(scope="module", params=FILTERS, ids=str)
def filters(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A filter of the tokens that are sampled."""
    return dict(request.param)


@pytest.fixture(scope="module")
def plain_of_filter(model: nn.Module, filters: dict[str, Any]) -> list[Scored]:
    """What is sampled without drafts, with one seed."""
    sampling: dict[str, Any] = {"temp": 1.0, "seed": 5, "max_tokens": 40, **filters}
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    responses = stream_generate(model, tokenizer, PROMPT, drafter=None, **sampling)
    return [(response.token, response.logprobs) for response in responses]


def test_there_are_enough_combinations() -> None:
    assert len({str(case) for case in COMBINATIONS}) == 120


@pytest.mark.parametrize("group", range(6))
def test_drafted_sample_equals_plain_sample(model: nn.Module, group: int) -> None:
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    drafter = random_drafter(VOCAB_SIZE, 32, seed=group)
    texts = set()
    for case, (seed, temp, filters, shape) in enumerate(COMBINATIONS[group::6]):
        sampling = {"seed": seed, "temp": temp, "max_tokens": NUM_TOKENS, **filters}
        plain: list[Scored] = [
            (response.token, response.logprobs)
            for response in stream_generate(model, tokenizer, PROMPT, drafter=None, **sampling)
        ]
        # A quarter with the random drafter's drafts.
        proposer = Scripted(ids(plain), VOCAB_SIZE) if case % 4 else drafter
        drafted = [
            response.token
            for response in stream_generate(
                model, tokenizer, PROMPT, drafter=proposer, **sampling, **shape
            )
        ]
        assert_same_tokens(plain, drafted, (sampling, shape))
        texts.add(tuple(drafted))
    assert len(texts) > 10  # the options matter


@pytest.mark.parametrize(
    "sampling",
    [
        {"temp": 1.0, "top_p": 1e-46},
        {"temp": 1.5, "top_p": 5e-324, "top_k": 3},
        {"temp": 5e-324},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_0_in_float32_writes_the_greedy_text(
    model: nn.Module, greedy: list[Scored], sampling: dict[str, Any], shape: dict[str, Any]
) -> None:
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    for drafter in (None, Scripted(ids(greedy), VOCAB_SIZE), random_drafter(VOCAB_SIZE, 32)):
        found = stream_generate(
            model, tokenizer, PROMPT, drafter=drafter, max_tokens=NUM_TOKENS, **sampling, **shape
        )
        assert_same_tokens(greedy, [response.token for response in found], drafter)


def test_qwen3_samples_the_same_with_drafts() -> None:
    model, tokenizer = tiny_qwen3(vocab_size=VOCAB_SIZE), wrapped_tokenizer(VOCAB_SIZE)
    sampling: dict[str, Any] = {"temp": 1.0, "seed": 11, "max_tokens": 60}
    plain = [
        (response.token, response.logprobs)
        for response in stream_generate(model, tokenizer, PROMPT, drafter=None, **sampling)
    ]
    drafter = Scripted(ids(plain), VOCAB_SIZE)
    drafted = list(
        stream_generate(model, tokenizer, PROMPT, drafter=drafter, tree_nodes=12, **sampling)
    )
    assert_same_tokens(plain, [response.token for response in drafted])
    assert any(response.from_draft for response in drafted)


def test_trained_model_samples_the_same_with_drafts(stories: Trained) -> None:
    rng = random.Random(0)
    for seed in rng.sample(range(2**32), 3):
        sampling: dict[str, Any] = {"temp": 0.8, "top_p": 0.95, "seed": seed, "max_tokens": 60}
        plain = [
            (response.token, response.logprobs)
            for response in stream_generate(
                stories.model, stories.tokenizer, "Lily", drafter=None, **sampling
            )
        ]
        drafted = [
            response.token
            for response in stream_generate(
                stories.model,
                stories.tokenizer,
                "Lily",
                drafter=Scripted(ids(plain), 512),
                tree_nodes=9,
                **sampling,
            )
        ]
        assert_same_tokens(plain, drafted, seed)


def test_text_depends_on_the_seed_alone(model: nn.Module) -> None:
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)

    def sample(seed: int) -> list[int]:
        return [
            response.token
            for response in stream_generate(
                model, tokenizer, PROMPT, drafter=None, temp=1.0, seed=seed, max_tokens=20
            )
        ]

    assert sample(5) == sample(5)
    assert sample(5) != sample(6)


@pytest.mark.parametrize(
    "head",
    [
        {"draft_vocab_size": 12},  # token ids of its own
        {"vocab_size": 90},  # leaves out the padding of the target's embedding
        {"draft_top_k": 5},
    ],
    ids=str,
)
def test_drafters_that_know_part_of_the_vocabulary(
    model: nn.Module,
    filters: dict[str, Any],
    plain_of_filter: list[Scored],
    head: dict[str, int],
) -> None:
    """They rank with the noise of the tokens that their rows stand for."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, **head}
    vocab_size, hidden_size = sizes.pop("vocab_size"), sizes.pop("hidden_size")
    drafter = random_drafter(vocab_size, hidden_size, **sizes)  # type: ignore[arg-type]
    if drafter.config.draft_vocab_size is not None:
        drafter.token_ids = mx.array([95, 3, 17, 60, 61, 62, 5, 8, 9, 44, 99, 0], dtype=mx.int32)
    tokenizer = wrapped_tokenizer(vocab_size)
    sampling: dict[str, Any] = {"temp": 1.0, "seed": 5, "max_tokens": 40, **filters}
    drafted = list(
        stream_generate(model, tokenizer, PROMPT, drafter=drafter, tree_nodes=12, **sampling)
    )
    assert_same_tokens(plain_of_filter, [response.token for response in drafted])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_drafts_that_are_no_numbers_change_no_sample(
    model: nn.Module, filters: dict[str, Any], plain_of_filter: list[Scored], value: float
) -> None:
    drafter = random_drafter(VOCAB_SIZE, 32)
    head: Any = drafter.lm_head[-1]
    head.weight[::2] = value
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    sampling: dict[str, Any] = {"temp": 1.0, "seed": 5, "max_tokens": 20, **filters}
    drafted = stream_generate(model, tokenizer, PROMPT, drafter=drafter, beam_width=4, **sampling)
    assert_same_tokens(plain_of_filter[:20], [response.token for response in drafted])
