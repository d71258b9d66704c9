"""Facts about a target that are known before its weights are loaded, and checks against them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mlx_redrafter.errors import CheckpointError


class Sizes(Protocol):
    """A config of a network that drafts for one target."""

    @property
    def hidden_size(self) -> int:
        """The target's hidden size."""
        ...

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        ...


class TargetFacts(NamedTuple):
    """Facts about a target, from its config alone; None if unknown."""

    name: str | Path | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None

    @classmethod
    def of(cls, name: str | Path, config: Mapping[str, Any]) -> TargetFacts:
        """Read the facts from a target's ``config.json``."""
        nested = config.get("text_config")
        values = nested if isinstance(nested, Mapping) else config
        hidden_size, vocab_size = values.get("hidden_size"), values.get("vocab_size")
        return cls(name, hidden_size, vocab_size if isinstance(vocab_size, int) else None)

    def check(self, config: Sizes) -> None:
        """Raise `CheckpointError` if a drafter is for a target of other sizes."""
        check_sizes(config, self.hidden_size, self.vocab_size)


# Nothing is known, so every drafter fits.
UNKNOWN = TargetFacts()


def check_sizes(
    config: Sizes,
    hidden_size: int | None,
    vocab_size: int | None,
    tokenizer_size: int | None = None,
) -> None:
    """Check that a drafter's sizes are those of a target, as far as these are known.

    A vocabulary smaller than the target's embedding is accepted if it covers the tokenizer: the
    rows beyond are padding.
    """
    if hidden_size is not None and config.hidden_size != hidden_size:
        raise CheckpointError(
            f"the drafter's hidden_size {config.hidden_size} does not match the target's "
            f"{hidden_size}; use a drafter trained for this model"
        )
    if vocab_size is None:
        return
    least = 0 if tokenizer_size is None else min(tokenizer_size, vocab_size)
    if not least <= config.vocab_size <= vocab_size:
        raise CheckpointError(
            f"the drafter's vocab_size {config.vocab_size} does not match the target's "
            f"{vocab_size}; use a drafter trained for this model"
        )
