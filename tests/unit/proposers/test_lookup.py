"""Lookup: its trees, what it foresees, and what it learns."""

from __future__ import annotations

from math import exp, inf
from struct import pack, unpack
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter.decoding.sampling import GumbelNoise, gumbel_noise
from mlx_redrafter.decoding.step import propose_all
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.proposers.lookup import Lookup
from mlx_redrafter.proposers.lookup.chances import Chances, Child
from mlx_redrafter.proposers.lookup.contexts import NUM_BEST, Contexts
from mlx_redrafter.proposers.lookup.draft_tree import LEAST_PROBABILITY
from mlx_redrafter.proposers.lookup.lookup import LookupDrafting
from mlx_redrafter.trees.tree import Drafts

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
    nodes = range(len(tokens))
    return SimpleNamespace(
        tokens=list(tokens),
        rows=list(nodes),
        outcome=SimpleNamespace(best=best),
        known=drafts,
        is_finite=True,
    )


def _paths(tree: Any) -> list[list[int]]:
    tokens, parents = to_ints(tree.tokens), to_ints(tree.parents)
    paths: list[list[int]] = [[]]
    for node in range(1, len(tokens)):
        paths.append([*paths[parents[node]], tokens[node]])
    return paths[1:]


def test_what_followed_is_proposed_after_the_newest_token() -> None:
    drafting = _open([1, 2, 3, 4, 5, 6, 9, 1, 2])
    tree = drafting.propose(_flight(3), PLAN, None)
    assert tree is not None
    assert to_ints(tree.tokens)[0] == 3
    chain = [4, 5, 6, 9, 1, 2, 3]
    assert _paths(tree)[:4] == [chain[:n] for n in range(1, 5)]


def test_nothing_is_proposed_where_nothing_repeats() -> None:
    drafting = _open([1, 2, 3, 4])
    assert max(drafting.matches(0.0)) < 0.1
    assert drafting.propose(_flight(5), PLAN, None) is None


def test_trees_keep_to_their_plan_and_are_sorted() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 3, 7, 1, 2, 6, 1]
    for width, length, nodes in ((1, 3, 9), (2, 4, 5), (4, 16, 16), (3, 2, 3)):
        plan = DraftPlan(DraftShape(width, length), nodes)
        tree = _open(text).propose(_flight(2), plan, None)
        assert tree is not None
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


def test_the_matches_are_of_the_drafts_after_the_token_in_flight() -> None:
    drafting = _open([*range(1, 30), *range(1, 20)])
    matches = list(drafting.matches(0.0))
    tree = drafting.propose(_flight(20), PLAN, None)
    assert tree is not None
    likely = [one for one in matches if one >= 0.05]
    assert 8 < len(likely) < 16, "the drafts of a copy, less the first"
    assert matches == sorted(matches, reverse=True)
    assert 0.3 < matches[0] < 1


def test_drafts_that_cannot_pay_are_not_looked_for() -> None:
    text = [*range(1, 30), *range(1, 20)]
    every, likely = (_open(text).matches(least) for least in (0.0, 0.5))
    found = [one for one in likely if one > 0.01]
    assert found == [one for one in every if one >= 0.5]
    assert 0 < len(found) < sum(one > 0.01 for one in every)
    assert _open(text).matches(inf) == []


def test_the_matches_know_what_drafts_unforeseen_tokens_have() -> None:
    """Each new word is one that nothing foresees, and one that the prompt goes on from."""
    drafting = _open(list(range(1, 200)))
    before = sum(drafting.matches(0.0))
    for word in range(3, 190, 9):
        drafting.propose(_flight(word), PLAN, None)
        drafting.propose(_flight(word + 1, word + 2), PLAN, None)
        after = sum(drafting.matches(0.0))
    assert before < 0.01
    assert after > 0.3


def test_chances_are_learnt_from_tokens_that_were_not_drafted() -> None:
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


def test_the_prompt_teaches_no_chances() -> None:
    lookup = Lookup()
    _open([1, 2, 3, 4] * 50, lookup).matches(0.0)
    assert lookup.chances.rates == Chances().rates


