"""`stream_generate` and `generate` against stock mlx-lm: ends, texts, responses, interleaving."""

from __future__ import annotations

import logging
import random
import threading
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest

from mlx_redrafter import Engine, GenerationResponse, generate, generate_batch, stream_generate
from mlx_redrafter.errors import CheckpointError, ConfigError, NonFiniteError
from tests.conftest import Trained
from tests.helpers.drafts import Scripted
from tests.helpers.equality import assert_same_tokens, ids, stock_tokens
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer

VOCAB_SIZE = 64
PROMPT = [5, 17, 3, 60]
SHAPES: list[dict[str, Any]] = [
    {"beam_width": 4, "beam_length": 5, "tree_nodes": 9},
    {"beam_width": 1, "beam_length": 16},
    {"beam_width": 3, "beam_length": 4, "select": "beam"},
]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_llama(seed=4)


@pytest.fixture(scope="module")
def stock(model: nn.Module) -> list[tuple[int, mx.array]]:
    return stock_tokens(model, PROMPT, 64)


def _drafted(
    script: list[int], model: nn.Module, tokenizer: Any, **options: Any
) -> list[GenerationResponse]:
    drafter = Scripted(script, VOCAB_SIZE, accuracy=0.85)
    options = {"beam_width": 4, "drafter": drafter, **options}
    return list(stream_generate(model, tokenizer, PROMPT, **options))


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_max_tokens_cuts_inside_a_step(
    model: nn.Module, stock: list[tuple[int, mx.array]], max_tokens: int, shape: dict[str, Any]
) -> None:
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    expected = list(mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=max_tokens))
    found = _drafted(ids(stock), model, tokenizer, max_tokens=max_tokens, **shape)
    _assert_same_responses(expected, found, max_tokens)


@pytest.mark.parametrize("position", [0, 1, 2, 3, 5, 11])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("max_tokens", [-1, 30, "at the stop token"])
def test_a_stop_token_cuts_inside_a_step(
    model: nn.Module,
    stock: list[tuple[int, mx.array]],
    position: int,
    shape: dict[str, Any],
    max_tokens: int | str,
) -> None:
    stop = ids(stock)[position]
    tokenizer = wrapped_tokenizer(VOCAB_SIZE, {stop})
    first = ids(stock).index(stop)
    limit = first + 1 if isinstance(max_tokens, str) else max_tokens
    expected = list(mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=limit))
    assert expected[-1].finish_reason == "stop"
    found = _drafted(ids(stock), model, tokenizer, max_tokens=limit, **shape)
    _assert_same_responses(expected, found, first + 1)
    plain = list(stream_generate(model, tokenizer, PROMPT, drafter=None, max_tokens=limit))
    _assert_same_responses(expected, plain, first + 1)


def _assert_same_responses(
    expected: list[Any], found: list[GenerationResponse], num_tokens: int
) -> None:
    """Ours has one response per token; stock's last one also carries the text before a stop."""
    assert len(found) == num_tokens
    last, stock_last = found[-1], expected[-1]
    assert last.finish_reason == stock_last.finish_reason
    assert last.generation_tokens == stock_last.generation_tokens == num_tokens
    assert last.token == stock_last.token
    assert last.prompt_tokens == stock_last.prompt_tokens
    assert [r.finish_reason for r in found[:-1]] == [None] * (num_tokens - 1)
    assert [r.generation_tokens for r in found] == list(range(1, num_tokens + 1))
    assert [r.token for r in found] == [r.token for r in expected]
    assert [r.text for r in found] == [r.text for r in expected]
    for response, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            np.array(response.logprobs), np.array(reference.logprobs), atol=1e-4, rtol=0
        )


def test_unlimited_text_goes_on_past_256_tokens(model: nn.Module) -> None:
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    responses = stream_generate(
        model, tokenizer, PROMPT, drafter=random_drafter(VOCAB_SIZE, 32), max_tokens=-1
    )
    found = [next(iter(responses)).token for _ in range(270)]
    responses.close()
    assert_same_tokens(stock_tokens(model, PROMPT, 270), found)


