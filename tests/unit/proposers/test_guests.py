"""Guests without a network of their own: lookup with its table of contexts, and draft models."""

import random
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from math import exp, inf
from struct import pack, unpack
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.decoding.sampling import GumbelNoise, gumbel_noise
from mlx_redrafter.decoding.step import propose_all
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.proposers import draft_model
from mlx_redrafter.proposers.draft_model import DraftModel
from mlx_redrafter.proposers.lookup import Lookup, contexts
from mlx_redrafter.proposers.lookup.chances import Chances, Child
from mlx_redrafter.proposers.lookup.contexts import FOLLOWED, LONGEST, NUM_BEST, Contexts, following
from mlx_redrafter.proposers.lookup.draft_tree import LEAST_PROBABILITY
from mlx_redrafter.proposers.lookup.lookup import LookupDrafting
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import Drafts, TokenTree
from tests.helpers.flights import flight_of
from tests.helpers.models import tiny_llama, wrapped_tokenizer
from tests.helpers.oracles import assert_scores, paths_of
from tests.unit.target.test_tree_cache import assert_same_rows, prefilled

PLAN = DraftPlan(DraftShape(4, 16), 16)


def _open(prompt: list[int], lookup: Lookup | None = None, couple: bool = True) -> LookupDrafting:
    target: Any = SimpleNamespace(vocab_size=300)
    return (lookup or Lookup()).open(target, prompt, couple, [])


def _flight(*tokens: int, rows: list[list[int]] | None = None, drafts: Drafts | None = None) -> Any:
    """A pass with these tokens, and after each node the most probable tokens, the first likely."""
    best: list[int] = []
    for row in rows or []:
        others = [one for one in range(290, 300) if one not in row]
        log_probs = [-0.1, *[-3.0 - rank for rank in range(NUM_BEST - 1)]]
        best += [*row, *others][:NUM_BEST]
        best += unpack(f"{NUM_BEST}i", pack(f"{NUM_BEST}f", *log_probs))
    known = {"tokens": list(tokens), "rows": list(range(len(tokens))), "known": drafts}
    return SimpleNamespace(best=best, is_finite=True, **known)


def _paths(tree: Any) -> list[list[int]]:
    return [[*path[1:]] for path in paths_of(to_ints(tree.tokens), to_ints(tree.parents))[1:]]


def _propose(drafting: LookupDrafting, *args: Any, noise: Any = None, **more: Any) -> TokenTree:
    """The drafts after a pass."""
    return drafting.propose(_flight(*args, **more), PLAN, noise)


def test_what_followed_is_proposed_after_the_newest_token():
    tree = _propose(_open([1, 2, 3, 4, 5, 6, 9, 1, 2]), 3)
    assert to_ints(tree.tokens)[0] == 3
    chain = [4, 5, 6, 9, 1, 2, 3]
    assert _paths(tree)[:4] == [chain[:n] for n in range(1, 5)]
    # Nothing is proposed where nothing repeats, unless earlier texts do.
    assert to_ints(_propose(_open([1, 2], Lookup([[9, 1, 2, 3, 4, 5]])), 3).tokens) == [3, 4, 5]
    drafting = _open([1, 2, 3, 4])
    assert max(drafting.matches(0.0)) < 0.1
    assert drafting.propose(_flight(5), PLAN, None) is None


def test_trees_keep_to_their_plan_and_are_sorted():
    text = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 3, 7, 1, 2, 6, 1]
    for width, length, nodes in ((1, 3, 9), (2, 4, 5), (4, 16, 16), (3, 2, 3)):
        plan = DraftPlan(DraftShape(width, length), nodes)
        tree = _open(text).propose(_flight(2), plan, None)
        assert tree.size <= nodes
        assert tree.max_depth < length
        parents = to_ints(tree.parents)[1:]
        assert max(parents.count(parent) for parent in parents) <= plan.shape.level_nodes
        siblings = list(zip(parents, to_ints(tree.tokens)[1:], strict=True))
        assert len(set(siblings)) == len(siblings)
        scores, depths, *_ = tree.read()
        assert scores == sorted(scores, reverse=True)
        assert min(map(exp, scores)) >= LEAST_PROBABILITY * 0.999
        assert depths == to_ints(tree.depths)[1:]


