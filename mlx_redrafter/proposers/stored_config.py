"""Configs of networks as their ``config.json`` stores them: reading, writing, common checks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields
from typing import Any, ClassVar, Self

from mlx_redrafter.checks import check_instance, check_int, check_number, check_positive
from mlx_redrafter.errors import CheckpointError, ConfigError

# Largest size that a config file may claim, far above any model.
MAX_DIMENSION = 2**24
# Largest number of layers, heads and the like that a config file may claim, far above any network.
MAX_COUNT = 64
# Largest inverse temperature that a config file may claim, far above any fit.
MAX_SCORE_SCALE = 100
# Inverse temperature of a drafter that was not calibrated.
INVERSE_TEMPERATURE = 1.0
# Coupling weight of a drafter that was not calibrated.
COUPLING_WEIGHT = 0.5
# Keys of the file that have other names here.
KEYS = {"inverse_temperature": "score_scale", "coupling_weight": "noise_share"}


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise `CheckpointError` if values of a file, such as "the heads are", are out of range."""
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(f"{what} out of range: {error}") from error


class StoredConfig:
    """A config whose fields are keys of a ``config.json``; subclasses are frozen dataclasses."""

    model_type: ClassVar[str]

    def __post_init__(self: Any) -> None:
        for name in ("vocab_size", "hidden_size"):
            check_int(f"drafter {name}", getattr(self, name), 1, MAX_DIMENSION)
        if self.draft_vocab_size is not None:
            check_int("drafter draft_vocab_size", self.draft_vocab_size, 1, self.vocab_size)
        for field in fields(self):
            if field.type in (bool, "bool"):
                value = getattr(self, field.name)
                check_instance(f"drafter {field.name}", value, bool, "true or false")
        scale, weight = getattr(self, "inverse_temperature", 1), getattr(self, "coupling_weight", 1)
        check_positive("drafter score_scale", scale, MAX_SCORE_SCALE)
        check_number("drafter noise_share", weight, 0, 1)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read a ``config.json``; keys that belong to other programs are ignored."""
        check_instance("config", values, Mapping, "a mapping, as of a drafter's config.json")
        model_type = values.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise CheckpointError(
                f"expected a drafter with model_type {cls.model_type!r}, found {model_type!r}; "
                "a PyTorch drafter is made loadable by `redrafter-mlx convert`"
            )
        stored = {KEYS.get(field.name, field.name): field for field in fields(cls)}  # type: ignore[arg-type]
        missing = [
            key for key, field in stored.items() if field.default is MISSING and key not in values
        ]
        if missing:
            raise CheckpointError(
                f"the drafter's config.json lacks {', '.join(missing)}; download or make it again"
            )
        known = {key: value for key, value in values.items() if key in stored}
        with reading("the drafter's config.json is"):
            return cls(**{stored[key].name: _frozen(value) for key, value in known.items()})

    def to_dict(self) -> dict[str, Any]:
        values = {KEYS.get(name, name): value for name, value in asdict(self).items()}  # type: ignore[call-overload]
        return {"model_type": self.model_type, **values}

    @property
    def head_rows(self: Any) -> int:
        return self.draft_vocab_size or self.vocab_size


def _frozen(value: Any) -> Any:
    """Return a list of a file, and those in it, as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
