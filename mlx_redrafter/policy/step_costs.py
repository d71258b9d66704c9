"""Costs of a step by its parts: verifying N nodes, drafting level by level, waiting for scores.

Axes: W beam width, L beam length, N nodes verified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mlx_redrafter.draft_plan import DraftShape

# Minimum share of the cost that padding must save, above the noise of timing.
MIN_GAIN = 0.05


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step by its parts.

    Attributes:
        plain: A step of plain decoding.
        verify: A step that verifies N nodes and drafts nothing, by N.
        first: Drafting without its levels, by width.
        level: Each level of drafts, by width. Both are empty for prompt lookup.
        wait: Additional cost if the host reads the drafts before the target verifies them.
    """

    plain: float
    verify: Mapping[int, float]
    first: Mapping[int, float] = field(default_factory=dict)
    level: Mapping[int, float] = field(default_factory=dict)
    wait: float = 0.0

    def cheapest_size(self, num_nodes: int) -> int:
        """Return the number of nodes, at least ``num_nodes``, with the lowest cost.

        Kernels switch with the number of rows: 16 nodes may cost less than 12.
        """
        sizes = sorted(size for size in self.verify if size >= num_nodes)
        if not sizes:
            return num_nodes
        best = min(sizes, key=self.verify.__getitem__)
        is_clear = self.verify[best] < (1 - MIN_GAIN) * self.verify[sizes[0]]
        return best if is_clear else num_nodes

    def drafting(self, shape: DraftShape) -> float:
        """Return the seconds of a search; widths in between are interpolated."""
        widths = list(self.level)
        first = np.interp(shape.width, widths, list(self.first.values()))
        level = np.interp(shape.width, widths, list(self.level.values()))
        return max(0.0, float(first + shape.levels * level))
