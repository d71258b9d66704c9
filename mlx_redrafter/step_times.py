"""What a step of every shape takes now, from what it took when it was timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from mlx_redrafter.config import TreeShape

# Steps of a shape that its slowdown remembers.
MEMORY = 8
# One step counts as at most so many times slower or faster than the last ones: it may have waited.
MOST_CHANGE = 2.0


class StepTimes(Mapping[TreeShape | None, float]):
    """Seconds of a step by shape, of plain decoding under None.

    A longer context, a hot chip or other work slows shapes down, the larger ones by more or by
    less. What the shapes in use show is interpolated, by nodes, for the others. The smallest and
    the largest count as no slower until they are used: whoever seems faster for that is tried, and
    then known.

    Args:
        timed: What `mlx_redrafter.costs.step_costs` found.
    """

    def __init__(self, timed: Mapping[TreeShape | None, float]):
        self._timed = dict(timed)
        nodes = [_nodes(shape) for shape in timed]
        self._slowdowns = {min(nodes): 1.0, max(nodes): 1.0}
        self._counts = dict.fromkeys(nodes, 1)

    def learn(self, shape: TreeShape | None, seconds: float) -> None:
        """Take in what a step of ``shape`` took."""
        nodes = _nodes(shape)
        known = self._slowdown(nodes)
        found = seconds / self._timed[shape]
        found = min(max(found, known / MOST_CHANGE), known * MOST_CHANGE)
        self._counts[nodes] = min(self._counts[nodes] + 1, MEMORY)
        self._slowdowns[nodes] = known + (found - known) / self._counts[nodes]

    def __getitem__(self, shape: TreeShape | None) -> float:
        return self._timed[shape] * self._slowdown(_nodes(shape))

    def __iter__(self) -> Iterator[TreeShape | None]:
        return iter(self._timed)

    def __len__(self) -> int:
        return len(self._timed)

    def _slowdown(self, nodes: int) -> float:
        known = sorted(self._slowdowns)
        return float(np.interp(nodes, known, [self._slowdowns[n] for n in known]))


def _nodes(shape: TreeShape | None) -> int:
    if shape is None:
        return 1
    assert shape.tree_nodes is not None
    return shape.tree_nodes
