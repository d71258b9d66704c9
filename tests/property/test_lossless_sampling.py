"""With a temperature, texts with drafts are those of plain decoding, and of stock samplers."""

import itertools
import random
from contextlib import closing
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_redrafter.engine import engine, generation
from mlx_redrafter.policy.plans import SIZES, WIDTHS, StepCosts
from tests.helpers.drafts import RandomShapes, Scripted, use_policy
from tests.helpers.equality import (
    assert_same_tokens,
    ids,
    plain_tokens,
    stock_tokens,
    stream,
    tokens,
)
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer
from tests.unit.decoding.test_parts import random_state

VOCAB_SIZE = 100  # no multiple of a vector's length
PROMPT = [5, 17, 3, 60]
NUM_TOKENS = 12

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


# Every temperature with every filter and every shape.
COMBINATIONS = list(itertools.product(TEMPERATURES, FILTERS, SHAPES))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_llama(seed=3, vocab_size=VOCAB_SIZE, layers=2, spread=3.0)


@pytest.mark.parametrize("group", range(6))
def test_drafted_sample_equals_plain_sample(model, group):
    drafter, texts = random_drafter(VOCAB_SIZE, 32, seed=group), set()
    rng = random.Random(group)
    for case, (temp, filters, shape) in enumerate(COMBINATIONS[group::6]):
        seed = EXTREME_SEEDS[case] if case < len(EXTREME_SEEDS) else rng.randrange(2**32)
        sampling = {"seed": seed, "temp": temp, "max_tokens": NUM_TOKENS, **filters}
        plain = plain_tokens(model, PROMPT, **sampling)
        # A quarter with the random drafter's drafts.
        proposer = Scripted(ids(plain), VOCAB_SIZE) if case % 4 else drafter
        drafted = tokens(model, PROMPT, proposer, **sampling, **shape)
        assert_same_tokens(plain, drafted, (sampling, shape))
        texts.add(tuple(drafted))
    assert len(texts) > 10  # the options matter


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_drafters_that_know_part_of_the_vocabulary(model, filters):
    """They rank with the noise of the tokens that their rows stand for."""
    sampling = {"temp": 1.0, "seed": 5, "max_tokens": 20, **filters}
    plain = plain_tokens(model, PROMPT, **sampling)
    own_ids = random_drafter(VOCAB_SIZE, 32, draft_vocab_size=12)
    own_ids.token_ids = mx.array([95, 3, 17, 60, 61, 62, 5, 8, 9, 44, 99, 0], dtype=mx.int32)
    # One leaves out the padding of the target's embedding.
    others = random_drafter(90, 32), random_drafter(VOCAB_SIZE, 32, draft_top_k=5)
    for drafter in (own_ids, *others):
        tokenizer = wrapped_tokenizer(drafter.config.vocab_size)
        found = tokens(model, PROMPT, drafter, tokenizer=tokenizer, tree_nodes=12, **sampling)
        assert_same_tokens(plain, found, drafter.config)


SAMPLERS: list[dict[str, Any]] = [
    {"temp": 0.7},
    {"temp": 1.0, "top_p": 0.9},
    {"temp": 1.2, "top_k": 9, "min_p": 0.02},
    {"temp": 0.9, "top_p": 0.95, "min_p": 0.05, "top_k": 30},
    {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1},
]
PROCESSORS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.8},
    {"frequency_penalty": 0.7},
    {"logit_bias": {7: 4.0, 9: -3.0}},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {3: 2.0}},
]
STOCK_SHAPES: list[dict[str, Any]] = [
    {"beam_width": 1, "beam_length": 5},
    {"beam_width": 4, "beam_length": 4, "tree_nodes": 12},
    {"beam_width": 3, "beam_length": 5, "select": "beam"},
]


CASES = [(seed, shape, one, {}) for one in SAMPLERS for seed, shape in enumerate(STOCK_SHAPES)]
CASES += [(1, shape, {}, one) for shape, one in zip(itertools.cycle(STOCK_SHAPES), PROCESSORS)]
CASES += [(3, STOCK_SHAPES[1], {"temp": 0.9, "top_p": 0.95}, one) for one in PROCESSORS]


