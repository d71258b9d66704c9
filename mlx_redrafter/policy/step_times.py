"""What a step of every shape takes now, from what it took when it was timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from mlx_redrafter.config import TreeShape

# Steps that the slowdown of shapes of as many nodes remembers, and that what was timed counts for.
MEMORY = 8
TIMED = 3
# Steps of other trees after which a slowdown is forgotten.
FORGET_AFTER = 32
# One step counts as at most so many times slower or faster than the last ones: it may have waited.
MOST_CHANGE = 2.0


class StepTimes(Mapping[TreeShape | None, float]):
    """Seconds of a step by shape, of plain decoding under None.

    A longer context, a hot chip or other work slows shapes down, the larger ones by more or by
    less, whatever their length. What the shapes in use show is interpolated, by nodes, for the
    others. The smallest and the largest count as no slower until they are used: whoever seems
    faster for that is tried, and then known. What shapes of some nodes showed is forgotten when
    others are used instead, as other work on the machine may have been the reason.

    Args:
        timed: What `mlx_redrafter.policy.profiling.step_costs` found.
    """

    def __init__(self, timed: Mapping[TreeShape | None, float]):
        self._timed = dict(timed)
        self._nodes = {shape: _count_nodes(shape) for shape in timed}
        nodes = sorted(self._nodes.values())
        self._slowdowns = {nodes[0]: 1.0, nodes[-1]: 1.0}
        self._counts = dict.fromkeys(nodes, TIMED)
        self._unused: dict[int, int] = {}
        self._factors = dict.fromkeys(nodes, 1.0)

    def learn(self, shape: TreeShape | None, seconds: float) -> None:
        """Take in what a step of ``shape`` took."""
        nodes = self._nodes[shape]
        if shape is not None:
            self._forget_unused()
        self._unused[nodes] = 0
        known = self._factors[nodes]
        found = seconds / self._timed[shape]
        found = min(max(found, known / MOST_CHANGE), known * MOST_CHANGE)
        self._counts[nodes] = min(self._counts[nodes] + 1, MEMORY)
        self._slowdowns[nodes] = known + (found - known) / self._counts[nodes]
        used, slowdowns = zip(*sorted(self._slowdowns.items()), strict=True)
        factors = np.interp(list(self._factors), used, slowdowns).tolist()
        self._factors = dict(zip(self._factors, factors, strict=True))

    def _forget_unused(self) -> None:
        self._unused = {nodes: steps + 1 for nodes, steps in self._unused.items()}
        for nodes in [nodes for nodes, steps in self._unused.items() if steps > FORGET_AFTER]:
            del self._unused[nodes], self._slowdowns[nodes]
            self._counts[nodes] = TIMED

    def __getitem__(self, shape: TreeShape | None) -> float:
        return self._timed[shape] * self._factors[self._nodes[shape]]

    def __iter__(self) -> Iterator[TreeShape | None]:
        return iter(self._timed)

    def __len__(self) -> int:
        return len(self._timed)


def _count_nodes(shape: TreeShape | None) -> int:
    if shape is None:
        return 1
    assert shape.tree_nodes is not None
    return shape.tree_nodes
