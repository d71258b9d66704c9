"""Facts about a target that are known before its weights are loaded, and checks against them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlx_redrafter.errors import CheckpointError


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
    def of(cls, name: str | Path, config: Mapping[str, Any]) -> TargetFacts:
        """Read the facts from a target's ``config.json``."""
        values = text_values(config)
        hidden_size, vocab_size = values.get("hidden_size"), values.get("vocab_size")
        return cls(name, hidden_size, vocab_size if isinstance(vocab_size, int) else None)

    def check(self, config: Any) -> None:
        """Raise `CheckpointError` if a network's config is for a target of other sizes.

        A vocabulary smaller than the target's embedding is accepted if it covers the tokenizer: the
        rows beyond are padding.
        """
        if self.hidden_size is not None and config.hidden_size != self.hidden_size:
            raise CheckpointError(
                f"the drafter's hidden_size {config.hidden_size} does not match the target's "
                f"{self.hidden_size}; use a drafter trained for this model"
            )
        if self.vocab_size is None:
            return
        least = min(self.tokenizer_size or 0, self.vocab_size)
        if not least <= config.vocab_size <= self.vocab_size:
            raise CheckpointError(
                f"the drafter's vocab_size {config.vocab_size} does not match the target's "
                f"{self.vocab_size}; use a drafter trained for this model"
            )


# Nothing is known, so every drafter fits.
UNKNOWN = TargetFacts()