@pytest.mark.parametrize(("seed", "shape", "sampling", "processing"), CASES, ids=str)
def test_stock_samplers_and_processors(model, monkeypatch, seed, shape, sampling, processing):
    """Plain and drafted decoding, with random and mostly right drafts, against stock mlx-lm."""
    options: dict[str, Any] = {"sampler": make_sampler(**sampling)} if sampling else {}
    if processing:
        options["logits_processors"] = make_logits_processors(**processing)
    drafter = random_drafter(VOCAB_SIZE, 32, seed=seed)
    mx.random.seed(seed)
    expected = stock_tokens(model, PROMPT, 18, **options)
    state = random_state()
    right: Any = Scripted(ids(expected), VOCAB_SIZE)
    cases = [(None, None), (drafter, None), (right, None), (right, RandomShapes(seed))]
    for proposer, policy in cases:
        with monkeypatch.context() as patch:
            if policy is not None:
                use_policy(patch, policy)
            mx.random.seed(seed)
            found = tokens(model, PROMPT, proposer, max_tokens=18, **options, **shape)
            assert_same_tokens(expected, found, proposer is None)
            if sampling:  # the next request starts from the same state, too
                assert random_state() == state
    if not sampling:
        assert ids(stock_tokens(model, PROMPT, 18)) != ids(expected), "the processors matter"


@pytest.mark.parametrize("shape", STOCK_SHAPES, ids=str)
def test_a_text_that_is_left_leaves_the_random_state_of_stock(model, shape):
    """The state after the choice behind the last token that was taken, amid a pass as well."""
    options: dict[str, Any] = {"sampler": make_sampler(temp=0.7), "max_tokens": 18}
    mx.random.seed(3)
    right: Any = Scripted(
        ids(stock_tokens(model, PROMPT, 18, sampler=options["sampler"])), VOCAB_SIZE
    )
    for count in range(1, 9):
        mx.random.seed(3)
        with closing(generate_step(mx.array(PROMPT), model, **options)) as stock:
            assert len(list(islice(stock, count))) == count
        state = random_state()
        for proposer in (None, right):
            mx.random.seed(3)
            with stream(model, PROMPT, proposer, **options, **(shape if proposer else {})) as found:
                assert len(list(islice(found, count))) == count
            assert random_state() == state
    with stream(model, PROMPT, right, **options, **shape) as found:
        assert len(list(islice(found, 3))) == 3
        mx.random.seed(8)
        state = random_state()
    assert random_state() == state, "another text has begun"


def test_processors_see_the_prompt_and_every_token_before(model):
    expected = ids(stock_tokens(model, PROMPT, 12))
    seen: list[list[int]] = []

    def record(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())  # type: ignore[arg-type]
        return logits

    options: dict[str, Any] = {"max_tokens": 12, "logits_processors": [record]}
    tokens(model, PROMPT, **options)
    assert seen == [PROMPT + expected[:n] for n in range(12)]
    seen.clear()
    tokens(model, PROMPT, Scripted(expected, VOCAB_SIZE), **options)
    histories = {tuple(history) for history in seen}
    assert {tuple(PROMPT + expected[:n]) for n in range(12)} <= histories


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temp": 1.0, "seed": 7},
        {"temp": 1.0, "seed": 7, "couple": False},
        {"temp": 0.6, "top_p": 0.9, "seed": 1},
    ],
)
def test_text_does_not_depend_on_the_shapes(model, sampling, monkeypatch):
    plain = plain_tokens(model, PROMPT, max_tokens=60, **sampling)
    for drafter in (random_drafter(VOCAB_SIZE, 32), Scripted(ids(plain), VOCAB_SIZE)):
        policy = RandomShapes(3)
        use_policy(monkeypatch, policy)
        found = tokens(model, PROMPT, drafter, max_tokens=60, **sampling)
        assert_same_tokens(plain, found, sampling)
        assert len(policy.seen) > 8
        assert policy.num_others > 0


def test_texts_stay_the_same_where_drafts_are_dear_and_teach_the_next_text(model, monkeypatch):
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


def test_a_text_that_is_broken_off_teaches_too(model):
    drafter = random_drafter(VOCAB_SIZE, 32)
    responses = stream(model, PROMPT, drafter, max_tokens=120)
    memory = generation._memories.of(model, drafter)
    with closing(responses):
        *_, last = islice(responses, 60)
        assert memory.policy is None
    assert memory.policy is not None
    assert last.stats.shapes
