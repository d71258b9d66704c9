"""What a step takes, by its parts: verifying N nodes, drafting level by level, waiting for scores.

Axes: W beam width, L beam length, N nodes verified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mlx_redrafter.draft_plan import DraftShape

# Share of the time that padding must save, so that no noise decides.
LEAST_GAIN = 0.05


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step by its parts.

    Attributes:
        plain: A step of plain decoding.
        verify: A step that verifies N nodes and drafts nothing, by N.
        first: Drafting at no level, by width: what a search takes beside its levels.
        level: Each level of drafts, by width. Both are empty where drafts come out of the text.
        wait: Additional seconds of a step whose drafts are looked at before they are verified.
    """

    plain: float
    verify: Mapping[int, float]
    first: Mapping[int, float] = field(default_factory=dict)
    level: Mapping[int, float] = field(default_factory=dict)
    wait: float = 0.0

    def cheapest_size(self, num_nodes: int) -> int:
        """The number of nodes, no less than these, that is verified in the least time.

        Kernels switch with the number of rows: 16 nodes may take less than 12.
        """
        sizes = sorted(size for size in self.verify if size >= num_nodes)
        if not sizes:
            return num_nodes
        best = min(sizes, key=self.verify.__getitem__)
        is_clear = self.verify[best] < (1 - LEAST_GAIN) * self.verify[sizes[0]]
        return best if is_clear else num_nodes

    def drafting(self, shape: DraftShape) -> float:
        """Seconds of a search; those of widths in between are interpolated."""
        widths = list(self.level)
        first = np.interp(shape.width, widths, list(self.first.values()))
        level = np.interp(shape.width, widths, list(self.level.values()))
        return max(0.0, float(first + shape.levels * level))

    def step(self, shape: DraftShape | None, num_nodes: int, waits: bool) -> float:
        """Seconds of a step.

        Args:
            shape: Shape of the search; None where nothing is drafted, or looked up in the text.
            num_nodes: Nodes verified, 1 for the root alone; one of those in ``verify`` otherwise.
            waits: Whether the drafts are looked at before they are verified.
        """
        verify = self.plain if num_nodes == 1 else self.verify[num_nodes]
        drafting = 0.0 if shape is None else self.drafting(shape)
        return verify + drafting + (self.wait if waits else 0.0)
