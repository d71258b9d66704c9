"""Slots and masks of published block drafters, which go by who trained them."""

from __future__ import annotations

from typing import Any

from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.block.values import LIKE_ZLAB, PublishedValues
from mlx_redrafter.proposers.eagle.config import ATTENTION_TYPES
from mlx_redrafter.proposers.speculators import speculative_tokens
from mlx_redrafter.proposers.stored_config import MAX_COUNT


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
        kinds = ["sliding_attention" if config.flag("use_swa") else "full_attention"] * count
    is_list = isinstance(kinds, list) and len(kinds) == count
    if not is_list or not all(kind in ATTENTION_TYPES for kind in kinds):
        raise CheckpointError(
            f"expected layer_types of {count} layers, each one of {', '.join(ATTENTION_TYPES)}, "
            f"found {kinds!r}"
        )
    sliding = [kind == "sliding_attention" for kind in kinds]
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
