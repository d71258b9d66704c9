"""The door that every kind of proposer has: a module with these names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.proposers.target_facts import TargetFacts
from mlx_redrafter.target.target import Target

# Shapes of a checkpoint's tensors by name.
Shapes = Mapping[str, tuple[int, ...]]

P = TypeVar("P", bound=Proposer)


class Kind(Protocol):
    """A kind of proposer."""

    # Name of the kind, for messages.
    NAME: str

    def recognise(self, config: Mapping[str, Any], shapes: Shapes) -> bool:
        """Return whether a checkpoint is of this kind, given its ``config.json``.

        ``shapes`` is empty while only the config has been fetched.
        """

    def load(self, path_or_repo: str | Path, target: TargetFacts) -> Proposer:
        """Load a proposer in the dtype it was stored in, after a check against the target's facts.

        Args:
            path_or_repo: Folder or hub repository, or the word that stands for this kind.
            target: Facts about the target.

        Raises:
            CheckpointError: Files are missing, damaged or foreign, or belong to another target.
            NonFiniteError: A weight is NaN or infinite.
        """


@runtime_checkable
class TunedKind(Kind, Protocol):
    """A kind whose proposers may draft faster on this machine in another form."""

    def tune(self, proposer: Any, target: Target) -> Proposer:
        """Return the form of a loaded proposer that drafts fastest here."""


class Wrapper(Generic[P]):
    """The part of a proposer around another one that it has in common with the one inside."""

    def __init__(self, proposer: P):
        self.proposer = proposer
        self.networks, self.num_layers = proposer.networks, proposer.num_layers
        self.num_rows, self.max_length = proposer.num_rows, proposer.max_length
        self.check_fit = proposer.check_fit