@pytest.mark.parametrize("prompt", ["Once upon a time", "Lily said: é ü", ""])
def test_text_segments_are_those_of_stock_mlx_lm(stories: Trained, prompt: str) -> None:
    expected = list(mlx_lm.stream_generate(stories.model, stories.tokenizer, prompt, max_tokens=60))
    drafter = Scripted([r.token for r in expected], 512)
    found = list(
        stream_generate(stories.model, stories.tokenizer, prompt, drafter=drafter, max_tokens=60)
    )
    assert [r.text for r in found] == [r.text for r in expected]
    whole = generate(
        stories.model, stories.tokenizer, prompt, drafter=stories.drafter, max_tokens=60
    )
    assert whole == "".join(r.text for r in expected)
    assert whole == mlx_lm.generate(stories.model, stories.tokenizer, prompt, max_tokens=60)


@pytest.mark.parametrize("as_type", [list, tuple, mx.array, np.array])
def test_prompt_may_be_ids_of_any_kind(model: nn.Module, as_type: Any) -> None:
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    found = [
        r.token
        for r in stream_generate(model, tokenizer, as_type(PROMPT), drafter=None, max_tokens=5)
    ]
    assert_same_tokens(stock_tokens(model, PROMPT, 5), found)


def test_a_tokenizer_without_mlx_lms_wrapper_will_do(stories: Trained) -> None:
    inner = stories.tokenizer._tokenizer
    texts = [
        generate(stories.model, tokenizer, "Lily", drafter=None, max_tokens=10)
        for tokenizer in (inner, stories.tokenizer)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("step_size", [1, 2, 3, 2048])
def test_prefill_in_chunks_reports_progress_as_stock(model: nn.Module, step_size: int) -> None:
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    prompt = list(range(1, 8))
    expected: list[tuple[int, int]] = []
    stock_tokens(
        model,
        prompt,
        3,
        prefill_step_size=step_size,
        prompt_progress_callback=lambda *progress: expected.append(progress),
    )
    for drafter in (None, random_drafter(VOCAB_SIZE, 32)):
        found: list[tuple[int, int]] = []
        tokens = [
            response.token
            for response in stream_generate(
                model,
                tokenizer,
                prompt,
                drafter=drafter,
                max_tokens=3,
                prefill_step_size=step_size,
                prompt_progress_callback=lambda *progress, to=found: to.append(progress),
            )
        ]
        assert found == expected
        assert_same_tokens(stock_tokens(model, prompt, 3), tokens)


def test_interleaved_generators_on_one_model(model: nn.Module) -> None:
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    drafter = random_drafter(VOCAB_SIZE, 32)
    prompts = [[5, 17, 3], [8], [40, 2, 2, 9], [1, 2]]
    streams = [
        stream_generate(model, tokenizer, prompts[0], drafter=drafter, max_tokens=40),
        stream_generate(model, tokenizer, prompts[1], drafter=None, max_tokens=40),
        stream_generate(
            model, tokenizer, prompts[2], drafter=drafter, max_tokens=40, select="beam"
        ),
        mlx_lm.stream_generate(model, tokenizer, prompts[3], max_tokens=40),
    ]
    found: list[list[int]] = [[], [], [], []]
    rng = random.Random(2)
    running = {i: iter(stream) for i, stream in enumerate(streams)}
    while running:
        i = rng.choice(sorted(running))
        response = next(running[i], None)
        if response is None:
            del running[i]
        else:
            found[i].append(response.token)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert_same_tokens(stock_tokens(model, prompt, 40), tokens, prompt)


def test_two_threads_on_one_model(model: nn.Module) -> None:
    tokenizers = [wrapped_tokenizer(VOCAB_SIZE) for _ in range(2)]
    drafter = random_drafter(VOCAB_SIZE, 32)
    prompts = [[5, 17, 3], [40, 2, 2, 9]]
    expected = [stock_tokens(model, prompt, 40) for prompt in prompts]
    found: list[list[int]] = [[], []]
    start = threading.Barrier(2)

    def work(i: int) -> None:
        start.wait()
        for response in stream_generate(
            model, tokenizers[i], prompts[i], drafter=drafter, max_tokens=40
        ):
            found[i].append(response.token)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert_same_tokens(expected[i], found[i], i)


def test_stock_logits_are_bitwise_unchanged_by_the_hooks() -> None:
    prompt = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    untouched = np.array(tiny_llama(seed=9)(prompt))
    model = tiny_llama(seed=9)
    names = [name for name, _ in model.named_modules()]
    list(
        stream_generate(
            model, wrapped_tokenizer(64), [1, 2], drafter=random_drafter(64, 32), max_tokens=5
        )
    )
    assert np.array_equal(np.array(model(prompt)), untouched)
    assert [name for name, _ in model.named_modules()] == names


def test_statistics_add_up(model: nn.Module, stock: list[tuple[int, mx.array]]) -> None:
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    last = _drafted(ids(stock), model, tokenizer, max_tokens=50)[-1]
    stats = last.stats
    assert last.steps == stats.steps == sum(stats.accepted_counts)
    assert stats.num_tokens == 50
    assert last.tokens_per_step == pytest.approx(49 / last.steps)
    # The first token belongs to no step, and the end may cut the last one.
    accepted = sum(count * n for n, count in enumerate(stats.accepted_counts))
    assert 49 <= accepted + last.steps < 49 + 5
    rates = stats.acceptance_rate_by_depth
    assert all(1 >= a >= b >= 0 for a, b in pairwise(rates))
    assert rates[0] == pytest.approx(sum(stats.accepted_counts[1:]) / last.steps)
    assert stats.num_verified == stats.num_unmerged == 9 * last.steps


def test_from_draft_marks_accepted_drafts(
    model: nn.Module, stock: list[tuple[int, mx.array]]
) -> None:
    responses = _drafted(ids(stock), model, wrapped_tokenizer(VOCAB_SIZE), max_tokens=50)
    own = [response for response in responses if not response.from_draft]
    # One of the target's own per step, and the first; the end may cut the last step's.
    assert responses[-1].steps <= len(own) <= responses[-1].steps + 1
    plain = stream_generate(
        model, wrapped_tokenizer(VOCAB_SIZE), PROMPT, drafter=None, max_tokens=5
    )
    assert [response.from_draft for response in plain] == [False] * 5


def test_plain_decoding_makes_one_token_per_step(model: nn.Module) -> None:
    responses = list(
        stream_generate(model, wrapped_tokenizer(64), PROMPT, drafter=None, max_tokens=5)
    )
    assert [response.tokens_per_step for response in responses] == [None, 1.0, 1.0, 1.0, 1.0]
    assert [response.steps for response in responses] == [0, 1, 2, 3, 4]


def test_one_token_takes_no_step(model: nn.Module) -> None:
    for drafter in (None, random_drafter(VOCAB_SIZE, 32)):
        (only,) = stream_generate(
            model, wrapped_tokenizer(64), PROMPT, drafter=drafter, max_tokens=1
        )
        assert (only.steps, only.tokens_per_step, only.finish_reason) == (0, None, "length")
        assert only.stats.acceptance_rate_by_depth == []


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens must be 1 or more, or -1 for no limit, got 0"),
    ({"max_tokens": -2}, "max_tokens must be an integer at least -1 .*got -2"),
    ({"max_tokens": 2.0}, "max_tokens must be an integer .*got 2.0"),
    ({"beam_width": 0}, "beam_width must be an integer from 1 to 64, got 0"),
    ({"beam_width": 65}, "beam_width must be an integer from 1 to 64, got 65"),
    ({"beam_length": 1}, "beam_length must be an integer from 2 to 16 .the root.*got 1"),
    ({"beam_length": 17}, "beam_length must be an integer from 2 to 16 .*got 17"),
    ({"tree_nodes": 1}, "tree_nodes must be an integer from 2 to 65 .*got 1"),
    ({"tree_nodes": 66}, "tree_nodes must be .* from 2 to 65 for beam_width 4 .* 5, got 66"),
    ({"select": "best"}, "select must be 'top_n' or 'beam', got 'best'"),
    ({"select": "beam", "tree_nodes": 9}, "tree_nodes cannot be chosen with select='beam'"),
    ({"temp": -0.1}, "temp must be a finite number, 0 or more, got -0.1"),
    ({"temp": float("nan")}, "temp must be a finite number, 0 or more, got nan"),
    ({"top_p": 1.1}, "top_p must be a number from 0 to 1 .*got 1.1"),
    ({"min_p": -1}, "min_p must be a number from 0 to 1 .*got -1"),
    ({"top_k": -1}, "top_k must be an integer at least 0 .*got -1"),
    ({"temp": 1.0, "top_k": 64}, "top_k must be below the vocabulary size 64, got 64"),
    ({"seed": 2**32}, "seed must be an integer from 0 to 4294967295, got 4294967296"),
    ({"prefill_step_size": 0}, "prefill_step_size must be an integer at least 1, got 0"),
    ({"sampler": mx.argmax, "temp": 0.0}, "sampler= replaces temp; give one or the other"),
    ({"sampler": mx.argmax, "seed": 1, "top_k": 2}, "sampler= replaces top_k, seed"),
    ({"max_tokens": "5"}, "max_tokens must be an integer .*got '5'"),
    ({"max_tokens": True}, "max_tokens must be an integer .*got True"),
    ({"temp": "a"}, "temp must be a finite number, 0 or more, got 'a'"),
    ({"temp": False}, "temp must be a finite number, 0 or more, got False"),
    ({"top_p": "0.5"}, "top_p must be a number from 0 to 1 .*got '0.5'"),
    ({"beam_width": 2.5}, "beam_width must be an integer from 1 to 64, got 2.5"),
    ({"beam_length": "long"}, "beam_length must be an integer from 2 to 16 .*got 'long'"),
    ({"tree_nodes": [9]}, "tree_nodes must be an integer .*got .9."),
    ({"select": 1}, "select must be 'top_n' or 'beam', got 1"),
    ({"couple": "yes"}, "couple must be True or False, got 'yes'"),
    ({"seed": -1}, "seed must be an integer from 0 to 4294967295, got -1"),
    ({"seed": 1.0}, "seed must be an integer from 0 to 4294967295, got 1.0"),
    ({"drafter": 3}, "drafter must be a drafter that mlx_redrafter.load has loaded.* got 3"),
    ({"drafter": "x"}, "drafter must be a drafter that mlx_redrafter.load has loaded.* got 'x'"),
    ({"drafter": nn.Linear(2, 2)}, "drafter must be a drafter .* got Linear"),
    ({"prompt_cache": "x"}, "prompt_cache must be a list, got 'x'"),
    ({"prompt_cache": [None]}, r"prompt_cache must hold caches from mlx_lm.*, got None"),
    ({"history": 5}, "history must be a list"),
    ({"history": [5]}, r"history\[...\] must be a list of token ids, got 5"),
    ({"num_draft_tokens": 3}, "num_draft_tokens is mlx-lm's option.* give beam_width=1"),
    ({"prompt_cache": 5}, "prompt_cache must be a list, got 5"),
    ({"sampler": 3}, "sampler must be a function, got 3"),
    ({"logits_processors": mx.argmax}, "logits_processors must be a list, got "),
    ({"logits_processors": [mx.argmax, 3]}, r"logits_processors\[1\] must be a function, got 3"),
    ({"prompt_progress_callback": "x"}, "prompt_progress_callback must be a function, got 'x'"),
]