def test_the_matches_are_of_the_drafts_after_the_token_in_flight():
    drafting = _open([*range(1, 30), *range(1, 20)])
    matches = list(drafting.matches(0.0))
    assert _propose(drafting, 20)
    likely = [one for one in matches if one >= 0.05]
    assert 8 < len(likely) < 16, "the drafts of a copy, less the first"
    assert matches == sorted(matches, reverse=True)
    assert 0.3 < matches[0] < 1


def test_drafts_that_cannot_pay_are_not_looked_for():
    text = [*range(1, 30), *range(1, 20)]
    every, likely = (_open(text).matches(least) for least in (0.0, 0.5))
    found = [one for one in likely if one > 0.01]
    assert found == [one for one in every if one >= 0.5]
    assert 0 < len(found) < sum(one > 0.01 for one in every)
    drafting = _open(text)
    assert drafting.matches(inf) == []
    assert drafting.num_best == 0, "nor are candidates found on the device"
    drafting.matches(0.0)
    assert drafting.num_best == NUM_BEST


def test_the_matches_know_what_drafts_unforeseen_tokens_have():
    """Each new word is one that nothing foresees, and one that the prompt goes on from."""
    drafting = _open(list(range(1, 200)))
    before = sum(drafting.matches(0.0))
    for word in range(3, 190, 9):
        drafting.propose(_flight(word), PLAN, None)
        drafting.propose(_flight(word + 1, word + 2), PLAN, None)
        after = sum(drafting.matches(0.0))
    assert before < 0.01
    assert after > 0.3


def test_chances_are_learnt_from_tokens_that_were_not_drafted():
    lookup = Lookup()
    drafting = _open([*range(1, 40), *range(1, 4)], lookup)
    before = list(lookup.chances.rates)
    for token in range(4, 30):
        drafting.matches(0.0)
        drafting.skip(_flight(token))
    drafting.matches(0.0)  # which reads the tokens
    changed = [a - b for a, b in zip(lookup.chances.rates, before, strict=True) if a != b]
    assert changed
    assert min(changed) > 0
    lookup = Lookup()
    _open([1, 2, 3, 4] * 50, lookup).matches(0.0)
    assert lookup.chances.rates == Chances().rates, "the prompt teaches none"


def test_chances_forget():
    chances = Chances()
    children: list[Child] = [(0.5, 7, 3), (0.2, 8, 4)]
    for token in [7] * 500 + [9] * 500:
        chances.learn(children, token)
    assert chances.rates[3] < 0.01
    assert chances.rates[4] < 0.01
    for _ in range(60_000):
        chances.learn([(0.5, 7, 3)], 8)
    assert chances.rates[3] > 0


def test_what_the_target_found_probable_is_proposed_after_the_same_tokens():
    drafting = _open([1, 2])
    drafting.skip(_flight(3, rows=[[3, 30, 31]]))
    drafting.skip(_flight(9, rows=[[9, 40]]))
    tree = _propose(drafting, 2, rows=[[50]])
    children = [path[0] for path in _paths(tree) if len(path) == 1]
    assert children[:2] == [3, 30], "after 2, at which 3 was the best one"
    assert [3, 9] in _paths(tree)
    assert [3, 40] in _paths(tree)


