"""The suffix automaton against a search through the whole text."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_redrafter.proposers.lookup.suffix_index import MOST_COUNTED, SuffixIndex
from mlx_redrafter.trees.tree import NO_TOKEN


def _longest_match(text: Sequence[int]) -> int:
    """Length of the longest suffix that also ends earlier."""
    for length in range(len(text) - 1, 0, -1):
        suffix = list(text[-length:])
        if any(list(text[i : i + length]) == suffix for i in range(len(text) - length)):
            return length
    return 0


def _followers(text: Sequence[int], length: int) -> Counter[int]:
    """Tokens after the earlier occurrences of the last ``length`` tokens."""
    suffix = list(text[-length:])
    ends = (i + length for i in range(len(text) - length) if list(text[i : i + length]) == suffix)
    return Counter(text[end] for end in ends)


def _index_of(tokens: Iterable[int]) -> SuffixIndex:
    index = SuffixIndex()
    for token in tokens:
        index.add(token)
    return index


@given(st.lists(st.integers(0, 3), max_size=MOST_COUNTED))
def test_match_and_counts_are_those_of_a_search(text: list[int]) -> None:
    index = SuffixIndex()
    for end, token in enumerate(text, start=1):
        index.add(token)
        assert index.match.length == _longest_match(text[:end])
    if index.match.length:
        followers = _followers(text, index.match.length)
        found = index.continuations(index.match, 4)
        assert {one.token: one.share for one in found} == {
            token: pytest.approx(count / followers.total()) for token, count in followers.items()
        }
        shares = [one.share for one in found]
        assert shares == sorted(shares, reverse=True)


@given(st.integers(0, 10**6))
def test_long_texts_match_as_a_search_does(seed: int) -> None:
    rng = random.Random(seed)
    phrases = [[rng.randrange(9) for _ in range(rng.randrange(1, 12))] for _ in range(4)]
    text = [token for _ in range(20) for token in rng.choice(phrases)]
    index = _index_of(text)
    assert index.match.length == _longest_match(text)
    following = index.continuations(index.match, 9)
    assert {one.token for one in following} == set(_followers(text, index.match.length))


def test_a_match_is_followed_along_its_earlier_occurrence() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    index, drafts = _index_of(text), []
    match = index.match
    for _ in range(6):
        (best,) = index.continuations(match, 1)
        drafts.append(best.token)
        match = best.match
    assert drafts == [4, 5, 6, 7, 8, 1]
    assert match.length == 3 + 6


def test_a_period_is_continued_past_the_end_of_the_text() -> None:
    index = _index_of([5, 6] * 10)
    match, drafts = index.match, []
    for _ in range(7):
        (best,) = index.continuations(match, 1)
        drafts.append(best.token)
        match = best.match
    assert drafts == [5, 6, 5, 6, 5, 6, 5]


def test_of_equally_frequent_tokens_the_newest_comes_first() -> None:
    index = _index_of([1, 2, 7, 1, 2, 8, 1, 2])
    assert [one.token for one in index.continuations(index.match, 4)] == [8, 7]


def test_boundaries_between_texts_are_never_proposed() -> None:
    index = _index_of([1, 2, 3, NO_TOKEN, 1, 2, 3])
    assert index.match.length == 3
    assert index.continuations(index.match, 4) == []


def test_the_time_of_a_token_does_not_grow_with_the_text() -> None:
    index = _index_of([3] * 20_000)  # would take minutes if every count were kept
    assert index.match.length == 19_999
