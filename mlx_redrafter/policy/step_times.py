"""Present step times: those timed beforehand, corrected by the steps of this text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from mlx_redrafter.config import DraftPlan

# Window of the running mean of a slowdown, in steps.
MEMORY = 8
# Weight of the time measured beforehand, in steps.
TIMED = 3
# Steps of other sizes after which a slowdown is forgotten.
FORGET_AFTER = 32
# Bound on the ratio of a step to the steps before: a single one may have waited.
MOST_CHANGE = 2.0


class StepTimes(Mapping[DraftPlan | None, float]):
    """Seconds of a step by plan, of plain decoding under None.

    A longer context, a hot chip or other work slows steps down, larger trees by more or by less,
    whatever their length. The slowdown of the sizes in use is interpolated, by nodes, for the
    others. Sizes never used are assumed not slowed down (slowdown 1) at both ends: this optimism
    makes the policy try them, which measures them. The slowdown of a size is forgotten when other
    sizes are used instead, as other work on the machine may have been the reason.

    Args:
        timed: Step times measured by `mlx_redrafter.policy.profiling`.
    """

    def __init__(self, timed: Mapping[DraftPlan | None, float]):
        self._timed = dict(timed)
        self._nodes = {plan: _count_nodes(plan) for plan in timed}
        nodes = sorted(self._nodes.values())
        self._slowdowns = {nodes[0]: 1.0, nodes[-1]: 1.0}
        self._counts = dict.fromkeys(nodes, TIMED)
        self._unused: dict[int, int] = {}
        self._factors = dict.fromkeys(nodes, 1.0)

    def learn(self, plan: DraftPlan | None, seconds: float) -> None:
        """Take in the duration of a step of ``plan``."""
        nodes = self._nodes[plan]
        if plan is not None:
            self._forget_unused()
        self._unused[nodes] = 0
        known = self._factors[nodes]
        found = seconds / self._timed[plan]
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

    def __getitem__(self, plan: DraftPlan | None) -> float:
        return self._timed[plan] * self._factors[self._nodes[plan]]

    def __iter__(self) -> Iterator[DraftPlan | None]:
        return iter(self._timed)

    def __len__(self) -> int:
        return len(self._timed)


def _count_nodes(plan: DraftPlan | None) -> int:
    return 1 if plan is None else plan.num_nodes