def test_chances_forget() -> None:
    chances = Chances()
    children: list[Child] = [(0.5, 7, 3), (0.2, 8, 4)]
    for token in [7] * 500 + [9] * 500:
        chances.learn(children, token)
    assert chances.rates[3] < 0.01
    assert chances.rates[4] < 0.01


def test_what_the_target_found_probable_is_proposed_after_the_same_tokens() -> None:
    drafting = _open([1, 2])
    drafting.skip(_flight(3, rows=[[3, 30, 31]]))
    drafting.skip(_flight(9, rows=[[9, 40]]))
    tree = drafting.propose(_flight(2, rows=[[50]]), PLAN, None)
    assert tree is not None
    children = [path[0] for path in _paths(tree) if len(path) == 1]
    assert children[:2] == [3, 30], "after 2, at which 3 was the best one"
    assert [3, 9] in _paths(tree)
    assert [3, 40] in _paths(tree)


def test_a_second_turn_drafts_from_the_first_and_other_conversations_do_not() -> None:
    conversation = Lookup().after(Contexts())
    first = _open([1, 2], conversation)
    first.skip(_flight(3, rows=[[3, 30, 31]]))
    first.skip(_flight(4, rows=[[4]]))
    first.trim_to(4)  # reads the newest pass
    tree = _open([8, 9], conversation).propose(_flight(2), PLAN, None)
    assert tree is not None
    assert [path[0] for path in _paths(tree) if len(path) == 1][:2] == [3, 30]
    assert [3, 4] in _paths(tree)
    assert _open([8, 9], conversation.after([])).contexts.tokens[:2].tolist() == [1, 2]
    assert _open([8, 9], Lookup().after(Contexts())).propose(_flight(2), PLAN, None) is None


def test_nodes_that_were_not_accepted_teach_candidates() -> None:
    drafting = _open([1, 2])
    drafts = Drafts([-0.5, -1.0, -1.5], [1, 1, 2], [0, 0, 2], [20, 21, 22])
    flight = _flight(5, rows=[[5], [60], [61], [62]], drafts=drafts)
    tree = drafting.propose(flight, PLAN, None)
    assert tree is None
    for token in (21, 22):
        tree = drafting.propose(_flight(token, rows=[[7]]), PLAN, None)
        assert tree is not None
        assert to_ints(tree.tokens)[1] == 40 + token


def test_a_pass_whose_logits_are_nan_teaches_no_candidates() -> None:
    drafting = _open([1, 2])
    drafts = Drafts([-0.5, -1.0, -1.5], [1, 1, 2], [0, 0, 2], [20, 21, 22])
    flight = _flight(5, rows=[[5], [60], [61], [62]], drafts=drafts)
    flight.is_finite = False
    drafting.propose(flight, PLAN, None)
    tree = drafting.propose(_flight(21, rows=[[7]]), PLAN, None)
    assert tree is None or 61 not in to_ints(tree.tokens)


@pytest.mark.parametrize("temp", [0.5, 1.0])
def test_with_noise_the_first_draft_is_what_the_target_would_draw(temp: float) -> None:
    """If what it found probable is what it finds probable now."""
    row = [3, 4, 5, 6, 7, 8, 9, 10]
    log_probs = mx.array([-0.1, *[-3.0 - rank for rank in range(NUM_BEST - 1)]])
    params = SamplingParams(temp=temp, seed=1)
    shown = set()
    for position in range(60):
        values = gumbel_noise(1, mx.arange(position, position + 8), 300)
        drafting = _open([1, 2])
        drafting.skip(_flight(50, rows=[row]))
        tree = drafting.propose(_flight(2, rows=[row]), PLAN, GumbelNoise(params, values))
        drawn = mx.argmax(log_probs / temp + values[0, mx.array(row)], axis=-1)
        assert tree is not None
        first = next(token for token in to_ints(tree.tokens) if token in row)
        assert first == row[to_ints(drawn.reshape(1))[0]]
        shown.add(first)
    assert len(shown) > 1
    drafting = _open([1, 2], couple=False)
    drafting.skip(_flight(50, rows=[row]))
    tree = drafting.propose(_flight(2, rows=[row]), PLAN, GumbelNoise(params, values))
    assert tree is not None
    assert to_ints(tree.tokens)[1] == 3, "the most probable one without coupling"


