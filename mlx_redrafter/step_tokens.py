"""What a step of every shape yields, from what was accepted in those that were taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mlx_redrafter.config import TreeShape

# Acceptance of a draft that is expected before anything was seen, and the steps that counts for.
PRIOR_ACCEPTANCE = 0.5
PRIOR_STEPS = 1
# Steps that what the text before has taught counts for, and that an estimate remembers.
REMEMBERED_STEPS = 4
MEMORY = 32


@dataclass(frozen=True)
class Accepted:
    """The drafts accepted in a step, in order.

    Attributes:
        ranks: By score among all drafts of the step, from 0.
        children: By score among the children of the same parent, from 0.
    """

    ranks: list[int]
    children: list[int]

    def count_within(self, shape: TreeShape) -> int:
        """How many a smaller tree of the same drafts would have had."""
        assert shape.tree_nodes is not None
        count = 0
        for rank, child in zip(self.ranks[: shape.draft_length], self.children, strict=False):
            is_chain = shape.beam_width == 1
            if child >= shape.beam_width or (not is_chain and rank >= shape.tree_nodes - 1):
                break
            count += 1
        return count


class StepTokens(Mapping[TreeShape | None, float]):
    """Tokens expected of a step by shape, the target's own included; 1 under None, a plain step.

    A step shows exactly what every shape contained in its own would have accepted.

    Args:
        shapes: Shapes of drafting.
        before: What the text before has taught, of the same shapes.
    """

    def __init__(self, shapes: Iterable[TreeShape], before: StepTokens | None = None):
        shapes = list(shapes)
        self._tokens: dict[TreeShape | None, float] = {None: 1.0}
        for shape in shapes:
            prior = sum(PRIOR_ACCEPTANCE**depth for depth in range(shape.beam_length))
            self._tokens[shape] = before[shape] if before else prior
        self._weights = dict.fromkeys(shapes, REMEMBERED_STEPS if before else PRIOR_STEPS)

    def learn(self, shape: TreeShape, accepted: Accepted) -> None:
        """Take in what a step of ``shape`` accepted."""
        for one, weight in self._weights.items():
            if contains(shape, one):
                self._weights[one] = weight = min(weight + 1, MEMORY)
                self._tokens[one] += (1 + accepted.count_within(one) - self._tokens[one]) / weight

    def __getitem__(self, shape: TreeShape | None) -> float:
        return self._tokens[shape]

    def __iter__(self) -> Iterator[TreeShape | None]:
        return iter(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)


def contains(shape: TreeShape, other: TreeShape) -> bool:
    """Whether a step of ``shape`` shows what ``other`` would have accepted."""
    assert shape.tree_nodes is not None
    assert other.tree_nodes is not None
    return (
        shape.beam_width >= other.beam_width
        and shape.beam_length >= other.beam_length
        and shape.tree_nodes >= other.tree_nodes
    )
