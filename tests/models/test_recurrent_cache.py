"""Where the cache of a layer with a state can go back to.

The layer of these tests adds up the numbers of tokens, so its state tells which were processed.
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from mlx_redrafter.target.caches.recurrent import RecurrentCache
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.caches.tree_pass import Paths, State
from mlx_redrafter.trees.tree import TokenTree


class Sums:
    """A text of a layer whose state is the sum of all tokens."""

    def __init__(self) -> None:
        self.layer = RecurrentCache(ArraysCache(1))
        self.cache = TreeCache([self.layer], 0)

    @property
    def sum(self) -> int:
        found = self.layer[0]
        return 0 if found is None else int(found.item())

    def advance(self, *tokens: int) -> None:
        """Process tokens."""
        self.cache.expect(None)
        self.layer[0] = mx.array([self.sum + sum(tokens)])
        self.cache.length += len(tokens)

    def verify(self, *tokens: int) -> None:
        """Process a chain of drafts."""
        parents = [max(node - 1, 0) for node in range(len(tokens))]
        self.cache.expect(TokenTree.of(tokens, parents))
        before = self.sum

        def state_after(paths: Paths) -> State:
            return [mx.array([before + sum(tokens[node] for node in paths.paths[0])])]

        self.layer[0] = mx.array([-1])  # models write, whatever they compute
        self.layer.branch(state_after)

    def trimmed(self, length: int) -> int:
        """The sum of the first tokens, with which the text ends."""
        self.cache.trim_to(length)
        assert self.layer.trees is None
        assert self.cache.stock == [self.layer.stock]
        return self.sum


def text() -> Sums:
    """A text of the tokens 1, 2, 4: a chunk of two and one."""
    found = Sums()
    found.advance(1, 2)
    found.advance(4)
    return found


@pytest.mark.parametrize(("length", "expected"), [(3, 7), (2, 3)])
def test_a_plain_step_back(length: int, expected: int) -> None:
    assert text().trimmed(length) == expected


def test_a_tree_in_flight_leaves_its_root() -> None:
    for length, expected in ((4, 15), (3, 7)):
        found = text()
        found.verify(8, 16, 32)
        assert found.sum == 7
        assert found.trimmed(length) == expected


@pytest.mark.parametrize(("length", "expected"), [(6, 63), (5, 31), (4, 15), (3, 7)])
@pytest.mark.parametrize("after", ["nothing", "token", "tree"])
def test_anywhere_in_the_newest_path(after: str, length: int, expected: int) -> None:
    found = text()
    found.verify(8, 16, 32, 0)
    found.cache.commit([0, 1, 2])
    assert found.cache.length == 6
    if after == "token":
        found.advance(64)
    if after == "tree":
        found.verify(64, 128)
    if after != "nothing":  # the state after the path is the one before the next pass
        assert found.cache.history.visits[0][-1].step.records[0].before[0].item() == 63
    assert found.trimmed(length) == expected


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_token_and_a_root_after_a_path(is_tree: bool) -> None:
    found = text()
    found.verify(8, 16)
    found.cache.commit([0])
    (found.verify if is_tree else found.advance)(64)
    assert found.trimmed(5) == 79


@pytest.mark.parametrize(("length", "expected"), [(6, 207), (5, 79)])
def test_two_tokens_after_a_path(length: int, expected: int) -> None:
    found = text()
    found.verify(8, 16)
    found.cache.commit([0])
    found.advance(64)
    found.advance(128)
    assert found.trimmed(length) == expected


def test_an_interruption_before_the_layer_or_after_it() -> None:
    for is_after in (False, True):
        found = text()
        found.verify(8, 16)
        found.cache.commit([0, 1])
        found.cache.expect(None)
        if is_after:
            found.layer[0] = mx.array([999])
        assert found.trimmed(4) == 15


def test_the_beginning_of_a_text() -> None:
    found = Sums()
    found.advance(5, 6)
    assert found.trimmed(0) == 0
    assert found.layer.stock.empty()
