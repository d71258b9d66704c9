"""Linear recurrences along all branches of a tree at once, without a loop over its nodes.

Axes: N nodes of the tree, H heads, K size of a key, V size of a value.

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
is not 0, so matrix products get finite numbers alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

# Gates below this leave nothing of a state in float32; natural logarithm. The bound keeps sums of
# them short: float32 has the sum of 16 to 3e-5, and with it their quotients.
LEAST_LOG_GATE = -40.0
# Bound on what enters matrix products, far above any activation.
LARGEST = 1e30


class Branches:
    """The states of one layer along the branches of a tree.

    Args:
        state: State before the root, shape (H, V, K).
        keys: Shape (H, N, K).
        log_gates: Natural logarithm of every gate, NaN in nodes with numbers that are not finite,
            shape (H, N).
        ancestors: As in `TokenTree`, shape (N, N).

    All arrays but the last are float32.

    Attributes:
        updates: What every node adds to the state, shape (H, N, V).
    """

    updates: mx.array

    def __init__(self, state: mx.array, keys: mx.array, log_gates: mx.array, ancestors: mx.array):
        self.state = state
        self.keys = finite(keys)
        gates = mx.maximum(log_gates, LEAST_LOG_GATE)[:, None]
        # No matrix product: it would be rounded to fewer digits on some devices.
        self.log_decays = mx.where(ancestors, gates, 0.0).sum(axis=-1)
        quotients = mx.exp(self.log_decays[..., None] - self.log_decays[:, None])
        self._weights = finite(mx.where(ancestors, quotients, 0.0))

    def recall(self, keys: mx.array) -> mx.array:
        """What keys of the nodes, shape (H, N, K), read from the state before the root."""
        return mx.exp(self.log_decays)[..., None] * (keys @ self.state.swapaxes(1, 2))

    def weigh(self, queries: mx.array) -> mx.array:
        """Weights of the updates in what queries, shape (H, N, K), read; shape (H, N, N)."""
        return mx.where(self._weights > 0, self._weights * (queries @ self.keys.swapaxes(1, 2)), 0)

    def read(self, queries: mx.array) -> mx.array:
        """What queries, shape (H, N, K), read from the states of their nodes, shape (H, N, V)."""
        return self.recall(queries) + self.weigh(queries) @ self.updates

    def state_after(self, path: Sequence[int]) -> mx.array:
        """The state after the nodes of a path, indices from the root on, shape (H, V, K)."""
        nodes = mx.array(list(path), dtype=mx.int32)
        logs = self.log_decays[:, nodes]
        updates = self.updates[:, nodes] * mx.exp(logs[:, -1:] - logs)[..., None]
        decayed = mx.exp(logs[:, -1])[:, None, None] * self.state
        return decayed + updates.swapaxes(1, 2) @ self.keys[:, nodes]


def solve_delta_rule(
    branches: Branches, values: mx.array, strengths: mx.array, max_depth: int
) -> mx.array:
    """The updates of the gated delta rule.

    The system is solved level by level, as substitution does: after i rounds, nodes of depth i are
    exact and stay so. To square its matrix instead takes fewer rounds, but keys that are alike make
    the powers large, and differences of them wrong.

    Args:
        branches: The states, whose updates are not known yet.
        values: Shape (H, N, V).
        strengths: Share of a value that is replaced, b, shape (H, N, 1).
        max_depth: Bound on the depth of every node.

    Returns:
        Shape (H, N, V).
    """
    # Nodes come after their parents, so all others but a node itself are left of the diagonal.
    weights = -finite(strengths) * mx.tril(branches.weigh(branches.keys), -1)
    alone = finite(strengths * (values - branches.recall(branches.keys)))
    updates = alone
    for _ in range(max_depth):
        updates = mx.addmm(alone, weights, updates)
    return updates


def finite(x: mx.array) -> mx.array:
    """Zeros in place of NaN, and bounded numbers."""
    return mx.clip(mx.where(mx.isnan(x), 0.0, x), -LARGEST, LARGEST)