@pytest.mark.parametrize(
    ("options", "message"), BAD_OPTIONS, ids=lambda value: str(value).split(" at 0x")[0]
)
def test_impossible_options_are_refused_at_the_call(
    model: nn.Module, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        stream_generate(model, wrapped_tokenizer(VOCAB_SIZE), PROMPT, **options)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty; give at least one token"),
        ("", "the prompt is empty; give at least one token"),
        ([3, 64], "prompt token ids must be from 0 to 63, got 64"),
        ([3, -1], "prompt token ids must be from 0 to 63, got -1"),
        ([3] * 513, "the prompt has 513 tokens, the model's context is 512; shorten the prompt"),
        (mx.array([]), "the prompt is empty; give at least one token"),
        (None, "the prompt must be a text or token ids, got None"),
        (7, "the prompt must be a text or token ids, got 7"),
        (b"Hi", "the prompt must be a text or token ids, got b'Hi'"),
        ([1.5], r"the prompt must be a text or token ids, got \[1.5\]"),
        ([1.0], r"the prompt must be a text or token ids, got \[1.0\]"),
        ([True, False], r"the prompt must be a text or token ids, got \[True, False\]"),
        (["Hi"], r"the prompt must be a text or token ids, got \['Hi'\]"),
        ([[1, 2]], r"the prompt must be a text or token ids, got \[\[1, 2\]\]"),
        (mx.array([1.0, 2.0]), "the prompt must be a text or token ids, got array"),
        (mx.array([True]), "the prompt must be a text or token ids, got array"),
        (mx.array([[1, 2]]), "the prompt must be a text or token ids, got array"),
        (mx.array(3), "the prompt must be a text or token ids, got array"),
        (np.array([1.0]), "the prompt must be a text or token ids, got array"),
        (np.array([True]), "the prompt must be a text or token ids, got array"),
        ("\udcff", "the prompt must be UTF-8 text"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_impossible_prompts_are_refused(model: nn.Module, prompt: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stream_generate(model, wrapped_tokenizer(VOCAB_SIZE), prompt, drafter=None)


def test_an_impossible_prompt_of_a_batch_is_named(model: nn.Module) -> None:
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    with pytest.raises(ConfigError, match="prompt 1: the prompt is empty"):
        generate_batch(model, tokenizer, [PROMPT, []], drafter=None, batch_size=1, max_tokens=1)


def test_unknown_options_are_refused(model: nn.Module) -> None:
    with pytest.raises(TypeError, match="argument 'temperature'; did you mean temp"):
        generate(model, wrapped_tokenizer(VOCAB_SIZE), PROMPT, drafter=None, temperature=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": lambda log_probs: 3}, "sampler must return one token id per row.*got int"),
        (
            {"logits_processors": [lambda tokens, logits: None]},
            r"logits_processors\[0\] must return logits of shape .*got NoneType",
        ),
        (
            {"logits_processors": [lambda tokens, logits: logits[:, :3]]},
            r"logits_processors\[0\] must return logits of shape .*got \(1, 3\)",
        ),
    ],
)
def test_functions_that_return_other_things_are_named(
    model: nn.Module, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        next(stream_generate(model, wrapped_tokenizer(VOCAB_SIZE), PROMPT, **options))


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((None, "x"), "model must be a model .*got None"),
        ((0, None), "tokenizer must be .*got None"),
    ],
    ids=["model", "tokenizer"],
)
def test_what_is_no_model_or_tokenizer_is_named(
    model: nn.Module, pair: tuple[Any, Any], message: str
) -> None:
    first, second = pair
    with pytest.raises(ConfigError, match=message):
        Engine(model if first == 0 else first, second)


def test_a_text_without_a_drafter_is_looked_up(model: nn.Module) -> None:
    tokenizer, prompt = wrapped_tokenizer(VOCAB_SIZE), [7, 8, 9, 10] * 8
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=60, beam_width=2))
    assert any(response.from_draft for response in responses)
    plain = list(stream_generate(model, tokenizer, prompt, max_tokens=60, drafter=None))
    assert not any(response.from_draft for response in plain)
    assert [one.token for one in responses] == [one.token for one in plain]


