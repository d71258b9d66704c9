"""Conversion of EAGLE heads.

Programs disagree whether a layer's number means its input or its output, so the self-test also
tries the neighbouring layers, and the result has those that the target clearly accepts more often.
The config of a head may name another rotary embedding than the one it was trained with, so the
self-test tries two: the head's own and the target's.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_redrafter.checkpoint_files import find_checkpoint, read_config
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.names import NamedTensors
from mlx_redrafter.convert.output import QUANTISED, ConvertedDrafter, finish
from mlx_redrafter.convert.selftest import SelfTest, choose_reading, compare, load_target
from mlx_redrafter.convert.shapes import check_dtypes
from mlx_redrafter.convert.source import Source
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.escaping import join_shortened, quote
from mlx_redrafter.proposers.checkpoint import CONFIG_ONLY, check_shapes
from mlx_redrafter.proposers.eagle.config import MODEL_TYPE
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.eagle.published import (
    eagle_config,
    own_names,
    resolve_offsets,
    rope_of,
    target_of,
)
from mlx_redrafter.proposers.layer_sizes import build
from mlx_redrafter.target.target import FINAL, Target

# Advice for a head that drafts better with the target's rotary embedding.
ROPE_REMEDY = (
    "the target's rotary embedding; give config.json its rope_theta and rope_scaling and convert "
    "again"
)


def describe_eagle(source: Source, eagle: Eagle) -> str:
    """Describe the kind of a head, and the model that its config names."""
    if source.config.get("model_type") == MODEL_TYPE:
        layout = "written by this converter"
    elif "speculators_model_type" in source.config:
        layout = "with speculators' names"
    else:
        layout = "with SafeAILab's names"
    target = target_of(source.config)
    return f"{eagle.config.name} head, {layout}" + (f", for {quote(target)}" if target else "")


def open_eagle(source: Source) -> tuple[Eagle, NamedTensors]:
    """Create a head of the right sizes without weights, and map the names of its weights."""
    names = own_names(source.config, source.tensors)
    shapes = {own: source.tensors[name].shape for own, name in names.items()}
    eagle = build(Eagle, eagle_config(source.config, shapes))
    check_shapes(eagle, shapes, source.name, names)
    check_dtypes(names, source.tensors, "use a head that is not quantised")
    left_out = sorted(source.tensors.keys() - names.values())
    notes = [f"not needed, left out: {join_shortened(map(quote, left_out))}"] if left_out else []
    return eagle, NamedTensors("eagle", names, tuple(notes))


def convert_eagle(source: Source, options: ConversionOptions) -> ConvertedDrafter:
    """Convert an EAGLE head; see `conversion.convert_drafter`."""
    if "quantization" in source.config:
        raise CheckpointError(QUANTISED)
    eagle, named = open_eagle(source)
    weights = source.read(named.sources)
    resolve_offsets(weights, named.sources)
    eagle.load_weights(list(weights.items()))
    finish(eagle, source.name, named.sources, options)
    if options.target is None:
        return ConvertedDrafter(eagle, named.name_set, None, named.notes)
    measured, note = _test(eagle, options.target)
    notes = (*named.notes, note)
    return ConvertedDrafter(eagle, named.name_set, measured, notes, measured.warnings(ROPE_REMEDY))


def _test(eagle: Eagle, name: str | Path) -> tuple[SelfTest, str]:
    """Choose the layers that the target accepts most, and try its rotary embedding with them."""
    target, tokenizer = load_target(eagle, name)
    found = choose_reading(_readings(eagle, target), target, tokenizer, compare)
    eagle.config = found.network.config
    values = read_config(find_checkpoint(name, CONFIG_ONLY))
    other = with_rope(eagle, rope_of(values.get("text_config", values)))
    turned = None if other is None else compare(other, target, found.texts)
    return SelfTest.of(found.matches, turned), found.line


def _readings(eagle: Eagle, target: Target) -> dict[str, Eagle]:
    """List the head with the layers that it may read, first those that its config names."""
    own = tuple(eagle.captured_layers(target))
    readings = {"as it says": eagle}
    for name, step in (("earlier layers", -1), ("later layers", 1)):
        shifted = tuple(layer + step for layer in own)
        if FINAL not in own and 0 <= min(shifted) and max(shifted) <= len(target.blocks):
            readings[name] = copy.copy(eagle)
            readings[name].config = replace(eagle.config, captured_layers=shifted)
    return readings


def with_rope(eagle: Eagle, rope: dict[str, Any]) -> Eagle | None:
    """Copy a head with another rotary embedding; return None if it has that one already."""
    config = replace(eagle.config, **rope)
    if config == eagle.config:
        return None
    other = copy.deepcopy(eagle)
    other.config = config
    for layer, made in zip(other.layers, build(Eagle, config).layers, strict=True):
        layer.self_attn.rope = made.self_attn.rope
    return other
