"""Prompt lookup, draft models, and drafts made ahead: what not all kinds of proposers have."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_redrafter import Engine, SpeculateAhead
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.draft_model import DraftModel
from mlx_redrafter.proposers.speculate_ahead import likeliest_outcomes
from tests.helpers import equality
from tests.helpers.drafts import RandomShapes, make_tree, use_policy
from tests.helpers.equality import ids, stock_tokens, stream, tokens
from tests.helpers.medusa import random_medusa
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer
from tests.models.tiny_models import VOCAB_SIZE
from tests.property.test_lossless_networks import (
    AHEAD,
    CHAIN,
    GUESTS,
    PROMPT,
    TOKENIZER,
    TREE,
    ahead,
    guest,
    target_of,
)

NUM_TOKENS = 20
SHAPES: list[dict[str, Any]] = [{}, CHAIN, TREE]
MODEL = target_of("llama")
GREEDY = ids(stock_tokens(MODEL, PROMPT, NUM_TOKENS))


@pytest.mark.parametrize("name", GUESTS)
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_stop_tokens_end_inside_a_draft(name, number):
    text, drafter = GREEDY[:16], guest(MODEL, name)  # several drafts of every shape
    for stop in list(dict.fromkeys(text))[number :: len(SHAPES)]:
        options = {"stop_tokens": {stop}, "max_tokens": len(text), **SHAPES[number]}
        found = tokens(MODEL, PROMPT, drafter, **options)
        assert found == text[: text.index(stop) + 1]


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


@pytest.mark.parametrize("name", AHEAD)
@pytest.mark.parametrize("num_outcomes", [1, 3])
def test_drafts_made_ahead_of_any_shape(monkeypatch, name, num_outcomes):
    """Trees cut anywhere, steps without drafts, drafts out of the text between them."""
    sampled = {"temp": 0.6, "seed": 11, "max_tokens": NUM_TOKENS}
    plain = tokens(MODEL, PROMPT, **sampled)
    use_policy(monkeypatch, RandomShapes(1))
    drafter = SpeculateAhead(guest(MODEL, name), num_outcomes)
    assert tokens(MODEL, PROMPT, drafter, max_tokens=NUM_TOKENS) == GREEDY
    assert tokens(MODEL, PROMPT, drafter, **sampled) == plain
    assert drafter.hits.passes > 0


@pytest.mark.parametrize("name", AHEAD)
def test_batches_and_threads_with_drafts_made_ahead(name):
    engine = Engine(MODEL, TOKENIZER, ahead(MODEL, name))
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
    model = tiny_llama(seed=4)  # which is sure of its tokens
    drafter = SpeculateAhead(DraftModel(model, wrapped_tokenizer(64)))
    options = {"max_tokens": 60, "beam_width": 1, "beam_length": 6, **sampling}
    *_, last = stream(model, PROMPT, drafter, **options)
    assert drafter.hits.passes >= 8
    assert drafter.hits.foreseen == drafter.hits.passes
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
