"""The door that every kind of proposer has: a module with the names of `Kind`.

A drafter is checked against facts about its target that are known before any weights are loaded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.errors import CheckpointError

# Shapes of a checkpoint's tensors by name.
Shapes = Mapping[str, tuple[int, ...]]


def text_values(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model in a ``config.json``."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


class TargetFacts(NamedTuple):
    """Facts about a target; None if unknown."""

    name: str | Path | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    tokenizer_size: int | None = None

    @classmethod
    def of(cls, name: str | Path, config: Mapping[str, Any]) -> Self:
        values = text_values(config)
        hidden_size, vocab_size = values.get("hidden_size"), values.get("vocab_size")
        return cls(name, hidden_size, vocab_size if isinstance(vocab_size, int) else None)

    def check(self, config: Any) -> None:
        """Raise `CheckpointError` if a network's config is for a target of other sizes.

        A vocabulary smaller than the target's embedding is accepted if it covers the tokenizer: the
        rows beyond are padding.
        """
        least = min(self.tokenizer_size or 0, self.vocab_size or 0)
        if self.hidden_size not in (None, config.hidden_size):
            name = "hidden_size"
        elif self.vocab_size is not None and not least <= config.vocab_size <= self.vocab_size:
            name = "vocab_size"
        else:
            return
        raise CheckpointError(
            f"the drafter's {name} {getattr(config, name)} does not match the target's "
            f"{getattr(self, name)}; use a drafter trained for this model"
        )


# Nothing is known, so every drafter fits.
UNKNOWN = TargetFacts()


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
