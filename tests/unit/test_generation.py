"""`stream_generate` and `generate` against stock mlx-lm, and the comparison that users run."""

import logging
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest

from mlx_redrafter import Engine, GenerationResponse, generate, generate_batch, stream_generate
from mlx_redrafter.engine import text_comparison
from mlx_redrafter.engine.text_comparison import Difference, compare_decoding
from mlx_redrafter.errors import CheckpointError, ConfigError, NonFiniteError
from tests.helpers.drafts import Scripted
from tests.helpers.equality import Scored, assert_same_tokens, ids, stock_tokens, stream, tokens
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer

VOCAB_SIZE = 64
PROMPT = [5, 17, 3, 60]
TOKENIZER = wrapped_tokenizer(VOCAB_SIZE)
RANDOM = random_drafter(VOCAB_SIZE, 32)
SHAPES: list[dict[str, Any]] = [
    {"beam_width": 4, "beam_length": 5, "tree_nodes": 9},
    {"beam_width": 1, "beam_length": 16},
    {"beam_width": 3, "beam_length": 4, "select": "beam"},
]


@pytest.fixture(scope="module")
def stock(model: nn.Module) -> list[Scored]:
    return stock_tokens(model, PROMPT, 64)


def _scripted(stock: list[Scored], accuracy: float = 0.85) -> Scripted:
    return Scripted(ids(stock), VOCAB_SIZE, accuracy)


@pytest.mark.parametrize("position", [0, 1, 6, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_limit_or_a_stop_token_cuts_inside_a_step(model, stock, position, shape):
    stop = ids(stock)[position]
    end = ids(stock).index(stop) + 1
    for stops, limit in ((set(), end), ({stop}, -1), ({stop}, end)):
        tokenizer = wrapped_tokenizer(VOCAB_SIZE, stops)
        expected = list(mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=limit))
        assert (expected[-1].finish_reason == "stop") == bool(stops)
        for drafter in (_scripted(stock), None):
            options = {"tokenizer": tokenizer, "max_tokens": limit, **(shape if drafter else {})}
            found = list(stream(model, PROMPT, drafter, **options))
            _assert_same_responses(expected, found, end)


def _assert_same_responses(
    expected: list[Any], found: list[GenerationResponse], num_tokens: int
) -> None:
    """Ours has one response per token; stock's last one also carries the text before a stop."""
    last, stock_last = found[-1], expected[-1]
    assert last.finish_reason == stock_last.finish_reason
    assert last.generation_tokens == stock_last.generation_tokens == num_tokens
    assert last.prompt_tokens == stock_last.prompt_tokens
    assert [r.finish_reason for r in found[:-1]] == [None] * (num_tokens - 1)
    assert [r.generation_tokens for r in found] == list(range(1, num_tokens + 1))
    assert [r.token for r in found] == [r.token for r in expected]
    assert [r.text for r in found] == [r.text for r in expected]
    for response, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            np.array(response.logprobs), np.array(reference.logprobs), atol=1e-4, rtol=0
        )


def test_unlimited_text_goes_on_past_256_tokens(model):
    responses = stream(model, PROMPT, RANDOM, max_tokens=-1)
    found = [next(responses).token for _ in range(270)]
    responses.close()
    assert_same_tokens(stock_tokens(model, PROMPT, 270), found)


@pytest.mark.parametrize("prompt", ["Once upon a time", "Lily said: é ü", ""])
def test_text_segments_are_those_of_stock_mlx_lm(stories, prompt):
    pair = stories.model, stories.tokenizer, prompt
    expected = list(mlx_lm.stream_generate(*pair, max_tokens=30))
    drafter = Scripted([r.token for r in expected], 512)
    found = list(stream_generate(*pair, drafter=drafter, max_tokens=30))
    assert [r.text for r in found] == [r.text for r in expected]
    whole = generate(*pair, drafter=stories.drafter, max_tokens=30)
    assert whole == "".join(r.text for r in expected)
    assert whole == mlx_lm.generate(*pair, max_tokens=30)
    # mlx-lm's wrapper of the tokenizer may be missing.
    inner = stories.tokenizer._tokenizer
    assert whole == generate(stories.model, inner, prompt, drafter=None, max_tokens=30)


@pytest.mark.parametrize("as_type", [tuple, mx.array, np.array])
def test_prompt_may_be_ids_of_any_kind(model, stock, as_type):
    assert tokens(model, as_type(PROMPT), max_tokens=5) == ids(stock[:5])


