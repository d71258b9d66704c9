"""Draft plans: beam width, beam length and number of nodes for the drafts of one step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from mlx_redrafter.checks import check_choice, check_int
from mlx_redrafter.errors import ConfigError

MAX_BEAM_WIDTH = 64
# Maximum number of tokens of a beam, root included.
MAX_BEAM_LENGTH = 16
# Maximum number of outcomes of a forward pass for which speculative speculative decoding drafts.
MAX_OUTCOMES = 64
# Number of nodes that a search of several beams scores per level, for each node that it expands.
SCORED_PER_BEAM = 4
# Number of nodes of the tree if only the width or the length of the search is given.
DEFAULT_NODES = 9

Selection = Literal["top_n", "beam"]


@dataclass(frozen=True)
class DraftShape:
    """The shape of a search for drafts: beams of L tokens, root included.

    "top_n" selects the tree of the most probable drafts, "beam" the paper's beams with shared
    prefixes merged. Apple calls L ``beam_length``.
    """

    width: int = 4
    length: int = 5
    select: Selection = "top_n"

    def __post_init__(self) -> None:
        check_int("beam_width", self.width, 1, MAX_BEAM_WIDTH)
        check_int("beam_length", self.length, 2, MAX_BEAM_LENGTH, " (the root counts as one)")
        check_choice("select", self.select, ("top_n", "beam"))

    @property
    def levels(self) -> int:
        return self.length - 1

    @property
    def level_nodes(self) -> int:
        """Maximum number of nodes that the search scores per level.

        It expands W of them. The others cost nothing, because their probabilities come with those
        of the W, and the target may verify them too.
        """
        return 1 if self.width == 1 else SCORED_PER_BEAM * self.width

    @property
    def max_nodes(self) -> int:
        """Maximum number of nodes of a tree of this shape, root included."""
        if self.select == "beam":
            return 1 + self.width * self.levels
        return 1 + self.levels * self.level_nodes


@dataclass(frozen=True)
class DraftPlan:
    """The size of one step's drafts.

    Attributes:
        shape: Shape of the search, which bounds the depth of the tree to L - 1.
        num_nodes: Maximum number of nodes that are verified, root included, N; 1 for shadow drafts.
        from_text: Whether the drafts come from prompt lookup instead of a network.
    """

    shape: DraftShape
    num_nodes: int
    from_text: bool = False

    @classmethod
    def of(
        cls,
        width: int = DraftShape.width,
        length: int = DraftShape.length,
        num_nodes: int | None = None,
        select: Selection = DraftShape.select,
    ) -> DraftPlan:
        """Make a plan from options; by default a tree has at most `DEFAULT_NODES` nodes.

        Raise `ConfigError` for a value out of range, and for ``num_nodes`` with merged beams.
        """
        shape = DraftShape(width, length, select)
        if select == "beam":
            if num_nodes is not None:
                raise ConfigError(
                    "tree_nodes cannot be chosen with select='beam', which depends on the beams; "
                    "leave it out or use select='top_n'"
                )
            return cls(shape, shape.max_nodes)
        if num_nodes is None:
            return cls(shape, min(DEFAULT_NODES, shape.max_nodes))
        hint = f" for beam_width {width} and beam_length {length}"
        check_int("tree_nodes", num_nodes, 2, shape.max_nodes, hint)
        return cls(shape, num_nodes)

    @property
    def is_shadow(self) -> bool:
        """Whether the drafts are drawn next to a plain step, only to be compared with the text."""
        return self.num_nodes == 1

    @property
    def searched(self) -> DraftPlan:
        """The plan for the proposer: with shadow drafts, all nodes that its search scores."""
        return replace(self, num_nodes=self.shape.max_nodes) if self.num_nodes == 1 else self

    def within(self, max_length: int | None) -> DraftPlan:
        """Limit the plan to beams of ``max_length`` tokens; None is no limit."""
        if max_length is None or self.shape.length <= max_length:
            return self
        shape = replace(self.shape, length=max_length)
        return replace(self, shape=shape, num_nodes=min(self.num_nodes, shape.max_nodes))

    @property
    def options(self) -> dict[str, Any]:
        """Options that make this plan; ``tree_nodes`` is None for merged beams."""
        shape = self.shape
        return {
            "beam_width": shape.width,
            "beam_length": shape.length,
            "tree_nodes": None if shape.select == "beam" else self.num_nodes,
            "select": shape.select,
        }
