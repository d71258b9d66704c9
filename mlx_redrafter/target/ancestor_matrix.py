"""Linear recurrences along all branches of a tree at once, without a loop over its nodes.

Axes: B sequences, N nodes of each tree, H heads, K size of a key, V size of a value, P nodes of the
longest path. All arrays are float32.

A layer computes its state S, shape (V, K) per head, at node n from the state at the parent p, with
a gate g, a key k and an update u:

    S_n = g_n S_p + u_n k_n^T

Let S_0 be the state before the root, and G_n the product of the gates of n and its ancestors. Then
S_n is a sum over these nodes m:

    S_n = G_n S_0 + sum_m (G_n / G_m) u_m k_m^T

So the result of a query, S_n q_n, is attention without softmax, with quotients G_n / G_m as factors
of the weights. In Mamba-2, u does not depend on the state (Dao and Gu, 2024, "Transformers are
SSMs", section 6, there for chains). In the gated delta rule, u_n = b_n (v_n - g_n S_p k_n), a
triangular system (Yang et al., 2024, "Gated Delta Networks", section 3.3). A tree only replaces the
previous tokens by ancestors. Gates underflow, so quotients are computed from logarithms.

NaN or infinity in a draft must spoil the draft's descendants and no other node. 0 times infinity is
not 0, so matrix products get finite numbers only, and NaN in the gates marks the spoiled nodes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_redrafter.target.caches.tree_pass import Paths

# Minimum natural logarithm of a gate, which leaves nothing of a state in float32. The bound keeps
# sums small: 16 of them, and so their quotients, are exact to 3e-5.
MIN_LOG_GATE = -40.0
# Maximum magnitude in matrix products, far above any activation.
MAX_NUMBER = 1e30


class BranchStates(NamedTuple):
    """The states of one layer along the branches of a tree."""

    state: mx.array  # before the roots, shape (B, H, V, K)
    keys: mx.array  # shape (B, H, N, K)
    updates: mx.array  # shape (B, H, N, V)
    log_decays: mx.array  # natural logarithm of G, shape (B, H, 1, N)

    def array_after(self, paths: Paths) -> mx.array:
        """Compute the states after paths, shape (B, H, V, K)."""
        return _array_after(tuple(self), paths.nodes, paths.is_node)


@mx.compile
def _array_after(
    branches: Sequence[mx.array], nodes: mx.array, is_node: mx.array | None
) -> mx.array:
    """Compute `BranchStates.array_after`; nodes and their mask are those of `Paths`."""
    state, keys, updates, log_decays = branches
    nodes = nodes[:, None, :, None]
    logs = mx.take_along_axis(log_decays, nodes.swapaxes(2, 3), axis=3)
    last = logs[..., -1:]
    weights = _decays(last - logs)
    if is_node is not None:
        weights = mx.where(is_node[:, None, :, None], weights, 0.0)
    scaled = mx.take_along_axis(updates, nodes, axis=2) * weights
    added = scaled.swapaxes(2, 3) @ mx.take_along_axis(keys, nodes, axis=2)
    return _decays(last) * state + added


@mx.compile
def follow_updates(
    queries: mx.array,
    keys: mx.array,
    updates: mx.array,
    log_gates: mx.array,
    state: mx.array,
    ancestors: mx.array,
) -> tuple[mx.array, mx.array]:
    """Compute the results of all nodes if updates do not depend on the state.

    Args:
        queries: Shape (B, H, N, K).
        keys: Shape (B, H, N, K).
        updates: Shape (B, H, N, V).
        log_gates: Natural logarithm of the gates, shape (B, H, N, 1).
        state: States before the roots, shape (B, H, V, K).
        ancestors: As in `TreeBatch`, bool, shape (B, N, N).

    Returns:
        Results of the queries, shape (B, H, N, V), and `BranchStates.log_decays`.
    """
    log_decays, quotients = _log_decays(log_gates, ancestors, keys, updates)
    read = _recall(queries, state, log_decays) + _weigh(queries, keys, quotients) @ _finite(updates)
    return read, log_decays


@mx.compile
def follow_delta_rule(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    strengths: mx.array,
    log_gates: mx.array,
    state: mx.array,
    ancestors: mx.array,
    above: mx.array,
    max_depth: int,
) -> tuple[mx.array, mx.array, mx.array]:
    """Compute the results of all nodes under the gated delta rule.

    Substitution solves the system depth by depth: nodes of depth i are exact from round i on.
    Squaring its matrix would need fewer rounds, but if keys are similar the powers grow large and
    their differences inaccurate.

    The arguments are those of `follow_updates`, but values v of shape (B, H, N, V) and strengths b
    of shape (B, H, N, 1) replace the updates. ``above`` is `TreeBatch.above`, and ``max_depth`` the
    maximum depth of a node.

    Returns:
        Results and updates, each of shape (B, H, N, V), and `BranchStates.log_decays`.
    """
    log_decays, quotients = _log_decays(log_gates + 0.0 * strengths, ancestors, keys, values)
    quotients_above = mx.where(above[:, None], quotients, 0.0)
    weights = -_finite(strengths) * _weigh(_finite(keys), keys, quotients_above)
    alone = _finite(strengths * (values - _recall(keys, state, log_decays)))
    updates = alone
    for _ in range(max_depth):
        updates = mx.addmm(alone, weights, updates)
    read = _recall(queries, state, log_decays) + _weigh(queries, keys, quotients) @ updates
    return read, updates, log_decays


def _log_decays(
    log_gates: mx.array, ancestors: mx.array, *inputs: mx.array
) -> tuple[mx.array, mx.array]:
    """Compute the logarithms of the products of gates, and the quotients of these products.

    NaN or infinity in ``inputs``, shape (B, H, N, any), spoils descendants. Logarithms of shape
    (B, H, 1, N) are NaN for spoiled nodes, and quotients of shape (B, H, N, N) are 0 for these and
    for nodes that are not ancestors.
    """
    for x in inputs:
        log_gates = log_gates + 0.0 * x.sum(axis=-1, keepdims=True)
    log_gates = mx.maximum(log_gates, MIN_LOG_GATE)
    ancestors = ancestors[:, None]
    # A sum instead of a matrix product, which some devices round to fewer digits.
    log_decays = mx.where(ancestors.swapaxes(2, 3), log_gates, 0.0).sum(axis=2, keepdims=True)
    quotients = mx.exp(log_decays.swapaxes(2, 3) - log_decays)
    return log_decays, _finite(mx.where(ancestors, quotients, 0.0))


def _decays(logs: mx.array) -> mx.array:
    """Return the exponentials of logarithms of shape (B, H, 1, N), shape (B, H, N, 1).

    Transposed afterwards, because `mx.compile` would compute each again for every number of a row.
    """
    return mx.exp(logs).swapaxes(2, 3)


def _recall(queries: mx.array, state: mx.array, log_decays: mx.array) -> mx.array:
    """Query the states before the roots after their decay at each node."""
    return _decays(log_decays) * (queries @ state.swapaxes(2, 3))


def _weigh(queries: mx.array, keys: mx.array, quotients: mx.array) -> mx.array:
    """Compute the weights of the updates in the results of queries, shape (B, H, N, N)."""
    return mx.where(quotients > 0, quotients * (queries @ _finite(keys).swapaxes(2, 3)), 0.0)


def _finite(x: mx.array) -> mx.array:
    """Replace NaN by 0 and bound all numbers."""
    return mx.clip(mx.where(mx.isnan(x), 0.0, x), -MAX_NUMBER, MAX_NUMBER)