def test_prompt_after_a_full_cache_is_refused(model: nn.Module) -> None:
    cache = mlx_lm.models.cache.make_prompt_cache(model)
    stock_tokens(model, [3] * 500, 0, prompt_cache=cache)
    assert cache[0].offset == 500
    with pytest.raises(ConfigError, match=r"has 13 tokens after 500 cached ones.* context is 512"):
        stream_generate(
            model, wrapped_tokenizer(VOCAB_SIZE), [3] * 13, drafter=None, prompt_cache=cache
        )


@pytest.mark.parametrize("drafts", [False, True])
def test_text_past_the_context_goes_on_with_one_warning(
    drafts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama(seed=4, context=12)
    drafter = random_drafter(VOCAB_SIZE, 32) if drafts else None
    responses = []
    for response in stream_generate(
        model, wrapped_tokenizer(VOCAB_SIZE), PROMPT, drafter=drafter, max_tokens=20
    ):
        responses.append(response)
        # Four of the prompt and eight more fit.
        assert len(caplog.records) == (len(responses) > 8)
    assert_same_tokens(stock_tokens(model, PROMPT, 20), [r.token for r in responses])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "longer than the model's context of 12 tokens" in record.getMessage()


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"hidden_size": 48}, "hidden_size 48 does not match the target's 32; use a drafter"),
        ({"vocab_size": 63}, "vocab_size 63 does not match the target's 64; use a drafter"),
        ({"vocab_size": 65}, "vocab_size 65 does not match the target's 64; use a drafter"),
    ],
    ids=str,
)
def test_drafter_of_another_model_is_refused(
    model: nn.Module, size: dict[str, int], message: str
) -> None:
    drafter = random_drafter(size.get("vocab_size", 64), size.get("hidden_size", 32))
    with pytest.raises(CheckpointError, match=message):
        stream_generate(model, wrapped_tokenizer(64), PROMPT, drafter=drafter)