def test_a_second_turn_drafts_from_the_first_and_other_conversations_do_not():
    conversation = Lookup().after(Contexts())
    first = _open([1, 2], conversation)
    first.skip(_flight(3, rows=[[3, 30, 31]]))
    first.skip(_flight(4, rows=[[4]]))
    first.trim_to(4)  # reads the newest pass
    tree = _propose(_open([8, 9], conversation), 2)
    assert [path[0] for path in _paths(tree) if len(path) == 1][:2] == [3, 30]
    assert [3, 4] in _paths(tree)
    assert _open([8, 9], conversation.after([])).contexts.tokens[:2].tolist() == [1, 2]
    assert _open([8, 9], Lookup().after(Contexts())).propose(_flight(2), PLAN, None) is None


def test_nodes_that_were_not_accepted_teach_candidates():
    drafting = _open([1, 2])
    drafts = Drafts([-0.5, -1.0, -1.5], [1, 1, 2], [0, 0, 2], [20, 21, 22])
    flight = _flight(5, rows=[[5], [60], [61], [62]], drafts=drafts)
    tree = drafting.propose(flight, PLAN, None)
    assert tree is None
    for token in (21, 22):
        assert to_ints(_propose(drafting, token, rows=[[7]]).tokens)[1] == 40 + token
    drafting, flight.is_finite = _open([1, 2]), False  # logits that are NaN teach nothing
    drafting.propose(flight, PLAN, None)
    tree = drafting.propose(_flight(21, rows=[[7]]), PLAN, None)
    assert tree is None or 61 not in to_ints(tree.tokens)


def test_with_noise_the_first_draft_is_what_the_target_would_draw():
    """If what it found probable is what it finds probable now."""
    temp = 0.7
    row = [3, 4, 5, 6, 7, 8, 9, 10]
    log_probs = mx.array([-0.1, *[-3.0 - rank for rank in range(NUM_BEST - 1)]])
    params = SamplingParams(temp=temp, seed=1)
    shown = set()
    for position in range(20):
        values = gumbel_noise(1, mx.arange(position, position + 8), 300)
        drafting = _open([1, 2])
        drafting.skip(_flight(50, rows=[row]))
        tree = _propose(drafting, 2, rows=[row], noise=GumbelNoise(params, values))
        drawn = mx.argmax(log_probs / temp + values[0, mx.array(row)], axis=-1)
        first = next(token for token in to_ints(tree.tokens) if token in row)
        assert first == row[to_ints(drawn.reshape(1))[0]]
        shown.add(first)
    assert len(shown) > 1
    drafting = _open([1, 2], couple=False)
    drafting.skip(_flight(50, rows=[row]))
    tree = _propose(drafting, 2, rows=[row], noise=GumbelNoise(params, values))
    assert to_ints(tree.tokens)[1] == 3, "the most probable one without coupling"


def test_filters_leave_out_candidates_that_cannot_be_drawn():
    row = [3, 4, 5, 6, 7, 8, 9, 10]
    values = mx.zeros((8, 300)) + 50 * (mx.arange(300) == 10)
    for filters in ({"top_k": 2}, {"min_p": 0.05}, {"top_p": 0.92}):
        params = SamplingParams(temp=1.0, seed=1, **filters)  # type: ignore[arg-type]
        drafting = _open([1, 2])
        drafting.skip(_flight(9, rows=[row]))
        tree = _propose(drafting, 2, rows=[row], noise=GumbelNoise(params, values))
        assert 10 not in to_ints(tree.tokens), filters


def _network() -> tuple[Any, list[tuple[str, list[int]]]]:
    seen: list[tuple[str, list[int]]] = []
    propose = lambda flight, *_: seen.append(("propose", flight.tokens))  # noqa: E731
    skip = lambda flight: seen.append(("skip", flight.tokens))  # noqa: E731
    return SimpleNamespace(reader=None, propose=propose, skip=skip), seen