@pytest.mark.parametrize("step_size", [1, 3, 2048])
def test_prefill_in_chunks_reports_progress_as_stock(model, step_size):
    prompt, seen = list(range(1, 8)), list[tuple[int, int]]()
    options: dict[str, Any] = {"prefill_step_size": step_size, "max_tokens": 3}
    options["prompt_progress_callback"] = lambda *pair: seen.append(pair)
    stock = stock_tokens(model, prompt, **options)
    expected = seen[:]
    for drafter in (None, RANDOM):
        seen.clear()
        assert_same_tokens(stock, tokens(model, prompt, drafter, **options))
        assert seen == expected


def test_statistics_add_up(model, stock):
    responses = list(stream(model, PROMPT, _scripted(stock), beam_width=4, max_tokens=50))
    last, stats = responses[-1], responses[-1].stats
    assert last.steps == stats.steps == sum(stats.accepted_counts)
    assert stats.num_tokens == 50
    assert last.tokens_per_step == pytest.approx(49 / last.steps)
    # The first token belongs to no step, and the end may cut the last one.
    accepted = sum(count * n for n, count in enumerate(stats.accepted_counts))
    assert 49 <= accepted + last.steps < 49 + 5
    rates = stats.acceptance_rate_by_depth
    counts = stats.accepted_counts
    assert rates == [sum(counts[depth:]) / last.steps for depth in range(1, len(counts))]
    assert stats.num_verified == 9 * last.steps
    # One of the target's own per step, and the first; the end may cut the last step's.
    assert last.steps <= sum(not one.from_draft for one in responses) <= last.steps + 1


def test_plain_decoding_makes_one_token_per_step(model):
    responses = list(stream(model, PROMPT, max_tokens=5))
    assert [response.tokens_per_step for response in responses] == [None, 1.0, 1.0, 1.0, 1.0]
    assert [response.steps for response in responses] == [0, 1, 2, 3, 4]
    assert not any(response.from_draft for response in responses)
    for drafter in (None, RANDOM):
        (only,) = stream(model, PROMPT, drafter, max_tokens=1)
        assert (only.steps, only.tokens_per_step, only.finish_reason) == (0, None, "length")
        assert only.stats.acceptance_rate_by_depth == []


# Bounds of shapes and of sampling are those of `test_checkpoint`.
BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens must be 1 or more, or -1 for no limit, got 0"),
    ({"max_tokens": -2}, "max_tokens must be an integer at least -1 .*got -2"),
    ({"max_tokens": True}, "max_tokens must be an integer .*got True"),
    ({"beam_width": 65}, "beam_width must be an integer from 1 to 64, got 65"),
    ({"tree_nodes": [9]}, "tree_nodes must be an integer .*got .9."),
    ({"select": "beam", "tree_nodes": 9}, "tree_nodes cannot be chosen with select='beam'"),
    ({"temp": -0.1}, "temp must be a number from 0 to 1e\\+06, got -0.1"),
    ({"temp": 1.0, "top_k": 64}, "top_k must be below the vocabulary size 64, got 64"),
    ({"prefill_step_size": 0}, "prefill_step_size must be an integer at least 1, got 0"),
    ({"sampler": mx.argmax, "temp": 0.0}, "sampler= replaces temp; give one or the other"),
    ({"sampler": mx.argmax, "seed": 1, "top_k": 2}, "sampler= replaces top_k, seed"),
    ({"kv_bits": 7}, "kv_bits must be one of 1, 2, 3, 4, 5, 6, 8, got 7"),
    ({"kv_bits": True}, "kv_bits must be .*, got True"),
    ({"kv_group_size": 16}, "kv_group_size must be one of 32, 64, 128, got 16"),
    ({"kv_bits": 8, "quantized_kv_start": -1}, "quantized_kv_start must be .* at least 0"),
    ({"couple": "yes"}, "couple must be True or False, got 'yes'"),
    ({"drafter": "x"}, "drafter must be a drafter that mlx_redrafter.load has loaded.* got 'x'"),
    ({"drafter": nn.Linear(2, 2)}, "drafter must be a drafter .* got Linear"),
    ({"prompt_cache": "x"}, "prompt_cache must be a list, got 'x'"),
    ({"prompt_cache": [None]}, r"prompt_cache must hold caches from mlx_lm.*, got None"),
    ({"history": 5}, "history must be a list"),
    ({"history": [5]}, r"history\[...\] must be a list of token ids, got 5"),
    ({"num_draft_tokens": 3}, "num_draft_tokens is mlx-lm's option.* give beam_width=1"),
    ({"max_kv_size": 512}, "max_kv_size is mlx-lm's option.* or give kv_bits"),
    ({"verbose": True}, "verbose is mlx-lm's option.* print the text"),
    ({"sampler": 3}, "sampler must be a function, got 3"),
    ({"logits_processors": mx.argmax}, "logits_processors must be a list, got "),
    ({"logits_processors": [mx.argmax, 3]}, r"logits_processors\[1\] must be a function, got 3"),
    ({"prompt_progress_callback": "x"}, "prompt_progress_callback must be a function, got 'x'"),
]


