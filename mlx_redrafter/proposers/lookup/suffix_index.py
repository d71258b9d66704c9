"""A suffix automaton over a growing sequence, to look up what followed its newest tokens.

After every token, in amortised constant time, it has the longest suffix of the sequence that also
occurs earlier (Blumer et al., 1985), and the number of times that each token followed it.
SuffixDecoding (arXiv 2411.04975) drafts from such counts.
"""

from __future__ import annotations

from typing import NamedTuple

from mlx_redrafter.trees.tree import NO_TOKEN

# Maximum number of states whose counts a new token updates, the longest suffixes first. A sequence
# that repeats one token has a state per token, and drafts hardly come from the short ones.
MOST_COUNTED = 32


class Match(NamedTuple):
    """A suffix of the sequence, with or without drafts after it, that occurs earlier."""

    state: int
    length: int


class Continuation(NamedTuple):
    """A token that followed an earlier occurrence.

    Attributes:
        token: Token id.
        share: Share of the occurrences that it followed.
        match: The occurrence, longer by this token.
    """

    token: int
    share: float
    match: Match


class SuffixIndex:
    """The automaton of a sequence, one token at a time.

    Attributes:
        match: Longest suffix of the sequence that occurs earlier; of length 0 if there is none.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]  # state of the longest suffix that occurs elsewhere as well
        self._length = [0]  # length of the longest string of a state
        self._count = [0]  # occurrences
        self._end = [0]  # end of the newest occurrence
        self._last = 0
        self._size = 0
        self.match = Match(0, 0)

    def add(self, token: int) -> None:
        match = self._extend_match(token)
        self._size += 1
        new = self._add_state(self._length[self._last] + 1)
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state == -1:
            self._link[new] = 0
        else:
            below = self._next[state][token]
            if self._length[state] + 1 == self._length[below]:
                self._link[new] = below
            else:
                clone = self._split(below, state, token)
                self._link[new] = clone
                if match.state == below and match.length <= self._length[clone]:
                    match = Match(clone, match.length)
        self._last = new
        self.match = match
        self._count_occurrence(new)

    def continuations(self, match: Match, most: int) -> list[Continuation]:
        """Return tokens that followed a match earlier, the most frequent first, then the newest.

        A match at the end of the sequence has no continuation; then shorter suffixes replace it.
        """
        state, length = match
        if state and len(self._next[state]) == 1:  # most matches have one continuation
            ((token, below),) = self._next[state].items()
            if token != NO_TOKEN:
                return [Continuation(token, 1.0, Match(below, length + 1))]
        while True:
            following = [item for item in self._next[state].items() if item[0] != NO_TOKEN]
            if following or state == 0:
                break
            state = self._link[state]
            length = min(length, self._length[state])
        if state == 0:
            return []
        total = sum(self._count[below] for _, below in following)
        if len(following) > 1:
            following.sort(key=lambda item: (-self._count[item[1]], -self._end[item[1]]))
        return [
            Continuation(token, self._count[below] / total, Match(below, length + 1))
            for token, below in following[:most]
        ]

    def _extend_match(self, token: int) -> Match:
        """Return the longest suffix with this token that occurs in the sequence before it."""
        state, length = self.match
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        below = self._next[state].get(token)
        return Match(0, 0) if below is None else Match(below, length + 1)

    def _add_state(self, length: int) -> int:
        self._next.append({})
        self._link.append(0)
        self._length.append(length)
        self._count.append(0)
        self._end.append(self._size)
        return len(self._next) - 1

    def _split(self, below: int, state: int, token: int) -> int:
        """Give the strings of a state that now also occur elsewhere a state of their own."""
        clone = self._add_state(self._length[state] + 1)
        self._next[clone] = dict(self._next[below])
        self._link[clone] = self._link[below]
        self._count[clone] = self._count[below]
        self._end[clone] = self._end[below]
        while state != -1 and self._next[state].get(token) == below:
            self._next[state][token] = clone
            state = self._link[state]
        self._link[below] = clone
        return clone

    def _count_occurrence(self, state: int) -> None:
        for _ in range(MOST_COUNTED):
            if state <= 0:
                return
            self._count[state] += 1
            self._end[state] = self._size
            state = self._link[state]
