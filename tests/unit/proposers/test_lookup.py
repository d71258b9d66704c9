"""Lookup: its trees, what it foresees, and what it learns."""

from __future__ import annotations

from math import exp
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.proposers.lookup import Lookup
from mlx_redrafter.proposers.lookup.lookup import (
    LEAST_PROBABILITY,
    LENGTHS,
    PRIORS,
    LookupDrafting,
    MatchRates,
)
from mlx_redrafter.proposers.lookup.lookup_first import LookupFirstDrafting

PLAN = DraftPlan(DraftShape(4, 16), 16)


def _open(prompt: list[int], lookup: Lookup | None = None) -> LookupDrafting:
    nothing: Any = None
    return (lookup or Lookup()).open(nothing, prompt, True, [])


def _flight(*tokens: int) -> Any:
    return SimpleNamespace(tokens=list(tokens))


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
    assert drafting.outlook() == []
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
        assert max(parents.count(parent) for parent in parents) <= width
        siblings = list(zip(parents, to_ints(tree.tokens)[1:], strict=True))
        assert len(set(siblings)) == len(siblings)
        scores, depths, *_ = tree.read()
        assert scores == sorted(scores, reverse=True)
        assert min(map(exp, scores)) >= LEAST_PROBABILITY * 0.999
        assert depths == to_ints(tree.depths)[1:]


def test_the_outlook_is_of_the_drafts_after_the_token_in_flight() -> None:
    drafting = _open([*range(1, 30), *range(1, 20)])
    outlook = list(drafting.outlook())
    tree = drafting.propose(_flight(20), PLAN, None)
    assert tree is not None
    assert 8 < len(outlook) < 16, "the drafts of a copy, less the first"
    assert outlook == sorted(outlook, reverse=True)
    assert 0.3 < outlook[0] < 1


def test_frequencies_are_learnt_from_tokens_that_were_not_drafted() -> None:
    lookup = Lookup()
    drafting = _open([*range(1, 40), *range(1, 4)], lookup)
    before = lookup.rates.rate(8)
    for token in range(4, 30):
        drafting.skip(_flight(token))
    drafting.outlook()  # which reads the tokens
    assert lookup.rates.rate(8) > before
    for token in (7, 7, 9, 12, 1, 2, 3, 4, 30, 1, 2, 3, 4, 31, 1, 2, 3, 4, 32):
        drafting.skip(_flight(token))
    drafting.outlook()
    assert lookup.rates.rate(4) < PRIORS[LENGTHS.index(4)]


def test_the_prompt_teaches_no_frequencies() -> None:
    lookup = Lookup()
    _open([1, 2, 3, 4] * 50, lookup).outlook()
    assert [lookup.rates.rate(length) for length in LENGTHS] == list(PRIORS)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(0, 3)))
def test_tokens_that_wait_to_be_indexed_are_not_missed(prompt: list[int], more: list[int]) -> None:
    lookup = Lookup()
    drafting = _open(prompt, lookup)
    for count, token in enumerate(more, start=1):
        drafting.skip(_flight(token))
        anew = LookupDrafting([*prompt, *more[:count]], lookup.rates)
        assert drafting.outlook() == anew.outlook()


def test_rates_forget() -> None:
    rates = MatchRates()
    for was_right in [True] * 500 + [False] * 500:
        rates.learn(5, was_right)
    assert rates.rate(5) < 0.01


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
    drafting = LookupFirstDrafting(_open([1, 2, 3, 4, 5, 1]), network)
    assert drafting.propose(_flight(2), PLAN, None) is None
    drafting.skip(_flight(3))
    from_text = DraftPlan(PLAN.shape, PLAN.num_nodes, from_text=True)
    tree = drafting.propose(_flight(4), from_text, None)
    assert tree is not None
    assert to_ints(tree.tokens)[:2] == [4, 5]
    assert network.seen == [("propose", [2]), ("skip", [3]), ("skip", [4])]
    assert drafting.lookup.index.match.length == 4  # 1, 2, 3, 4
    assert drafting.outlook() == pytest.approx(drafting.lookup.outlook())
