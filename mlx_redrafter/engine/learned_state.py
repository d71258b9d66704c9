"""What the texts of an engine have shown, for those to come."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_redrafter.policy.adaptive import Experience
from mlx_redrafter.policy.profiling import Known
from mlx_redrafter.proposers.lookup import Lookup


@dataclass
class LearnedState:
    """What the texts of a target and a proposer have shown.

    Attributes:
        lookup: Lookup whose rates all texts share.
        experience: Experience of the last adaptively drafted text, with which the next begins.
        batches: The same of batches, by number of slots.
        timed: Step times measured or read so far.
    """

    lookup: Lookup = field(default_factory=Lookup)
    experience: Experience | None = None
    batches: dict[int, Experience] = field(default_factory=dict)
    timed: Known = field(default_factory=dict)
