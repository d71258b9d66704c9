"""Conversion of EAGLE heads.

Programs disagree whether a layer's number means its input or its output, and the config of a head
may name another rotary embedding than the one it was trained with. So the self-test tries the
neighbouring layers and the target's embedding, too, and the result has what the target clearly
accepts more often.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_redrafter.checkpoint_files import find_checkpoint, read_config
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.names import NamedTensors
from mlx_redrafter.convert.output import QUANTISED, ConvertedDrafter, finish
from mlx_redrafter.convert.selftest import Reading, SelfTest, choose_reading, compare, load_target
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
    rope_of,
    target_of,
)
from mlx_redrafter.proposers.layer_sizes import build
from mlx_redrafter.proposers.speculators import resolve_offsets
from mlx_redrafter.target.target import FINAL, Target


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
    found = _choose_reading(eagle, options.target)
    measured, notes = SelfTest.of(found.matches), (*named.notes, found.line)
    return ConvertedDrafter(found.network, named.name_set, measured, notes, measured.warnings())


def _choose_reading(eagle: Eagle, name: str | Path) -> Reading[Eagle]:
    """Choose the layers and the rotary embedding with which the target accepts most."""
    target, tokenizer = load_target(eagle, name)
    values = read_config(find_checkpoint(name, CONFIG_ONLY))
    readings = dict(_readings(eagle, target, rope_of(values.get("text_config", values))))
    return choose_reading(
        readings, target, tokenizer, compare, lambda network: network.captured_layers(target)
    )


def _readings(eagle: Eagle, target: Target, rope: dict[str, Any]) -> Iterator[tuple[str, Eagle]]:
    """List the head with the layers and embeddings that it may have, first as its config says."""
    own = tuple(eagle.captured_layers(target))
    turned = with_rope(eagle, rope)
    for layers, step in (("as it says", 0), ("earlier layers", -1), ("later layers", 1)):
        shifted = tuple(layer + step for layer in own)
        if step and (FINAL in own or min(shifted) < 0 or max(shifted) > len(target.blocks)):
            continue
        for head, suffix in ((eagle, ""), (turned, ", rotated as the target")):
            if head is not None:
                yield layers + suffix, _with_layers(head, shifted if step else None)


def _with_layers(eagle: Eagle, layers: tuple[int, ...] | None) -> Eagle:
    """Copy a head that reads other layers, if any are given; the weights are shared."""
    if layers is None:
        return eagle
    other = copy.copy(eagle)
    other.config = replace(eagle.config, captured_layers=layers)
    return other


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
