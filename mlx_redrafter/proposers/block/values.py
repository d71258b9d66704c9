"""Values in the config of a published block drafter, which may be in three places."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from types import NoneType
from typing import Any, NamedTuple

from mlx_redrafter.checks import as_mapping, check_int, is_number
from mlx_redrafter.errors import CheckpointError, ConfigError

# End of the model type of Meta's drafters.
ASSISTANT = "_assistant"
# Packagings of drafters that were trained as z-lab's.
LIKE_ZLAB = ("z-lab", "incoai", "Meta")


class PublishedValues(NamedTuple):
    """The values of a config: the whole object, those of the method's own, and of its layers'."""

    values: Mapping[str, Any]
    nested: Mapping[str, Any]
    layer: Mapping[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> PublishedValues:
        nested: dict[str, Any] = {}
        for key in ("dflash_config", "dspark_config"):
            nested |= as_mapping(values.get(key))
        layer = values.get("transformer_layer_config")
        return cls(values, nested, layer if isinstance(layer, Mapping) else values)

    def find(self, key: str, default: Any = None) -> Any:
        """Return the first value of a key that is not null."""
        for place in self:
            if place.get(key) is not None:
                return place[key]
        return default

    def integer(
        self, key: str, high: int, default: int | None = None, in_layer: bool = False
    ) -> int:
        """Return an integer from 1, or from 0 for token ids, to ``high``."""
        value = self.layer.get(key, default) if in_layer else self.find(key, default)
        if value is None:
            raise _wrong(key, "a number", None)
        try:
            check_int(key, value, 0 if key.endswith("token_id") else 1, high)
        except ConfigError as error:
            raise CheckpointError(
                f"the block drafter's config.json is out of range: {error}"
            ) from error
        return value

    def number(self, key: str, default: float) -> float:
        value = self.find(key, default)
        if not is_number(value):
            raise _wrong(key, "a number", value)
        return float(value)

    def flag(self, key: str) -> bool | None:
        value = self.find(key)
        if not isinstance(value, (bool, NoneType)):
            raise _wrong(key, "true or false", value)
        return value

    @property
    def architectures(self) -> str:
        found = self.values.get("architectures")
        return " ".join(map(str, found)) if isinstance(found, list) else ""

    @property
    def backbone(self) -> Any:
        """Model type of the decoder layers, which may be a copy of the target's."""
        return self.layer.get("model_type")

    @property
    def has_gelu(self) -> bool:
        """Whether the config is one of Gemma's, which name the activation otherwise."""
        return "gelu" in str(self.find("hidden_activation"))

    @property
    def packaging(self) -> str:
        """Name of the packaging: who wrote the files decides what their numbers mean."""
        if "transformer_layer_config" in self.values:
            return "speculators"
        if "dspark_block_size" in self.values:
            raise CheckpointError(
                "expected a drafter, found a whole model with DSpark layers of its own "
                "(dspark_block_size in config.json); use a drafter in a folder of its own"
            )
        if self.nested.get("projector_type") == "dspark":
            return "SpecForge"
        if "Lfm2DSpark" in self.architectures:
            return "LFM2.5"
        if "Qwen35DSpark" in self.architectures:
            return "Qwen3.5"
        if str(self.backbone).endswith(ASSISTANT):
            return "Meta"
        if "DSpark" in self.architectures or "target_layer_ids" in self.values:
            return "DeepSpec"
        if "DFlash2" in self.architectures:
            return "incoai"
        if "DFlash" in self.architectures:
            return "z-lab"
        raise CheckpointError(
            "expected the config of a block drafter by z-lab, incoai, DeepSpec, SpecForge, "
            f"LiquidAI or speculators, found architectures {self.architectures!r}; use such a head"
        )


def _wrong(key: str, expected: str, value: Any) -> CheckpointError:
    found = "none" if value is None else reprlib.repr(value)
    return CheckpointError(
        f"expected {expected} as {key} in the block drafter's config.json, found {found}; download "
        "it again, or use a head whose config has it"
    )
