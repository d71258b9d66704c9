"""Conversion of block drafters.

Trainers disagree which entry of a block predicts the first draft, and whether a layer's number
means its input or its output. They also rotate different pairs of a head's numbers, and some leave
out the target's scale of embeddings. So the self-test tries the other readings of a config, too,
and the result has what the target clearly accepts more often.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.output import ConvertedDrafter, finish
from mlx_redrafter.convert.selftest import (
    Reading,
    SelfTest,
    choose_reading,
    compare_rows,
    load_target,
)
from mlx_redrafter.convert.source import Source
from mlx_redrafter.proposers.block import load as load_block
from mlx_redrafter.proposers.block.config import BlockConfig
from mlx_redrafter.proposers.block.fit_block import calibrate, predict
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.proposers.block.published import block_config, own_names, packaging_of
from mlx_redrafter.proposers.checkpoint import check_shapes
from mlx_redrafter.proposers.fit import ReadSequence
from mlx_redrafter.proposers.layer_sizes import build
from mlx_redrafter.target.target import Target


def inspect_block(source: Source) -> tuple[str, BlockConfig]:
    """Describe the kind of a block drafter, and read its config, which its tensors must fit."""
    names = own_names(source.shapes)
    shapes = {own: source.shapes[name] for own, name in names.items()}
    config = block_config(source.config, shapes)
    if config.draft_vocab_size is None:
        shapes.pop("token_ids", None)  # a table of the whole vocabulary
    check_shapes(build(BlockNetwork, config), shapes, source.name, names)
    return f"a {config.name} drafter, {packaging_of(source.config)}", config


def convert_block(source: Source, options: ConversionOptions) -> ConvertedDrafter:
    """Convert a block drafter; see `conversion.convert_drafter`."""
    network = load_block(source.folder)
    finish(network, source.name, own_names(source.tensors), options)
    if options.target is None:
        return ConvertedDrafter(network, network.config.name, None)
    measured, note = _test(network, options.target)
    return ConvertedDrafter(network, network.config.name, measured, [note], measured.warnings())


def _test(network: BlockNetwork, name: str | Path) -> tuple[SelfTest, str]:
    """Choose the reading of the config that the target accepts most, and calibrate with it."""
    target, tokenizer = load_target(network, name)
    found = try_readings(network, target, tokenizer)
    network.become(found.network.config)
    network.config = calibrate(network, target, found.texts)
    return SelfTest.of(found.matches), found.line


def try_readings(
    network: BlockNetwork, target: Target, tokenizer: TokenizerWrapper
) -> Reading[BlockNetwork]:
    """Try each reading of a drafter's config; see `choose_reading`."""
    readings = {}
    for reading, config in _readings(network.config, target):
        readings[reading] = copy.copy(network)
        readings[reading].become(config)
    return choose_reading(
        readings,
        target,
        tokenizer,
        _first_matches,
        lambda network: network.config.captured_layers,
    )


def _readings(config: BlockConfig, target: Target) -> Iterator[tuple[str, BlockConfig]]:
    """List what the config of a drafter may mean, itself first."""
    yield "as it says", config
    if config.block_size > 1 and config.link != "recurrent":
        slot = 1 - config.first_slot
        yield f"entry {slot} first", replace(config, first_slot=slot, depth_scales=None)
    for name, step in (("earlier layers", -1), ("later layers", 1)):
        layers = tuple(layer + step for layer in config.captured_layers)
        if 0 <= min(layers) and max(layers) <= len(target.blocks):
            yield name, replace(config, captured_layers=layers)
    other = "halves" if config.rope_traditional else "neighbours"
    yield f"{other} rotated", replace(config, rope_traditional=not config.rope_traditional)
    if config.has_embedding:
        return
    if target.has_embedding_norm:
        other = "normalised" if config.skips_embedding_norm else "not normalised"
        skips = not config.skips_embedding_norm
        yield f"embeddings {other}", replace(config, skips_embedding_norm=skips)
    elif target.embedding_scale != 1:
        scale = config.embed_scale / target.embedding_scale
        yield "embeddings not scaled", replace(config, embed_scale=scale)


def _first_matches(
    network: BlockNetwork, target: Target, texts: Sequence[ReadSequence]
) -> list[int]:
    return [
        match
        for text in texts
        for match in compare_rows(network, predict(network, target, text)[0])
    ]