def test_in_front_of_a_network_the_lookup_sees_every_token():
    network, seen = _network()
    drafting = _open([1, 2, 3, 4, 5, 1])
    drafting.network = network
    assert drafting.propose(_flight(2), PLAN, None) is None
    drafting.skip(_flight(3))
    from_text = DraftPlan(PLAN.shape, PLAN.num_nodes, from_text=True)
    tree: Any = drafting.propose(_flight(4), from_text, None)
    assert to_ints(tree.tokens)[:2] == [4, 5]
    assert seen == [("propose", [2]), ("skip", [3]), ("skip", [4])]
    assert drafting.contexts.end.matches[0] == (4, 4)  # after 1, 2, 3, 4


@pytest.mark.parametrize("couple", [True, False])
def test_drafts_beside_a_networks_are_as_deep_as_the_noise(couple):
    network: Any = SimpleNamespace(propose=lambda *_: TokenTree.of([20, 9], [0, 0], [-1.0]))
    plan = DraftPlan(DraftShape(2, 4), 9)
    params = SamplingParams(temp=1.0, seed=1)
    for noise in (None, GumbelNoise(params, mx.zeros((4, 300)))):
        drafting = _open([*range(1, 30), *range(1, 20)], couple=couple)
        drafting.network, drafting.may_merge = network, True
        tree = drafting.propose(_flight(20), plan, noise)
        others = tree.find_others()
        assert others.tokens[:3] == [21, 22, 23]
        assert max(others.depths) == 3 if noise else max(others.depths) > 3


def test_drafts_with_and_without_a_network_do_not_share_its_passes():
    network, seen = _network()
    one, other = _open([1, 2, 3, 4, 5, 1]), _open([1, 2, 3, 4, 5, 1])
    one.network = network
    for drafts in ([one, other], [other, one]):
        found: list[Any] = propose_all([(one, _flight(2)) for one in drafts], PLAN, [None] * 2)
        assert [tree is None for tree in found] == [drafting is one for drafting in drafts]
    assert seen == [("propose", [2])] * 2


@pytest.mark.parametrize("is_finite", [False, True])
def test_only_errors_of_its_pass_leave_a_sequence_without_drafts(is_finite):
    drafting, flight = MagicMock(), MagicMock(is_finite=is_finite)
    drafting.propose.side_effect = ConfigError("a fault of its own")
    with pytest.raises(ConfigError) if is_finite else nullcontext():
        assert propose_all([(drafting, flight)], PLAN, [None]) == [None]


@pytest.mark.parametrize("log_prob", [0.0, 1e-6, -1e9, -float("inf"), float("nan")])
def test_any_number_in_place_of_a_log_probability_is_taken(log_prob):
    """Masks leave infinities, and nodes off the path may have NaN."""
    for noise in (None, GumbelNoise(SamplingParams(temp=0.5, seed=1), mx.zeros((8, 300)))):
        drafting = _open([1, 2])
        flight = _flight(9, rows=[[7]])
        flight.best[NUM_BEST:] = unpack(f"{NUM_BEST}i", pack("8f", *[log_prob] * NUM_BEST))
        drafting.skip(flight)
        assert drafting.propose(_flight(2), PLAN, noise) is not None


def test_contexts_of_another_model_are_refused():
    target: Any = SimpleNamespace(vocab_size=200)
    contexts = Contexts()
    lookup = Lookup().after(contexts)
    lookup.check_fit(target, None)
    _open([1, 2], lookup)
    for other in (lookup, Lookup().after(Contexts([1, 250]))):
        with pytest.raises(ConfigError, match=r"^history .*must be .* got "):
            other.check_fit(target, None)
    Lookup().after(Contexts([1, 199])).check_fit(target, None)
    target.vocab_size = 300
    lookup.check_fit(target, None)


def _row(first: int) -> bytes:
    tokens = range(first, first + NUM_BEST)
    return pack(f"{NUM_BEST}i{NUM_BEST}f", *tokens, *[-0.5 * i for i in range(NUM_BEST)])


def _table_of(tokens: Iterable[int]) -> Contexts:
    table = Contexts()
    for token in tokens:
        table.add(token)
    return table


