"""Conversion of block drafters, and a trial of what their configs may leave open.

Who trained a drafter decides which entry of a block predicts the first draft, and how the target's
layers are numbered. A wrong choice leaves the text right and loses accepted drafts. So a trial
counts the first drafts that the target accepts, as the config says and otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.convert.conversion_options import ConversionOptions
from mlx_redrafter.convert.names import NamedTensors
from mlx_redrafter.convert.output import QUANTISED, ConvertedDrafter, fill
from mlx_redrafter.convert.selftest import SelfTest, decode_all, is_clearly_better, load_target
from mlx_redrafter.convert.shapes import check_dtypes
from mlx_redrafter.convert.source import Source
from mlx_redrafter.convert.stored import read_weights
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.escaping import join_shortened, quote
from mlx_redrafter.proposers.block.along_text import read_blocks, score_levels
from mlx_redrafter.proposers.block.config import BlockConfig
from mlx_redrafter.proposers.block.fit_block import calibrate
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.proposers.block.published import (
    block_config,
    own_names,
    packaging_of,
    resolve_stored,
    target_of,
)
from mlx_redrafter.proposers.checkpoint import check_shapes
from mlx_redrafter.proposers.fit import Calibration, ReadSequence
from mlx_redrafter.proposers.layer_sizes import build
from mlx_redrafter.proposers.quantization import quantize_drafter
from mlx_redrafter.target.target import Target


class Trial(NamedTuple):
    """Result of `try_layouts`.

    Attributes:
        network: The network, with the layout whose drafts the target accepts.
        matches: For each token of the texts, 1 if its first draft is the target's, else 0.
        line: One line that says what was tried and found.
    """

    network: BlockNetwork
    matches: list[int]
    line: str


def describe_block(source: Source, network: BlockNetwork) -> str:
    """Describe the kind of a drafter, and the model that its config names."""
    target = target_of(source.config)
    kind = f"{network.config.name} drafter, packaging: {packaging_of(source.config)}"
    return kind + (f", for {quote(target)}" if target else "")


def open_block(source: Source) -> tuple[BlockNetwork, NamedTensors]:
    """Create a drafter of the right sizes without weights, and map the names of its weights."""
    names = own_names(source.tensors)
    shapes = {own: source.tensors[name].shape for own, name in names.items()}
    network = build(BlockNetwork, block_config(source.config, shapes))
    if network.config.draft_vocab_size is None:
        names.pop("token_ids", None)
        shapes.pop("token_ids", None)
    check_shapes(network, shapes, source.name, names)
    check_dtypes(names, source.tensors, "use a drafter that is not quantised")
    left_out = sorted(source.tensors.keys() - names.values())
    notes = [f"not needed, left out: {join_shortened(map(quote, left_out))}"] if left_out else []
    return network, NamedTensors("block", names, tuple(notes))


def convert_block(source: Source, options: ConversionOptions) -> ConvertedDrafter:
    """Convert a block drafter; see `conversion.convert_drafter`."""
    if "quantization" in source.config:
        raise CheckpointError(QUANTISED)
    network, named = open_block(source)
    weights = read_weights(named.sources, source.tensors, options.dtype)
    resolve_stored(weights, named.sources, source.config)
    fill(network, weights, source.name, None)
    measured, notes = None, list(named.notes)
    warnings: tuple[str, ...] = ()
    if options.target is not None:
        target, tokenizer = load_target(options.target)
        network.check_fit(target, tokenizer)
        layers = _layers_to_try(network.config, len(target.blocks))
        target.watch(layers)
        texts = decode_all(target, tokenizer, layers)
        network, matches, line = try_layouts(network, target, layers, texts)
        of_network = [_only(text, layers, network.config.captured_layers) for text in texts]
        network.config = calibrate(network, target, of_network)
        scalars = network.config.inverse_temperature, network.config.coupling_weight
        measured = replace(SelfTest.of(matches), calibration=Calibration(*scalars))
        warnings = measured.warnings()
        notes.append(line)
    if options.quantization is not None:
        quantize_drafter(network, options.quantization.bits, options.quantization.group_size)
        mx.eval(network.parameters())
    return ConvertedDrafter(
        network, named.name_set, measured, notes, warnings, target_of(source.config)
    )


def try_layouts(
    network: BlockNetwork, target: Target, layers: Sequence[int], texts: Sequence[ReadSequence]
) -> Trial:
    """Try what a config may leave open, one thing after the other, and keep what is clearly better.

    Args:
        network: The network, not quantised.
        target: Its target.
        layers: Layers of the target that the states of the texts come from.
        texts: Texts of the target.
    """

    def matches_of(tried: BlockNetwork) -> list[int]:
        found = [_match(tried, target, layers, text) for text in texts]
        return [match for one in found for match in one]

    best, tried, kept = matches_of(network), [], []
    tried.append(f"{_share(best)} as config.json says")
    for variants in _VARIANTS:
        # Each is a change of the layout found so far.
        for name, config in variants(network.config, target):
            if not set(config.captured_layers) <= set(layers):
                continue
            other = _with_config(network, config)
            matches = matches_of(other)
            tried.append(f"{_share(matches)} with {name}")
            if is_clearly_better(matches, best):
                network, best = other, matches
                kept.append(name)
    decision = f"kept {' and '.join(kept) if kept else 'the config'}"
    line = f"first drafts that the target accepts: {', '.join(tried)}; {decision}"
    return Trial(network, best, line)


def _slots(config: BlockConfig, target: Target) -> Iterator[tuple[str, BlockConfig]]:
    slot = 1 - config.first_slot
    if config.link != "recurrent" and config.block_size > 1:
        yield (
            f"the first draft at entry {slot}",
            replace(config, first_slot=slot, depth_scales=None),
        )


def _shifts(config: BlockConfig, target: Target) -> Iterator[tuple[str, BlockConfig]]:
    for shift, name in ((-1, "earlier"), (1, "later")):
        layers = tuple(layer + shift for layer in config.captured_layers)
        if 0 <= min(layers) and max(layers) <= len(target.blocks):
            yield f"layers one {name}", replace(config, captured_layers=layers)


def _rotations(config: BlockConfig, target: Target) -> Iterator[tuple[str, BlockConfig]]:
    is_other = not config.rope_traditional
    yield (
        f"{'neighbours' if is_other else 'halves'} rotated",
        replace(config, rope_traditional=is_other),
    )


def _embeddings(config: BlockConfig, target: Target) -> Iterator[tuple[str, BlockConfig]]:
    if not config.has_embedding and target.embedding_scale != 1:
        scale = config.embed_scale / target.embedding_scale
        yield "embeddings without the target's scale", replace(config, embed_scale=scale)


_VARIANTS = (_slots, _shifts, _rotations, _embeddings)


def _layers_to_try(config: BlockConfig, count: int) -> list[int]:
    """List the layers that a drafter reads, and their neighbours."""
    found = {layer + shift for layer in config.captured_layers for shift in (-1, 0, 1)}
    return sorted(layer for layer in found if 0 <= layer <= count)


def _with_config(network: BlockNetwork, config: BlockConfig) -> BlockNetwork:
    """Make a network with the same weights and another config."""
    other = BlockNetwork(config)
    other.load_weights(list(named_parameters(network).items()))
    return other


def _only(text: ReadSequence, layers: Sequence[int], kept: Sequence[int]) -> ReadSequence:
    """Keep the states of some layers, in their order."""
    parts = mx.split(text.states, len(layers), axis=-1)
    states = mx.concatenate([parts[layers.index(layer)] for layer in kept], axis=-1)
    return text._replace(states=states)


def _match(
    network: BlockNetwork, target: Target, layers: Sequence[int], text: ReadSequence
) -> list[int]:
    """Compare first drafts after each generated token with the target's: 1 if equal, else 0."""
    tokens, first = text.tokens, text.num_prompt
    states = _only(text, layers, network.config.captured_layers).states.astype(network.dtype)
    same = mx.zeros((states.shape[0],), dtype=mx.int32)
    outputs = read_blocks(network, target, tokens[1:], states, same, 1)[first - 1 : -1]
    logits = next(score_levels(network, target, outputs, tokens[first:-1, None]))
    drafts = network.to_token_ids(mx.argmax(logits, axis=-1))
    return to_ints(drafts == tokens[first + 1 :])


def _share(matches: Sequence[int]) -> str:
    return f"{sum(matches) / len(matches):.0%}"