def test_filters_leave_out_candidates_that_cannot_be_drawn() -> None:
    row = [3, 4, 5, 6, 7, 8, 9, 10]
    values = mx.zeros((8, 300)) + 50 * (mx.arange(300) == 10)
    for filters in ({"top_k": 2}, {"min_p": 0.05}, {"top_p": 0.92}):
        params = SamplingParams(temp=1.0, seed=1, **filters)  # type: ignore[arg-type]
        drafting = _open([1, 2])
        drafting.skip(_flight(9, rows=[row]))
        tree = drafting.propose(_flight(2, rows=[row]), PLAN, GumbelNoise(params, values))
        assert tree is not None
        assert 10 not in to_ints(tree.tokens), filters


def test_earlier_texts_are_looked_up_too() -> None:
    assert _open([1, 2], Lookup()).propose(_flight(3), PLAN, None) is None
    tree = _open([1, 2], Lookup([[9, 1, 2, 3, 4, 5]])).propose(_flight(3), PLAN, None)
    assert tree is not None
    assert to_ints(tree.tokens) == [3, 4, 5]


class _Network:
    """Notes what it is asked."""

    reader = None

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[int]]] = []

    def propose(self, flight: Any, plan: DraftPlan, noise: Any) -> None:
        self.seen.append(("propose", flight.tokens))

    def skip(self, flight: Any) -> None:
        self.seen.append(("skip", flight.tokens))


def test_in_front_of_a_network_the_lookup_sees_every_token() -> None:
    network: Any = _Network()
    drafting = _open([1, 2, 3, 4, 5, 1])
    drafting.network = network
    assert drafting.propose(_flight(2), PLAN, None) is None
    drafting.skip(_flight(3))
    from_text = DraftPlan(PLAN.shape, PLAN.num_nodes, from_text=True)
    tree = drafting.propose(_flight(4), from_text, None)
    assert tree is not None
    assert to_ints(tree.tokens)[:2] == [4, 5]
    assert network.seen == [("propose", [2]), ("skip", [3]), ("skip", [4])]
    assert drafting.contexts.end.matches[0] == (4, 4)  # after 1, 2, 3, 4


def test_drafts_with_and_without_a_network_do_not_share_its_passes() -> None:
    network: Any = _Network()
    one, other = _open([1, 2, 3, 4, 5, 1]), _open([1, 2, 3, 4, 5, 1])
    one.network = network
    for drafts in ([one, other], [other, one]):
        found = propose_all(drafts, [_flight(2)] * 2, PLAN, [None] * 2)
        assert [tree is None for tree in found] == [drafting is one for drafting in drafts]
    assert network.seen == [("propose", [2])] * 2


def test_chances_stay_above_zero_however_they_come() -> None:
    chances = Chances()
    for _ in range(60_000):
        chances.learn([(0.5, 7, 3)], 8)
    assert chances.rates[3] > 0


@pytest.mark.parametrize("log_prob", [0.0, 1e-6, -1e9, -float("inf"), float("nan")])
def test_any_number_in_place_of_a_log_probability_is_taken(log_prob: float) -> None:
    """Masks leave infinities, and nodes off the path may have NaN."""
    for noise in (None, GumbelNoise(SamplingParams(temp=0.5, seed=1), mx.zeros((8, 300)))):
        drafting = _open([1, 2])
        flight = _flight(9, rows=[[7]])
        flight.outcome.best[NUM_BEST:] = unpack(f"{NUM_BEST}i", pack("8f", *[log_prob] * NUM_BEST))
        drafting.skip(flight)
        assert drafting.propose(_flight(2), PLAN, noise) is not None


def test_contexts_of_another_model_are_refused() -> None:
    target: Any = SimpleNamespace(vocab_size=200)
    contexts = Contexts()
    lookup = Lookup().after(contexts)
    lookup.check_fit(target, None)
    _open([1, 2], lookup)
    for given in (lookup, Lookup().after(Contexts([1, 250]))):
        with pytest.raises(ConfigError, match=r"^history .*must be .* got "):
            given.check_fit(target, None)
    Lookup().after(Contexts([1, 199])).check_fit(target, None)
    target.vocab_size = 300
    lookup.check_fit(target, None)
