"""Conversion of block drafters.

Trainers disagree which entry of a block predicts the first draft, and whether a layer's number
means its input or its output. They also rotate different pairs of a head's numbers, and some leave
out the target's scale of embeddings. So the self-test tries these readings of a config, too.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.foreign import ForeignDrafter
from mlx_redrafter.convert.selftest import AS_IT_SAYS, Reading, choose_reading
from mlx_redrafter.convert.source import Source
from mlx_redrafter.proposers.block import check_masks
from mlx_redrafter.proposers.block.along_text import calibrate, predict
from mlx_redrafter.proposers.block.config import BlockConfig
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.proposers.block.published import packaging_of, read_published, resolve_stored
from mlx_redrafter.target.target import Target


class ForeignBlock(ForeignDrafter):
    noun = "a block drafter"
    linked = "A block drafter"
    network = BlockNetwork
    config: BlockConfig

    def __init__(self, source: Source, options: ConversionOptions):
        super().__init__(source, options)
        self.config, self.names = read_published(source.config, source.shapes)
        self.check()
        self.name_set = self.config.name
        self.kind = f"a {self.config.name} drafter, {packaging_of(source.config)}"

    def read(self) -> dict[str, mx.array]:
        check_masks(self.source.folder)
        weights = super().read()
        resolve_stored(weights, self.source.config)
        return weights

    def test(
        self, network: BlockNetwork, target: Target, tokenizer: TokenizerWrapper
    ) -> Reading[BlockNetwork]:
        found = try_readings(network, target, tokenizer)
        found.network.config = calibrate(found.network, target, found.texts)
        return found


def try_readings(
    network: BlockNetwork, target: Target, tokenizer: TokenizerWrapper
) -> Reading[BlockNetwork]:
    readings = {}
    for reading, config in _readings(network.config, target):
        readings[reading] = copy.copy(network)
        readings[reading].become(config)
    return choose_reading(readings, target, tokenizer, lambda *given: predict(*given)[0])


def _readings(config: BlockConfig, target: Target) -> Iterator[tuple[str, BlockConfig]]:
    """List what the config of a drafter may mean, itself first."""
    yield AS_IT_SAYS, config
    if config.block_size > 1 and config.link != "recurrent":
        slot = 1 - config.first_slot
        yield f"entry {slot} first", replace(config, first_slot=slot, depth_scales=None)
    for name, step in (("earlier layers", -1), ("later layers", 1)):
        layers = tuple(layer + step for layer in config.captured_layers)
        if 0 <= min(layers) and max(layers) <= len(target.modules.layers):
            yield name, replace(config, captured_layers=layers)
    other = "halves" if config.rope_traditional else "neighbours"
    yield f"{other} rotated", replace(config, rope_traditional=not config.rope_traditional)
    if config.has_embedding:
        return
    norm, factor = target.modules.entry
    if norm is not None:
        other = "normalised" if config.skips_embedding_norm else "not normalised"
        skips = not config.skips_embedding_norm
        yield f"embeddings {other}", replace(config, skips_embedding_norm=skips)
    elif factor != 1:
        scale = config.embed_scale / factor
        yield "embeddings not scaled", replace(config, embed_scale=scale)
