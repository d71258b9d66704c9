"""The table of contexts against a search through the whole text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import pack
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from mlx_redrafter.proposers.lookup import contexts
from mlx_redrafter.proposers.lookup.contexts import (
    LONGEST,
    NUM_BEST,
    OCCURRENCES,
    Contexts,
    following,
)

TEXTS = st.lists(st.integers(0, 3), min_size=2, max_size=60)


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


@given(TEXTS)
def test_matches_are_occurrences_of_the_newest_tokens(text: list[int]) -> None:
    table = _table_of(text)
    end = len(text)
    lengths = {p: _length_before(text, p, end) for p in range(1, end)}
    longest = max([0, *lengths.values()])
    matches = table.end.matches
    assert len(matches) <= OCCURRENCES
    assert bool(matches) == (longest > 0)
    for position, length in matches:
        assert 0 < length <= lengths[position]
        assert length == lengths[position] or length >= min(longest, LONGEST)
    for order in range(LONGEST, 0, -1):
        found = [p for p in range(order, end) if text[p - order : p] == text[end - order :]]
        if found and end > LONGEST:
            newest = dict(table.end.matches)
            assert found[-1] in newest or len(newest) == OCCURRENCES
            break


def test_a_copy_is_followed_for_as_long_as_it_lasts() -> None:
    passage = list(range(40))
    table = _table_of([*passage, 77, *passage[5:30]])
    assert table.end.matches[0] == (30, 25)
    place = table.end
    for count, token in enumerate(passage[30:39], start=1):
        place = table.after(place, token)
        assert place.matches[0] == (30 + count, 25 + count)
    assert table.after(place, 5).matches[0][1] == 1


def test_candidates_are_those_of_the_longest_context() -> None:
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


def test_the_table_is_bounded_and_forgets_the_oldest() -> None:
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
