"""Values in the config of a published block drafter, which may be in three places.

Slots and masks go by who trained it.
"""

import reprlib
from collections.abc import Mapping
from types import NoneType
from typing import Any, NamedTuple, Self

from mlx_redrafter.checks import as_mapping, check_int, is_number
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.checkpoint import speculative_tokens
from mlx_redrafter.proposers.layer_sizes import FULL, SLIDING, check_layer_types
from mlx_redrafter.proposers.stored_config import MAX_COUNT, reading

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
    def of(cls, values: Mapping[str, Any]) -> Self:
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
        with reading("the block drafter's config.json is"):
            check_int(key, value, 0 if key.endswith("token_id") else 1, high)
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
    def backbone(self) -> Any:
        """Model type of the decoder layers, which may be a copy of the target's."""
        return self.layer.get("model_type")

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
        found = self.values.get("architectures")
        names = " ".join(map(str, found)) if isinstance(found, list) else ""
        signs = {
            "SpecForge": self.nested.get("projector_type") == "dspark",
            "LFM2.5": "Lfm2DSpark" in names,
            "Qwen3.5": "Qwen35DSpark" in names,
            "Meta": str(self.backbone).endswith(ASSISTANT),
            "DeepSpec": "DSpark" in names or "target_layer_ids" in self.values,
            "incoai": "DFlash2" in names,
            "z-lab": "DFlash" in names,
        }
        for packaging, is_meant in signs.items():
            if is_meant:
                return packaging
        raise CheckpointError(
            "expected the config of a block drafter by z-lab, incoai, DeepSpec, SpecForge, "
            f"LiquidAI or speculators, found architectures {names!r}; use such a head"
        )


def _wrong(key: str, expected: str, value: Any) -> CheckpointError:
    found = "none" if value is None else reprlib.repr(value)
    return CheckpointError(
        f"expected {expected} as {key} in the block drafter's config.json, found {found}; download "
        "it again, or use a head whose config has it"
    )


def first_slot_of(config: PublishedValues) -> int:
    """Return the entry of a block that predicts the first draft.

    The text stays right with a wrong one, and the number of accepted drafts about halves. z-lab,
    incoai and Meta predict after the root's entry, and DeepSpec's heads at it, its DFlash as well.
    """
    said = config.flag("sample_from_anchor")
    if said is not None:
        return int(not said)
    if config.packaging == "speculators":
        # Before that key was written. Their number of tokens may be a choice of who served it, so
        # only the whole block is a sign.
        return int(speculative_tokens(config.values) != config.find("block_size"))
    return int(config.packaging in LIKE_ZLAB)


def masks_of(config: PublishedValues) -> dict[str, Any]:
    """Return the windows of the layers, and which are causal inside the block.

    Where runtimes disagree this follows those that trained the heads: sliding layers are causal
    unless the config says otherwise, and ``is_causal`` holds for all layers.
    """
    count = config.integer("num_hidden_layers", MAX_COUNT, in_layer=True)
    kinds = config.find("layer_types")
    if kinds is None:
        kinds = [SLIDING if config.flag("use_swa") else FULL] * count
    with reading("the block drafter's config.json is"):
        check_layer_types(kinds, count)
    sliding = [kind == SLIDING for kind in kinds]
    window = config.find("swa_window_size") if config.flag("use_swa") else None
    window = config.find("sliding_window") if window is None else window
    if config.flag("use_sliding_window") is False:  # as in transformers' Qwen3Config
        window = None
    if config.packaging in ("Meta", "speculators") and isinstance(window, int):
        window += 1  # transformers' DFlash and speculators count the distance, others the entries
    return {
        "windows_from_root": config.packaging == "speculators",
        "windows": tuple(window if one else None for one in sliding),
        "causal": tuple(_causal(config, sliding)),
    }


def _causal(config: PublishedValues, sliding: list[bool]) -> list[bool]:
    if config.packaging == "speculators":
        is_second = config.values.get("speculators_model_type") == "dflash2"
        said = config.flag("sliding_window_non_causal")
        is_free = is_second if said is None else said
        return [one and not is_free for one in sliding]
    if config.packaging == "Meta":
        return [False] * len(sliding)
    for key in ("is_causal", "dflash_query_causal", "causal"):
        said = config.flag(key)
        if said is not None:
            return [said] * len(sliding)
    return sliding
