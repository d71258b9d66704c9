"""Recurrences along the branches of a tree where numbers are extreme.

The tests in `tests/models` compare others with token-by-token decoding.
"""

from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_redrafter.target.ancestor_matrix import BranchStates, follow_delta_rule, follow_updates
from mlx_redrafter.target.caches.tree_pass import Paths
from mlx_redrafter.trees.tree import TokenTree, TreeBatch
from tests.helpers.oracles import node_paths

Array = NDArray[np.float64]

HEADS, KEY, VALUE = 2, 8, 4
PARENTS = [0, 0, 0, 1, 1, 2, 3, 3, 6, 8, 5]
# Most of it from logarithms of products of many small gates.
TOLERANCE = 1e-4


class Inputs(NamedTuple):
    """Random inputs: a state, and numbers for each head and node."""

    state: Array
    keys: Array
    queries: Array
    values: Array
    strengths: Array
    log_gates: Array


def random_inputs(seed: int, parents: list[int], alike: float = 0.0) -> Inputs:
    """Inputs with keys of length 1, the more alike the greater ``alike``."""
    rng = np.random.default_rng(seed)
    size = len(parents)
    keys, queries = rng.normal(size=(2, HEADS, size, KEY))
    keys[..., 0] += alike
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    gates = -np.exp(rng.normal(size=(HEADS, size), scale=2.0))
    gates[:, 1] = -300.0  # underflows
    state, values = rng.normal(size=(HEADS, VALUE, KEY)), rng.normal(size=(HEADS, size, VALUE))
    return Inputs(state, keys, queries, values, rng.uniform(0, 2, (HEADS, size, 1)), gates)


def by_delta_rule(inputs: Inputs, parents: list[int]) -> Array:
    """Compute what the nodes read, in float64."""
    states: list[Array] = []
    read = np.zeros_like(inputs.values)
    for node, parent in enumerate(parents):
        above = inputs.state if node == 0 else states[parent]
        state = np.exp(inputs.log_gates[:, node])[:, None, None] * above
        key = inputs.keys[:, node]
        known = np.einsum("hvk,hk->hv", state, key)
        update = inputs.strengths[:, node] * (inputs.values[:, node] - known)
        states.append(state + update[..., None] * key[:, None])
        read[:, node] = np.einsum("hvk,hk->hv", states[-1], inputs.queries[:, node])
    return read


def by_matrix(inputs: Inputs, tree: TokenTree, is_delta: bool) -> tuple[mx.array, BranchStates]:
    """The same by `BranchStates`."""
    state, keys, queries, values, strengths, log_gates = (
        mx.array(x, dtype=mx.float32)[None] for x in inputs
    )
    trees = TreeBatch([tree])
    given = log_gates[..., None], state, trees.ancestors
    if not is_delta:
        read, log_decays = follow_updates(queries, keys, values, *given)
        return read[0], BranchStates(state, keys, values, log_decays)
    deep = trees.above, tree.max_depth
    read, updates, log_decays = follow_delta_rule(queries, keys, values, strengths, *given, *deep)
    return read[0], BranchStates(state, keys, updates, log_decays)


@pytest.mark.parametrize("length", [16, 52])
def test_keys_that_are_alike(length):
    """The powers of the system's matrix are large then, its inverse is not."""
    parents = [max(node - 1, 0) for node in range(length)]
    inputs = random_inputs(0, parents, alike=100.0)
    inputs = inputs._replace(
        log_gates=np.full_like(inputs.log_gates, -1e-3), strengths=np.ones_like(inputs.strengths)
    )
    expected = by_delta_rule(inputs, parents)
    read, _ = by_matrix(inputs, TokenTree.of(range(length), parents), True)
    np.testing.assert_allclose(np.array(read), expected, atol=TOLERANCE)


@pytest.mark.parametrize("is_delta", [False, True])
def test_a_draft_that_is_not_a_number_spoils_its_branch_alone(is_delta):
    tree, paths = TokenTree.of(range(len(PARENTS)), PARENTS), node_paths(PARENTS)
    read = np.array(by_matrix(random_inputs(1, PARENTS), tree, is_delta)[0])
    names = ["keys", "values", "log_gates", "queries", *(["strengths"] if is_delta else [])]
    values = [(name, np.nan) for name in names]
    for name, value in [*values, *(("values", one) for one in (np.inf, -np.inf, 3e38))]:
        inputs = random_inputs(1, PARENTS)
        getattr(inputs, name)[:, 3] = value
        below = [3] if name == "queries" else [path[-1] for path in paths if 3 in path]
        others = [path[-1] for path in paths if path[-1] not in below]
        spoiled, branches = by_matrix(inputs, tree, is_delta)
        if np.isnan(value):
            assert mx.all(mx.isnan(spoiled[:, mx.array(below)])).item()
        assert np.array_equal(np.array(spoiled)[:, others], read[:, others])
        state = branches.array_after(Paths([[0, 1, 4]], len(PARENTS)))
        assert mx.all(mx.isfinite(state)).item()
