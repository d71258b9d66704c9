"""Proposers that need no training, and drafts made ahead, leave every text as stock mlx-lm has it.

Lookup alone and in front of a network, and draft models: one that is the target, one of other
weights of the same sizes, one that is smaller.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_redrafter import Engine, SpeculateAhead
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.draft_model import DraftModel
from mlx_redrafter.proposers.speculate_ahead import likeliest_outcomes
from tests.helpers import equality
from tests.helpers.drafts import RandomShapes, make_tree, use_policy
from tests.helpers.equality import ids, stock_tokens, stream, tokens
from tests.helpers.medusa import random_medusa
from tests.helpers.models import random_drafter, tiny_llama, tiny_qwen3, wrapped_tokenizer

VOCAB_SIZE = 64
# Passages that come back, so that there is something to look up.
PROMPT = [5, 17, 3, 60, 9, 12, 5, 17, 3, 60, 8, 30, 5, 17, 3]
NUM_TOKENS = 20
SHAPES: list[dict[str, Any]] = [
    {},
    {"beam_width": 1, "beam_length": 6},
    {"beam_width": 3, "beam_length": 5, "tree_nodes": 12},
]
BEAMS: dict[str, Any] = {"beam_width": 3, "beam_length": 4, "select": "beam"}
# Options of a text by name; functions, as stock samplers and processors have states.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "greedy": dict,
    "sampled": lambda: {"temp": 0.6, "seed": 11},
    "uncoupled": lambda: {"temp": 1.0, "seed": 11, "couple": False},
    "sampler": lambda: {"sampler": make_sampler(temp=0.7)},
    "top_p": lambda: {"sampler": make_sampler(temp=1.1, top_p=0.9)},
    "min_p": lambda: {"sampler": make_sampler(temp=1.0, min_p=0.05)},
    "penalty": lambda: {"logits_processors": make_logits_processors(repetition_penalty=1.3)},
    "bias": lambda: {"logits_processors": make_logits_processors(logit_bias={7: 4.0, 9: -3.0})},
}
CASES = [(name, shape) for name in ("greedy", "sampled", "uncoupled") for shape in SHAPES]
CASES += zip(("sampler", "top_p", "min_p", "penalty", "bias"), [*SHAPES, *SHAPES], strict=False)

MODEL, TOKENIZER = tiny_llama(seed=4), wrapped_tokenizer(VOCAB_SIZE)


def _perturbed() -> nn.Module:
    """The target with noise in its head: mostly right."""
    model: Any = tiny_llama(seed=4)
    head = model["lm_head"]
    head.weight = head.weight + 0.3 * mx.random.normal(head.weight.shape, key=mx.random.key(1))
    mx.eval(head.weight)
    return model


GUESTS: dict[str, Callable[[], Any]] = {
    "lookup": lambda: "lookup",
    "the target itself": lambda: DraftModel(MODEL, TOKENIZER),
    "a similar model": lambda: DraftModel(_perturbed(), TOKENIZER),
    "another model": lambda: DraftModel(tiny_qwen3(seed=8), TOKENIZER),
    "a smaller model": lambda: DraftModel(tiny_llama(seed=9, layers=1), TOKENIZER),
    "lookup in front of a network": lambda: random_drafter(VOCAB_SIZE, 32),
}


@pytest.fixture(scope="module", params=GUESTS)
def guest(request: pytest.FixtureRequest) -> Any:
    return GUESTS[request.param]()


def write(drafter: Any, name: str, **shape: Any) -> list[int]:
    mx.random.seed(3)
    return tokens(MODEL, PROMPT, drafter, max_tokens=NUM_TOKENS, **OPTIONS[name](), **shape)


@cache
def expected(name: str) -> list[int]:
    """Tokens of stock mlx-lm, or with a seed, which it lacks, those without drafts."""
    if "seed" in OPTIONS[name]():
        return write(None, name)
    mx.random.seed(3)
    return ids(stock_tokens(MODEL, PROMPT, NUM_TOKENS, **OPTIONS[name]()))


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_texts_are_those_of_plain_decoding(guest, name, shape):
    assert write(guest, name, **shape) == expected(name)


@pytest.mark.parametrize(("number", "shape"), list(enumerate(SHAPES)))
def test_stop_tokens_end_inside_a_draft(guest, number, shape):
    text = expected("greedy")[:16]  # several drafts of every shape
    for stop in list(dict.fromkeys(text))[number :: len(SHAPES)]:
        found = tokens(MODEL, PROMPT, guest, stop_tokens={stop}, max_tokens=len(text), **shape)
        assert found == text[: text.index(stop) + 1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_turns_on_one_prompt_cache(guest, shape):
    """With the target's layers alone, and with those of a draft model after them."""
    turns = [PROMPT, [7, 8, 9], [60], PROMPT]
    equality.assert_turns(MODEL, guest, turns, max_tokens=5, **shape)
    if isinstance(guest, DraftModel):
        own = make_prompt_cache(guest.target.model)
        equality.assert_turns(MODEL, guest, turns, own, max_tokens=5, **shape)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=8)