def _length_before(text: Sequence[int], position: int, end: int) -> int:
    """Number of tokens before a position that are those before the end, too."""
    length = 0
    while length < position and text[position - 1 - length] == text[end - 1 - length]:
        length += 1
    return length


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60))
def test_matches_are_occurrences_of_the_newest_tokens(text):
    table = _table_of(text)
    end = len(text)
    lengths = {p: _length_before(text, p, end) for p in range(1, end)}
    longest = max([0, *lengths.values()])
    matches = table.end.matches
    assert len(matches) <= contexts.OCCURRENCES
    assert bool(matches) == (longest > 0)
    for position, length in matches:
        assert 0 < length <= lengths[position]
        assert length == lengths[position] or length >= min(longest, LONGEST)
    for order in range(LONGEST, 0, -1):
        found = [p for p in range(order, end) if text[p - order : p] == text[end - order :]]
        if found and end > LONGEST:
            newest = dict(table.end.matches)
            assert found[-1] in newest or len(newest) == contexts.OCCURRENCES
            break


def test_a_copy_is_followed_for_as_long_as_it_lasts():
    table = _table_of([*range(40), 77, *range(5, 30)])
    place = table.end
    for token in range(30, 39):
        assert place.matches[0] == (token, token - 5)
        place = table.after(place, token)
    assert table.after(place, 5).matches[0][1] == 1


def test_candidates_are_those_of_the_longest_context():
    table = _table_of([1, 2, 3, 4])
    assert table.candidates(table.end.key) == ((), ())
    key = 0
    for token in (9, 8, 4):
        key = following(key, token)
    table.teach(key, _row(100))
    assert table.candidates(table.end.key)[0][:2] == (100, 101), "after 4"
    table.add(5, _row(200))
    for token in (2, 3, 4):
        table.add(token)
    tokens, log_probs = table.candidates(table.end.key)
    assert (tokens[0], log_probs[:2]) == (200, (0.0, -0.5)), "after 2, 3, 4"
    assert table.end.matches[0] == (4, 3)


def test_the_table_is_bounded_and_forgets_the_oldest():
    with patch.object(contexts, "MAX_CONTEXTS", 300):
        table = Contexts()
        for token in range(5000):
            table.add(token, _row(token))
            assert len(table._new) + len(table._old) <= 600
        key = 0
        for token in (4997, 4998):
            key = following(key, token)
        assert table.candidates(key)[0][0] == 4999
        for token in (7, 8):
            key = following(key, token)
        assert table.candidates(key) == ((), ())


VOCAB_SIZE = 64
MODEL = tiny_llama(seed=3)
PROMPT = [5, 17, 3, 60, 9]
SEARCH = DraftPlan.of(2, 5, 9)


def _open_model(prompt: Sequence[int], cached: Sequence[Any] = ()) -> Any:
    return DraftModel(MODEL, None).open(Target(MODEL), prompt, True, cached)


@given(seed=st.integers(0, 10**6), steps=st.integers(1, 7))
@settings(max_examples=25)
def test_scores_are_those_of_the_whole_text_whatever_the_steps_before(seed, steps):
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 9))]
    text, drafting, tree = list(prompt), _open_model(prompt), None
    for _ in range(steps):
        length = len(text) - 1  # committed before the root of the pass
        # What the pass verified: these drafts, or those of another proposer after a skip.
        drafts = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(5)))
        if tree is not None:
            drafts = rng.choice(paths_of(to_ints(tree.tokens), to_ints(tree.parents)))[1:]
        path = [text[-1], *drafts]
        num_accepted, bonus = rng.randrange(len(path)), rng.randrange(VOCAB_SIZE)
        flight = flight_of(path, num_accepted, bonus, length)
        text += flight.tokens
        if rng.random() < 0.4:
            drafting.skip(flight)
            tree = None
        else:
            shape = DraftShape(rng.choice((1, 3)), rng.choice((2, 4)))
            plan = DraftPlan(shape, min(rng.choice((2, 4, 12)), shape.max_nodes))
            with patch.object(draft_model, "READ_STEP_SIZE", 3):  # texts are read in chunks
                tree = drafting.propose(flight, plan, None)
            assert_scores(MODEL, text, tree, 2e-4)