@pytest.mark.parametrize(
    ("options", "message"), BAD_OPTIONS, ids=lambda value: str(value).split(" at 0x")[0]
)
def test_impossible_options_are_refused_at_the_call(model, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        stream_generate(model, TOKENIZER, PROMPT, **options)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        *((empty, "the prompt is empty; give at least one token") for empty in ([], "")),
        ([3, 64], "prompt token ids must be from 0 to 63, got 64"),
        ([3, -1], "prompt token ids must be from 0 to 63, got -1"),
        ([3] * 513, "the prompt has 513 tokens, the model's context is 512; shorten the prompt"),
        *(
            (odd, "the prompt must be a text or token ids, got ")
            for odd in (None, b"Hi", [1.0], [True], ["Hi"], [[1, 2]], mx.array(3), np.array([1.0]))
        ),
        *((mx.array(odd), "text or token ids, got array") for odd in ([True], [[1, 2]], [1.0])),
        ("\udcff", "the prompt must be UTF-8 text"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_impossible_prompts_are_refused(model, prompt, message):
    with pytest.raises(ConfigError, match=message):
        stream(model, prompt)
    with pytest.raises(ConfigError, match=f"prompt 1: .*{message}"):
        generate_batch(model, TOKENIZER, [PROMPT, prompt], drafter=None, max_tokens=1)


def test_unknown_options_are_refused(model):
    with pytest.raises(TypeError, match="argument 'temperature'; did you mean temp"):
        generate(model, TOKENIZER, PROMPT, drafter=None, temperature=1.0)
    with pytest.raises(ConfigError, match=r"model must be a model .*got None"):
        Engine(None, TOKENIZER)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"tokenizer must be .*got None"):
        Engine(model, None)


@pytest.mark.parametrize("drafter", [None, "lookup", RANDOM])
@pytest.mark.parametrize("token", [-5, 2**31 - 1])
def test_a_sampler_returns_an_id_outside_the_vocabulary(model, drafter, token):
    """MLX would read memory beyond the embedding, which ended the process."""
    steps = iter(range(100))

    def sample(log_probs: mx.array) -> mx.array:
        return mx.array([token]) if next(steps) > 3 else mx.argmax(log_probs, axis=-1)

    with pytest.raises(ConfigError, match="sampler must return token ids from 0 to 63"):
        tokens(model, PROMPT, drafter, sampler=sample, max_tokens=40)


def test_functions_that_return_other_things_are_named(model):
    with pytest.raises(ConfigError, match=r"sampler must return one token id per row.*got int"):
        next(stream(model, PROMPT, RANDOM, sampler=lambda log_probs: 3))
    for length, found in ((0, "NoneType"), (3, r"\(1, 3\)")):
        cut = lambda _, logits, end=length: logits[:, :end] if end else None  # noqa: E731
        message = rf"logits_processors\[0\] must return logits of shape .*got {found}"
        with pytest.raises(ConfigError, match=message):
            next(stream(model, PROMPT, RANDOM, logits_processors=[cut]))


def test_prompt_after_a_full_cache_is_refused(model):
    cache = mlx_lm.models.cache.make_prompt_cache(model)
    stock_tokens(model, [3] * 500, 0, prompt_cache=cache)
    assert cache[0].offset == 500
    with pytest.raises(ConfigError, match=r"has 13 tokens after 500 cached ones.* context is 512"):
        stream(model, [3] * 13, prompt_cache=cache)


@pytest.mark.parametrize("drafter", [None, RANDOM], ids=["plain", "drafted"])
@pytest.mark.parametrize(
    ("max_tokens", "length", "words"), [(20, 20, "longer than the"), (-1, 8, "ends where the")]
)
def test_one_warning_at_the_end_of_the_context(drafter, max_tokens, length, words, caplog):
    """A text without a limit ends there, any other one goes on."""
    model, found = tiny_llama(seed=4, context=12), list[int]()
    for response in stream(model, PROMPT, drafter, max_tokens=max_tokens):
        found.append(response.token)
        # Four of the prompt and eight more fit.
        assert max_tokens == -1 or len(caplog.records) == (len(found) > 8)
    assert_same_tokens(stock_tokens(model, PROMPT, length), found)
    assert response.finish_reason == "length"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert words in record.getMessage()
    assert "model's context of 12 tokens" in record.getMessage()


def test_drafters_of_other_sizes(model, stock):
    for sizes, message in (
        ((64, 48), "hidden_size 48 does not match the target's 32; use a drafter"),
        ((63, 32), "vocab_size 63 does not match the target's 64; use a drafter"),
        ((65, 32), "vocab_size 65 does not match the target's 64; use a drafter"),
    ):
        with pytest.raises(CheckpointError, match=message):
            stream(model, PROMPT, random_drafter(*sizes))
    # The padding of an embedding may be missing.
    options: dict[str, Any] = {"tokenizer": wrapped_tokenizer(50), "max_tokens": 20}
    assert_same_tokens(stock[:20], tokens(model, PROMPT, random_drafter(50, 32), **options))


def test_more_drafts_than_the_drafter_has_tokens_for_are_refused(model, stock):
    drafter = random_drafter(VOCAB_SIZE, 32, draft_vocab_size=8)
    with pytest.raises(ConfigError, match=r"beam_width must be .* to 8 with the 8 tokens .*got 9"):
        stream(model, PROMPT, drafter, beam_width=9)
    options = {"beam_width": 4, "beam_length": 3, "max_tokens": 20}
    with pytest.raises(ConfigError, match=r"tree_nodes must be .* to 17 .*8 tokens.*got 18"):
        stream(model, PROMPT, drafter, tree_nodes=18, **options)
    assert_same_tokens(stock[:20], tokens(model, PROMPT, drafter, tree_nodes=17, **options))


@pytest.mark.parametrize("drafter", [None, RANDOM], ids=["plain", "drafted"])
def test_logits_that_are_no_numbers_after_the_prompt_are_refused(drafter):
    model = tiny_llama(seed=4)
    norm: Any = model["model"]["norm"]
    norm.weight[0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"logits after the prompt are NaN; .*bfloat16"):
        next(stream(model, PROMPT, drafter))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("count", [1, 3, 11])
@pytest.mark.parametrize("drafts", ["none", "random", "lookup", "scripted", "chain"])
def test_logits_that_are_no_numbers_end_the_text_where_they_are(model, stock, value, count, drafts):
    """Whatever is drafted, the text before them is the target's, and is there."""
    drafters = {"none": None, "random": RANDOM, "lookup": "lookup"}
    drafter = drafters.get(drafts, _scripted(stock, 0.95))

    def damage(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits if tokens.size < len(PROMPT) + count else mx.full(logits.shape, value)

    options: dict[str, Any] = {
        "logits_processors": [damage],
        "beam_width": {"scripted": 4, "chain": 1}.get(drafts, "auto"),
    }
    responses = stream(model, PROMPT, drafter, **options)
    found = [next(responses).token for _ in range(count)]
    assert_same_tokens(stock[:count], found)
    with pytest.raises(NonFiniteError, match=r"logits in the text are NaN"):
        next(responses)
    # Where the text ends before, nothing is wrong with it.
    assert len(tokens(model, PROMPT, drafter, max_tokens=count, **options)) == count


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 6e3])
@pytest.mark.parametrize("part", ["head", "state"])
@pytest.mark.parametrize("select", ["top_n", "beam"])
def test_drafts_that_are_no_numbers_change_nothing(model, stock, value, part, select):
    """A drafter that passed its check can still overflow on the way, in float16 by far."""
    sampling = {"temp": 1.0, "seed": 5, "top_p": 0.9, "max_tokens": 15}
    is_finite = value == 6e3
    drafter = random_drafter(VOCAB_SIZE, 32, dtype=mx.float16 if is_finite else mx.float32)
    for layer in drafter.lm_head if part == "head" else [drafter.rnn_u]:
        inner: Any = getattr(layer, "linear", layer)
        inner.weight = inner.weight * value
    found = tokens(model, PROMPT, drafter, max_tokens=15, select=select)
    assert_same_tokens(stock[:15], found)
    sampled = tokens(model, PROMPT, drafter, select=select, **sampling)
    assert sampled == tokens(model, PROMPT, **sampling)


def test_equal_texts_up_to_a_stop_token():
    model = tiny_llama()
    text = ids(stock_tokens(model, PROMPT, 20))
    for options, stops in (({}, {text[4]}), ({"temp": 1.0, "seed": 2}, set())):
        tokenizer = wrapped_tokenizer(VOCAB_SIZE, stops)
        found = compare_decoding(model, tokenizer, RANDOM, PROMPT, 20, **options)
        end = text.index(text[4]) + 1 if stops else 20
        assert (found.num_tokens, found.difference) == (end, None)
        assert found.tokens_per_step >= 1


def test_a_text_that_ends_early_differs_at_its_end():
    row, difference = mx.array([0.0, -1.5, -9.0]), text_comparison._first_difference
    assert difference([(1, row), (2, row)], [1]) == Difference(1, expected=2, found=None, gap=1.5)
    assert difference([(1, row)], [1, 2]) == Difference(1, expected=None, found=2, gap=1.5)