def test_drafter_may_leave_out_the_embeddings_padding(model: nn.Module) -> None:
    drafter = random_drafter(50, 32)
    responses = stream_generate(
        model, wrapped_tokenizer(50), PROMPT, drafter=drafter, max_tokens=20
    )
    assert_same_tokens(stock_tokens(model, PROMPT, 20), [r.token for r in responses])


def test_more_beams_than_the_drafter_has_tokens_are_refused(model: nn.Module) -> None:
    drafter = random_drafter(VOCAB_SIZE, 32, draft_vocab_size=8)
    with pytest.raises(ConfigError, match=r"beam_width must be at most the 8 tokens .*got 9"):
        stream_generate(model, wrapped_tokenizer(64), PROMPT, drafter=drafter, beam_width=9)


def test_more_nodes_than_the_drafter_has_tokens_for_are_refused(model: nn.Module) -> None:
    drafter = random_drafter(VOCAB_SIZE, 32, draft_vocab_size=8)
    options: dict[str, Any] = {"drafter": drafter, "beam_width": 4, "beam_length": 3}
    with pytest.raises(ConfigError, match=r"tree_nodes must be at most 17 .*8 tokens.*got 18"):
        stream_generate(model, wrapped_tokenizer(64), PROMPT, tree_nodes=18, **options)
    text = stream_generate(
        model, wrapped_tokenizer(64), PROMPT, tree_nodes=17, max_tokens=20, **options
    )
    assert_same_tokens(stock_tokens(model, PROMPT, 20), [r.token for r in text])


