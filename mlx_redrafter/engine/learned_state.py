"""State that an engine carries from text to text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.nn as nn

from mlx_redrafter.engine.stored_costs import Known
from mlx_redrafter.engine.stored_state import StateFile
from mlx_redrafter.policy.state import PolicyState
from mlx_redrafter.proposers.lookup import Lookup
from mlx_redrafter.target.compiled_pass import CompiledPasses


@dataclass
class LearnedState:
    """Measurements and estimates for a target and a proposer, carried from text to text.

    Attributes:
        lookup: Prompt lookup, whose acceptance rates all texts share.
        policy: Estimates of the last text with an adaptive policy; the next one begins with
            them.
        batches: The same for batches, by number of slots.
        timed: Step times measured so far, or read from the file of an earlier run.
        passes: Compiled passes of the target; None without any.
        file: File of the estimates; None before the first text that may need them.
    """

    lookup: Lookup = field(default_factory=Lookup)
    policy: PolicyState | None = None
    batches: dict[int, PolicyState] = field(default_factory=dict)
    timed: Known = field(default_factory=dict)
    passes: CompiledPasses | None = None
    file: StateFile | None = None

    def recall(self, networks: Sequence[nn.Module]) -> None:
        """Begin, once, with the estimates that an earlier process has stored."""
        if self.file is None:
            self.file = StateFile(networks)
            policy, batches = self.file.read()
            self.policy = self.policy or policy
            self.batches.update({size: batches[size] for size in batches.keys() - self.batches})

    def keep(self) -> None:
        """Let a later process begin with the estimates of a text that has ended."""
        if self.file is not None:
            self.file.count_text(self.policy, self.batches)
