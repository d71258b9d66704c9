"""Keys and checks that the configs of all drafters with a head have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from mlx_redrafter.checks import is_number
from mlx_redrafter.errors import CheckpointError, ConfigError

# Bounds on what a config file may claim, far above any model.
MAX_DIMENSION = 2**24
MAX_SCORE_SCALE = 100
# Keys of the file that have other names here.
KEYS = {"inverse_temperature": "score_scale", "coupling_weight": "noise_share"}


C = TypeVar("C")


def read_fields(cls: type[C], values: Mapping[str, Any], required: Collection[str]) -> C:
    """A config of a class out of a ``config.json``; keys of other programs are ignored.

    Raises:
        CheckpointError: A required key is missing, or a value is out of range.
    """
    missing = [name for name in required if name not in values]
    if missing:
        raise CheckpointError(f"the drafter's config.json lacks {', '.join(missing)}")
    names = {KEYS.get(field.name, field.name): field.name for field in fields(cls)}  # type: ignore[arg-type]
    try:
        return cls(**{names[key]: value for key, value in values.items() if key in names})
    except ConfigError as error:
        raise CheckpointError(f"the drafter's config.json is out of range: {error}") from error


def write_fields(config: Any, model_type: str) -> dict[str, Any]:
    """The keys of ``config.json`` for a config."""
    values = {KEYS.get(name, name): value for name, value in asdict(config).items()}
    return {"model_type": model_type, **values}


def check_ranking(inverse_temperature: object, coupling_weight: object) -> None:
    """Raise `ConfigError` unless drafts can be ranked with these scalars; see `Calibration`."""
    scale, weight = inverse_temperature, coupling_weight
    if not is_number(scale) or not 0 < scale <= MAX_SCORE_SCALE:  # type: ignore[operator]
        raise ConfigError(
            f"drafter score_scale must be above 0 and at most {MAX_SCORE_SCALE}, got {scale!r}"
        )
    if not is_number(weight) or not 0 <= weight <= 1:  # type: ignore[operator]
        raise ConfigError(f"drafter noise_share must be from 0 to 1, got {weight!r}")
