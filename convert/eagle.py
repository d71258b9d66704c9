"""Conversion of EAGLE heads.

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
from mlx_redrafter.convert.output import QUANTISED, ConvertedDrafter, fill
from mlx_redrafter.convert.selftest import SelfTest, compare, decode_texts
from mlx_redrafter.convert.shapes import check_dtypes
from mlx_redrafter.convert.source import Source
from mlx_redrafter.convert.stored import read_weights
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
    weights = read_weights(named.sources, source.tensors, options.dtype)
    resolve_offsets(weights, named.sources)
    fill(eagle, weights, source.name, options.quantization)
    measured = None if options.target is None else _test(eagle, options.target)
    return ConvertedDrafter(
        eagle,
        named.name_set,
        measured,
        named.notes,
        () if measured is None else measured.warnings(ROPE_REMEDY),
    )


def _test(eagle: Eagle, name: str | Path) -> SelfTest:
    target, texts = decode_texts(eagle, name)
    found = compare(eagle, target, texts)
    values = read_config(find_checkpoint(name, CONFIG_ONLY))
    other = with_rope(eagle, rope_of(values.get("text_config", values)))
    return SelfTest.of(found, None if other is None else compare(other, target, texts))


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
