"""Model cards: the models that a checkpoint was made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.repocard import metadata_load

from mlx_redrafter.checkpoint_files import MAX_JSON_BYTES

# Name of the card in a checkpoint folder.
CARD_FILE = "README.md"


class Card(NamedTuple):
    """Facts from a model card.

    Attributes:
        base_models: Models that this one was made from, or that a drafter was made for.
        is_quantised: Whether the card says that this is a quantised copy of its base model.
    """

    base_models: tuple[str, ...] = ()
    is_quantised: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Card:
        """Read the facts from a card's metadata; values of other types are left out."""
        bases = values.get("base_model")
        bases = bases if isinstance(bases, list) else [bases]
        return cls(
            tuple(base for base in bases if isinstance(base, str)),
            values.get("base_model_relation") == "quantized",
        )


def read_card(folder: Path) -> Card:
    """Read the card in a folder; a card that is missing or damaged states nothing."""
    path = folder / CARD_FILE
    if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
        return Card()
    try:
        return Card.of(metadata_load(path) or {})
    except Exception:  # YAML from others may raise anything
        return Card()
