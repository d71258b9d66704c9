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
from typing import NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.checkpoints.loading import load
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.output import ConvertedDrafter, finish_loaded
from mlx_redrafter.convert.selftest import SelfTest, compare_rows, decode_all, with_layers
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
    finish_loaded(network, source.name, own_names(source.tensors), options)
    if options.target is None:
        return ConvertedDrafter(network, network.config.name, None)
    measured, note = _test(network, options.target)
    return ConvertedDrafter(network, network.config.name, measured, [note], measured.warnings())


def _test(network: BlockNetwork, name: str | Path) -> tuple[SelfTest, str]:
    """Choose the reading of the config that the target accepts most, and calibrate with it."""
    model, tokenizer, _ = load(name)
    target = Target(model)
    network.check_fit(target, tokenizer)
    trial = try_readings(network, target, tokenizer)
    network.become(trial.config)
    network.config = calibrate(network, target, trial.texts)
    return SelfTest.of(trial.matches), trial.line


class Trial(NamedTuple):
    """Result of `try_readings`.

    Attributes:
        config: The reading of the config that the target accepts most.
        matches: For each token of the texts, 1 if the first draft is the target's, else 0.
        texts: Texts of the target, with the states that the drafter reads.
        line: One line that says what was tried and found.
    """

    config: BlockConfig
    matches: list[int]
    texts: list[ReadSequence]
    line: str


def try_readings(network: BlockNetwork, target: Target, tokenizer: TokenizerWrapper) -> Trial:
    """Compare first drafts with the target's tokens, by each reading of a drafter's config.

    Another reading is chosen if it is better by more than chance.
    """
    readings = dict(_readings(network.config, target))
    layers = sorted({layer for config in readings.values() for layer in config.captured_layers})
    target.watch(layers)
    texts = decode_all(target, tokenizer, layers)

    def read(config: BlockConfig) -> list[ReadSequence]:
        return [with_layers(text, layers, config.captured_layers) for text in texts]

    found = {
        reading: _first_matches(network, config, target, read(config))
        for reading, config in readings.items()
    }
    own, *others = found
    best = max(others, key=lambda reading: sum(found[reading]), default=own)
    chosen = best if SelfTest.of(found[own], found[best]).other_is_better else own
    tried = ", ".join(f"{name} {sum(one) / len(one):.0%}" for name, one in found.items())
    line = f"first drafts accepted by reading of the config: {tried}; used {chosen}"
    return Trial(readings[chosen], found[chosen], read(readings[chosen]), line)


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
    network: BlockNetwork, config: BlockConfig, target: Target, texts: Sequence[ReadSequence]
) -> list[int]:
    """Compare first drafts with the target's tokens, by another config: 1 if equal, else 0."""
    other = copy.copy(network)
    other.become(config)
    return [
        match for text in texts for match in compare_rows(other, predict(other, target, text)[0])
    ]
