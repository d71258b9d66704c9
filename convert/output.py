"""What every conversion writes: the weights, where they come from, and a card."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_redrafter.checkpoint_files import shared_name
from mlx_redrafter.convert.conversion_card import Config, render_conversion_card
from mlx_redrafter.convert.conversion_options import Conversion, ConversionOptions
from mlx_redrafter.convert.publication import CARD_FILE, PROVENANCE_KEY, publish
from mlx_redrafter.convert.source import Source
from mlx_redrafter.version import __version__


def write_conversion(
    destination: Path,
    save: Callable[[Path, Mapping[str, Any]], None],
    config: Config,
    options: ConversionOptions,
    provenance: dict[str, Any],
    warnings: Sequence[str],
) -> Conversion:
    """Write a converted drafter to a folder, which appears whole or not at all.

    Args:
        destination: The folder.
        save: Writes the drafter to a folder, with further keys for its ``config.json``.
        config: The drafter's config.
        options: Options of the conversion.
        provenance: Origin of the weights; see `describe_provenance`.
        warnings: Warnings about the drafter, for the user.
    """
    with publish(destination) as folder:
        save(folder, {PROVENANCE_KEY: provenance})
        stored_as = str(options.quantization or options.dtype)
        name = destination.resolve().name
        card = render_conversion_card(name, config, stored_as, provenance)
        (folder / CARD_FILE).write_text(card, encoding="utf-8")
    return Conversion(config, provenance, tuple(warnings))


def describe_provenance(
    source: Source,
    options: ConversionOptions,
    name_set: str,
    self_test: Mapping[str, Any] | None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Origin of converted weights, for ``config.json``."""
    return {
        "source": source.name,
        "sha256": source.sha256(),
        "converter": f"mlx_redrafter {__version__}",
        "name_set": name_set,
        "target": None if options.target is None else shared_name(options.target),
        "self_test": self_test,
        "notes": list(notes),
    }