def test_a_shared_cache_holds_the_text_in_the_end():
    cached = make_prompt_cache(MODEL)
    drafting = _open_model(PROMPT, cached)
    drafting.propose(flight_of([PROMPT[-1]], 0, 30, len(PROMPT) - 1), SEARCH, None)
    assert all(layer.is_plain for layer in drafting.cache.layers), "attention has two parts"
    flight = flight_of([30, 31, 32], 2, 33, len(PROMPT))
    drafting.propose(flight, SEARCH, None)
    drafting.skip(flight_of([33], 0, 34, len(PROMPT) + 3))
    for length in (len(PROMPT) + 5, len(PROMPT) + 4, len(PROMPT) + 2):
        drafting.trim_to(length)
        text = [*PROMPT, 30, 31, 32, 33, 34][:length]
        assert_same_rows(cached, prefilled(MODEL, text))


def test_equal_ids_fit_whatever_the_size_of_the_head():
    small, large = tiny_llama(vocab_size=64), tiny_llama(vocab_size=80)
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    for model, target in ((small, large), (large, small)):
        proposer = DraftModel(model, wrapped_tokenizer(VOCAB_SIZE))
        proposer.check_fit(Target(target), tokenizer)
        drafting: Any = proposer.open(Target(target), PROMPT, True, [])
        tree = drafting.propose(flight_of([PROMPT[-1]], 0, 3, len(PROMPT) - 1), SEARCH, None)
        assert max(to_ints(tree.tokens)) < 64


def test_other_ids_are_refused_with_the_first_difference():
    vocab: dict[str, int] = wrapped_tokenizer(VOCAB_SIZE).get_vocab()
    exchanged = {**vocab, "A": vocab["B"], "B": vocab["A"]}
    shifted: Any = SimpleNamespace(get_vocab=lambda: exchanged)
    proposer = DraftModel(MODEL, shifted)
    first, target = ord("A") - 31, Target(MODEL)
    with pytest.raises(CheckpointError, match=f"id {first} is 'B' for the draft model and 'A' for"):
        proposer.check_fit(target, wrapped_tokenizer(VOCAB_SIZE))
    message = "tokenizer must be the draft model's tokenizer, got None"
    with pytest.raises(ConfigError, match=message):
        DraftModel(MODEL, None).check_fit(target, wrapped_tokenizer(VOCAB_SIZE))


def test_texts_that_no_lookup_pays_for_are_indexed_when_one_may():
    lookup, text = Lookup(), [*range(1, 60), *range(1, 20)]
    drafting, other = _open(text[:70], lookup), _open(text[:70], Lookup())
    drafting.matches(inf)
    assert not drafting.contexts.tokens
    for token in text[70:]:
        for one, least in ((drafting, inf), (other, 0.0)):
            one.skip(_flight(token))
            one.matches(least)
    assert not drafting.contexts.tokens
    assert drafting.matches(0.0)
    assert list(drafting.contexts.tokens) == list(other.contexts.tokens) == text
    assert drafting.contexts.end == other.contexts.end


@pytest.mark.parametrize("size", [FOLLOWED - 1, FOLLOWED, FOLLOWED + 1, 5 * FOLLOWED])
def test_a_text_that_is_indexed_at_once_is_like_one_that_came_token_by_token(size):
    rng = random.Random(size)
    text = [rng.randrange(1, 9) for _ in range(size)] + list(range(1, 9)) * 2
    at_once, one_by_one = Contexts(text), _table_of(text)
    at_once.index()
    assert at_once.tokens == one_by_one.tokens
    assert at_once.end.key == one_by_one.end.key
    assert at_once.end.matches[0][0] == one_by_one.end.matches[0][0]