def test_any_repetitive_prompt(seed):
    keys = mx.random.split(mx.random.key(seed))
    passage = to_ints(mx.random.randint(1, VOCAB_SIZE, (9,), key=keys[0]))
    cuts = sorted(to_ints(mx.random.randint(0, 9, (6,), key=keys[1])))
    prompt = [*passage, *(t for a, b in pairwise(cuts) for t in passage[a:b]), *passage[:3]]
    stock = stock_tokens(MODEL, prompt, 24)
    for shape in SHAPES:
        equality.assert_same_tokens(stock, tokens(MODEL, prompt, "lookup", max_tokens=24, **shape))


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("length", [2, 5, 9])
def test_the_target_accepts_all_of_itself(temp, length):
    shape = {"beam_width": 1, "beam_length": length, "tree_nodes": length}
    options = {"temp": temp, "seed": 5, "max_tokens": 1 + 6 * length, **shape}
    *_, last = stream(MODEL, PROMPT, DraftModel(MODEL, TOKENIZER), **options)
    assert last.stats.accepted_counts == [0] * (length - 1) + [6]


DRAFTERS: dict[str, Callable[[], Any]] = {
    "recurrent": lambda: random_drafter(VOCAB_SIZE, 32),
    "recurrent, of some tokens": lambda: random_drafter(VOCAB_SIZE, 32, draft_vocab_size=40),
    "the target itself": lambda: DraftModel(MODEL, TOKENIZER),
    "another model": lambda: DraftModel(tiny_qwen3(seed=8), TOKENIZER),
}


@pytest.fixture(scope="module", params=DRAFTERS)
def drafter(request: pytest.FixtureRequest) -> Any:
    return DRAFTERS[request.param]()


@pytest.mark.parametrize("shape", [*SHAPES, BEAMS], ids=str)
def test_texts_with_drafts_made_ahead(drafter, shape):
    ahead = SpeculateAhead(drafter)
    for name in ("greedy", "sampler", "sampled" if len(shape) % 2 == 0 else "uncoupled"):
        assert write(ahead, name, **shape) == expected(name)
    if shape:
        assert ahead.hits.passes > 5


@pytest.mark.parametrize("num_outcomes", [1, 3])
def test_drafts_made_ahead_of_any_shape(drafter, monkeypatch, num_outcomes):
    """Trees cut anywhere, steps without drafts, drafts out of the text between them."""
    plain = {name: expected(name) for name in ("greedy", "sampled")}
    use_policy(monkeypatch, RandomShapes(1))
    ahead = SpeculateAhead(drafter, num_outcomes)
    assert {name: write(ahead, name) for name in plain} == plain
    assert ahead.hits.passes > 0


def test_turns_with_drafts_made_ahead(drafter):
    ahead, turns = SpeculateAhead(drafter), (PROMPT, [7, 8, 9], [60])
    equality.assert_turns(MODEL, ahead, turns, **SHAPES[1])
    own = make_prompt_cache(drafter.target.model) if isinstance(drafter, DraftModel) else []
    equality.assert_turns(MODEL, ahead, turns, own, **SHAPES[2])


def test_batches_and_threads_with_drafts_made_ahead(drafter):
    engine = Engine(MODEL, TOKENIZER, SpeculateAhead(drafter))
    prompts = [PROMPT, [7, 8, 9], [60]]
    options: dict[str, Any] = {"temp": 0.8, "seed": 4, "max_tokens": 10, "beam_width": 2}
    alone = [tokens(MODEL, one, temp=0.8, seed=4, max_tokens=10) for one in prompts]
    batch = engine.stream_batch(prompts, batch_size=2, **options)
    assert equality.batch_tokens(batch, len(prompts)) == alone

    def work(prompt: list[int]) -> list[int]:
        return [response.token for response in engine.stream(prompt, **options)]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, prompts)) == alone


@pytest.mark.parametrize("sampling", [{}, {"temp": 0.9, "seed": 5}], ids=str)
def test_a_drafter_that_is_right_foresees_every_outcome(sampling):
    """The target's own noise tells the token after the drafts at a temperature, too."""
    ahead = SpeculateAhead(DraftModel(MODEL, TOKENIZER))
    options = {"max_tokens": 60, "beam_width": 1, "beam_length": 6, **sampling}
    *_, last = stream(MODEL, PROMPT, ahead, **options)
    assert ahead.hits.passes >= 8
    assert ahead.hits.foreseen == ahead.hits.passes
    # So every draft made ahead is right; the last step may have fewer.
    assert last.stats.accepted_counts[-1] >= last.steps - 1


def test_the_likeliest_outcomes_are_those_of_all_paths_and_tokens():
    mx.random.seed(0)
    tokens, parents = [9, 3, 5, 4, 3], [0, 0, 0, 1, 2]
    tree = make_tree(tokens, parents, 2).padded(7)
    token_ids = mx.array([1, 3, 4, 5, 8, 9])
    scores = mx.random.normal((7, 6))
    scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    nodes, columns = likeliest_outcomes(tree, scores, token_ids, 5)
    rows, names = scores.tolist(), to_ints(token_ids)
    paths = [0.0]
    for node in range(1, 5):
        paths.append(paths[parents[node]] + rows[parents[node]][names.index(tokens[node])])
    children = [{tokens[c] for c in range(1, 5) if parents[c] == node} for node in range(5)]
    likeliest = sorted(
        (
            (paths[node] + rows[node][column], node, column)
            for node in range(5)
            for column in range(6)
            if names[column] not in children[node]
        ),
        reverse=True,
    )
    found = list(zip(to_ints(nodes), to_ints(columns), strict=True))
    assert found == [(node, column) for _, node, column in likeliest[:5]]


def test_other_kinds_do_not_draft_ahead():
    with pytest.raises(ConfigError, match="found a drafter of the kind Medusa"):
        SpeculateAhead(random_medusa(VOCAB_SIZE, 32))
    with pytest.raises(ConfigError, match="predraft must be an integer from 1 to 64"):
        SpeculateAhead(random_drafter(VOCAB_SIZE, 32), 0)
