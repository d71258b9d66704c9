"""The door that every kind of proposer has: a module with these names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.proposers.target_facts import TargetFacts

# Shapes of a checkpoint's tensors by name.
Shapes = Mapping[str, tuple[int, ...]]


class Kind(Protocol):
    """A kind of proposer.

    One whose proposers may draft faster here in another form has ``tune(proposer, target)``, too.
    """

    # Name of the kind, for messages.
    NAME: str

    def recognise(self, config: Mapping[str, Any], shapes: Shapes) -> bool:
        """Return whether a checkpoint is of this kind, given its ``config.json``.

        ``shapes`` is empty while only the config has been fetched.
        """

    def load(self, path_or_repo: str | Path, target: TargetFacts) -> Proposer:
        """Load a proposer in the dtype it was stored in, after a check against the target's facts.

        The name is that of a folder or hub repository, or the word that stands for this kind.

        Raises:
            CheckpointError: Files are missing, damaged or foreign, or belong to another target.
            NonFiniteError: A weight is NaN or infinite.
        """


class Wrapper:
    """The part of a proposer around another one that it has in common with the one inside."""

    def __init__(self, proposer: Any):
        self.proposer = proposer
        self.networks, self.num_layers = proposer.networks, proposer.num_layers
        self.num_rows, self.max_length = proposer.num_rows, proposer.max_length
        self.check_fit = proposer.check_fit