@pytest.mark.parametrize("drafts", [False, True])
def test_logits_that_are_no_numbers_after_the_prompt_are_refused(drafts: bool) -> None:
    model = tiny_llama(seed=4)
    norm: Any = model["model"]["norm"]
    norm.weight[0] = float("nan")
    drafter = random_drafter(VOCAB_SIZE, 32) if drafts else None
    stream = stream_generate(model, wrapped_tokenizer(VOCAB_SIZE), PROMPT, drafter=drafter)
    with pytest.raises(NonFiniteError, match=r"logits after the prompt are NaN; .*bfloat16"):
        next(iter(stream))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("count", [1, 2, 3, 6, 11])
@pytest.mark.parametrize("drafts", ["none", "random", "lookup", "scripted", "chain"])
def test_logits_that_are_no_numbers_end_the_text_where_they_are(
    model: nn.Module, stock: list[tuple[int, mx.array]], value: float, count: int, drafts: str
) -> None:
    """Whatever is drafted, the text before them is the target's, and is there."""
    scripted = Scripted(ids(stock), VOCAB_SIZE, accuracy=0.95)
    drafters = {"none": None, "random": random_drafter(VOCAB_SIZE, 32), "lookup": "lookup"}
    widths = {"scripted": 4, "chain": 1}

    def damage(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits if tokens.size < len(PROMPT) + count else mx.full(logits.shape, value)

    options: dict[str, Any] = {
        "drafter": drafters.get(drafts, scripted),
        "beam_width": widths.get(drafts, "auto"),
    }
    responses = stream_generate(
        model, wrapped_tokenizer(64), PROMPT, logits_processors=[damage], **options
    )
    found = [next(responses).token for _ in range(count)]
    assert_same_tokens(stock[:count], found)
    with pytest.raises(NonFiniteError, match=r"logits in the text are NaN"):
        next(responses)
    # Where the text ends before, nothing is wrong with it.
    options["max_tokens"] = count
    assert len(list(stream_generate(model, wrapped_tokenizer(64), PROMPT, **options))) == count


def test_a_token_without_numbers_is_reported_when_it_comes(
    stock: list[tuple[int, mx.array]],
) -> None:
    damaged = tiny_llama(seed=4)
    token = ids(stock)[7]
    first = ids(stock).index(token)
    damaged["model"]["embed_tokens"].weight[token] = float("nan")
    responses = stream_generate(damaged, wrapped_tokenizer(VOCAB_SIZE), PROMPT, drafter=None)
    assert_same_tokens(stock[: first + 1], [next(responses).token for _ in range(first + 1)])
    with pytest.raises(NonFiniteError, match=r"logits in the text are NaN"):
        next(responses)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["head", "state"])
@pytest.mark.parametrize("select", ["top_n", "beam"])
def test_drafts_that_are_no_numbers_change_nothing(
    model: nn.Module, stock: list[tuple[int, mx.array]], value: float, part: str, select: Any
) -> None:
    """A drafter that passed its check can still overflow on the way."""
    drafter = random_drafter(VOCAB_SIZE, 32)
    layer: Any = drafter.lm_head[-1] if part == "head" else drafter.rnn_u
    layer.weight[:] = value
    responses = stream_generate(
        model, wrapped_tokenizer(64), PROMPT, drafter=drafter, max_tokens=30, select=select
    )
    assert_same_tokens(stock[:30], [response.token for response in responses])


def test_float16_drafter_that_overflows_changes_nothing(
    model: nn.Module, stock: list[tuple[int, mx.array]]
) -> None:
    drafter = random_drafter(VOCAB_SIZE, 32, dtype=mx.float16, rnn=False)
    for layer in drafter.lm_head:
        weight: Any = getattr(layer, "linear", layer)
        weight.weight = weight.weight * 6e3
    responses = stream_generate(
        model, wrapped_tokenizer(64), PROMPT, drafter=drafter, max_tokens=30
    )
    assert_same_tokens(stock[:30], [response.token for response in responses])
