"""Calibration of block drafters on sequences of their target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import mlx.core as mx

from mlx_redrafter.proposers.block.along_text import read_blocks, score_levels
from mlx_redrafter.proposers.block.config import BlockConfig
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.proposers.fit import Prediction, ReadSequence, fit_depths
from mlx_redrafter.target.target import Target


def predict(network: BlockNetwork, target: Target, text: ReadSequence) -> list[Prediction]:
    """Predict the depths of a block after each generated token, after drafts that were right."""
    tokens, first, last = text.tokens, text.num_prompt, text.tokens.shape[0] - 1
    depths = min(network.config.num_drafts, last - first)
    states = text.states.astype(network.dtype)
    same = mx.zeros((last,), dtype=mx.int32)
    anchors = mx.arange(first - 1, last, dtype=mx.int32)
    outputs = read_blocks(network, target, tokens[first:], states, same, anchors, depths)
    ahead = anchors[:, None] + 1 + mx.arange(depths)
    given = tokens[mx.minimum(ahead, last)]
    return [
        Prediction(logits[: last - first - depth], *(one[1 + depth :] for one in text[3:]))
        for depth, logits in enumerate(score_levels(network, target, outputs, given))
    ]


def calibrate(network: BlockNetwork, target: Target, texts: Iterable[ReadSequence]) -> BlockConfig:
    """Return the config, with fitted scalars if a text is long enough; waits for the device."""
    usable = (text for text in texts if text.tokens.shape[0] > text.num_prompt + 1)
    found, scales = fit_depths(network, (predict(network, target, text) for text in usable))
    if not scales:
        return network.config
    config: BlockConfig = found.applied(network.config)
    missing = [found.inverse_temperature] * (config.num_drafts - len(scales))
    return replace(config, depth_scales=(*scales, *missing))
