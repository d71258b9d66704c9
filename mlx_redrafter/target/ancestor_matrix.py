"""Linear recurrences along all branches of a tree at once, without a loop over its nodes.

Axes: N nodes of the tree, H heads, K size of a key, V size of a value. All arrays are float32.

A layer's state S, shape (V, K) per head, goes from a node's parent p to the node n with a gate g, a
key k and an update u:

    S_n = g_n S_p + u_n k_n^T

Written out, with the state S_0 before the root and G_n, the product of the gates of n and all nodes
above it, this is a sum over those nodes m:

    S_n = G_n S_0 + sum_m (G_n / G_m) u_m k_m^T

So what a query reads, S_n q_n, is attention without softmax, whose weights are those quotients. In
Mamba-2, u does not depend on the state (Dao and Gu, 2024, "Transformers are SSMs", section 6, there
for chains). In the gated delta rule, u_n = b_n (v_n - g_n S_p k_n), a triangular system (Yang et
al., 2024, "Gated Delta Networks", section 3.3). Ancestors in place of the tokens before are all
that a tree changes. Quotients are differences of logarithms, as the gates themselves underflow.

A number in a draft that is not finite spoils the nodes below it, and only them: 0 times infinity
is not 0, so matrix products get finite numbers alone, and what is spoiled is known by its gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

# Gates below this leave nothing of a state in float32; natural logarithm. The bound keeps sums of
# them short: float32 has the sum of 16 to 3e-5, and with it their quotients.
MIN_LOG_GATE = -40.0
# Bound on what enters matrix products, far above any activation.
LARGEST = 1e30


class Branches(NamedTuple):
    """The states of one layer along the branches of a tree.

    Attributes:
        state: State before the root, shape (H, V, K).
        keys: Shape (H, N, K).
        updates: Shape (H, N, V).
        log_decays: Natural logarithm of the product of the gates of a node and of those above it,
            shape (H, N).
    """

    state: mx.array
    keys: mx.array
    updates: mx.array
    log_decays: mx.array

    def state_after(self, path: Sequence[int]) -> mx.array:
        """The state after the nodes of a path, indices from the root on, shape (H, V, K)."""
        nodes = mx.array(list(path), dtype=mx.int32)
        logs = self.log_decays[:, nodes]
        updates = self.updates[:, nodes] * mx.exp(logs[:, -1:] - logs)[..., None]
        decayed = mx.exp(logs[:, -1])[:, None, None] * self.state
        return decayed + updates.swapaxes(1, 2) @ self.keys[:, nodes]


@mx.compile
def follow_updates(
    queries: mx.array,
    keys: mx.array,
    updates: mx.array,
    log_gates: mx.array,
    state: mx.array,
    ancestors: mx.array,
) -> tuple[mx.array, mx.array]:
    """What nodes read, where updates do not depend on the state.

    Args:
        queries: Shape (H, N, K).
        keys: Shape (H, N, K).
        updates: Shape (H, N, V).
        log_gates: Natural logarithm of the gates, shape (H, N).
        state: State before the root, shape (H, V, K).
        ancestors: As in `TokenTree`, bool, shape (N, N).

    Returns:
        Results of the queries, shape (H, N, V), and `Branches.log_decays`.
    """
    log_decays, quotients = _decays(log_gates, ancestors, keys, updates)
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
    max_depth: int,
) -> tuple[mx.array, mx.array, mx.array]:
    """What nodes read under the gated delta rule.

    The system is solved level by level, as substitution does: after i rounds, nodes of depth i are
    exact and stay so. To square its matrix instead takes fewer rounds, but keys that are alike make
    the powers large, and differences of them wrong.

    Args:
        queries: Shape (H, N, K).
        keys: Shape (H, N, K).
        values: Shape (H, N, V).
        strengths: Share of a value that is replaced, b, shape (H, N, 1).
        log_gates: Natural logarithm of the gates, shape (H, N).
        state: State before the root, shape (H, V, K).
        ancestors: As in `TokenTree`, bool, shape (N, N).
        max_depth: Bound on the depth of every node.

    Returns:
        Results of the queries, shape (H, N, V), the updates, likewise, and `Branches.log_decays`.
    """
    log_decays, quotients = _decays(log_gates, ancestors, keys, values, strengths)
    # Nodes come after their parents, so all others but a node itself are left of the diagonal.
    weights = -_finite(strengths) * mx.tril(_weigh(_finite(keys), keys, quotients), -1)
    alone = _finite(strengths * (values - _recall(keys, state, log_decays)))
    updates = alone
    for _ in range(max_depth):
        updates = mx.addmm(alone, weights, updates)
    read = _recall(queries, state, log_decays) + _weigh(queries, keys, quotients) @ updates
    return read, updates, log_decays


def _decays(
    log_gates: mx.array, ancestors: mx.array, *inputs: mx.array
) -> tuple[mx.array, mx.array]:
    """Logarithms of the products of gates, and the quotients of these products.

    Args:
        log_gates: Shape (H, N).
        ancestors: Shape (N, N).
        inputs: Arrays that have to be finite, shape (H, N, any).

    Returns:
        Shape (H, N), NaN below inputs that are not finite, and shape (H, N, N), 0 there and for
        nodes that are not ancestors.
    """
    for x in inputs:
        log_gates = log_gates + 0.0 * x.sum(axis=-1)
    log_gates = mx.maximum(log_gates, MIN_LOG_GATE)
    # No matrix product: it would be rounded to fewer digits on some devices.
    log_decays = mx.where(ancestors, log_gates[:, None], 0.0).sum(axis=-1)
    quotients = mx.exp(log_decays[..., None] - log_decays[:, None])
    return log_decays, _finite(mx.where(ancestors, quotients, 0.0))


def _recall(queries: mx.array, state: mx.array, log_decays: mx.array) -> mx.array:
    """What queries read from the state before the root, as it has decayed at their nodes."""
    return mx.exp(log_decays)[..., None] * (queries @ state.swapaxes(1, 2))


def _weigh(queries: mx.array, keys: mx.array, quotients: mx.array) -> mx.array:
    """Weights of the updates in what queries read, shape (H, N, N)."""
    return mx.where(quotients > 0, quotients * (queries @ _finite(keys).swapaxes(1, 2)), 0.0)


def _finite(x: mx.array) -> mx.array:
    """Zeros in place of NaN, and bounded numbers."""
    return mx.clip(mx.where(mx.isnan(x), 0.0, x), -LARGEST, LARGEST)
