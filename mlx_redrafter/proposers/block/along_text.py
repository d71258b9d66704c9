"""Blocks after several tokens of a text at once, for training and calibration.

Axes: n tokens with states, M anchors (the tokens before roots), B entries of a block, D depths, H
hidden size, V rows of the head, S width of the target's states.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import mlx.core as mx

from mlx_redrafter.proposers.block.config import BlockConfig
from mlx_redrafter.proposers.block.layers import BlockAttention
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.proposers.fit import Prediction, ReadSequence, fit_depths
from mlx_redrafter.target.target import Target


def read_blocks(
    network: BlockNetwork,
    target: Target,
    roots: mx.array,
    states: mx.array,
    sequences: mx.array,
    anchors: mx.array,
    levels: int,
) -> mx.array:
    """Process a block after each anchor; the outputs of its depths have shape (M, D, H).

    The ``states`` of the target have shape (n, S), the numbers of the ``sequences`` that tokens
    belong to, integer, (n,). ``anchors`` are the indices, int32, of the tokens before ``roots``,
    (M,).
    """
    blocks = network.embed_blocks(roots, network.block_size(levels), target)
    around = TextSurroundings(network, network.fuse(states), sequences, anchors)
    slot = network.config.first_slot
    return network.outputs(blocks, around)[:, slot : slot + levels]


def score_levels(
    network: BlockNetwork, target: Target, outputs: mx.array, tokens: mx.array
) -> Iterator[mx.array]:
    """Compute the logits of each depth after given drafts, float32, shape (M, V).

    ``outputs`` are those of `read_blocks`, and ``tokens`` the root and the drafts before the last
    depth, integer, shape (M, D). If the link scores some candidates of a depth, the other tokens
    have logits without it.
    """
    state, count = None, network.config.num_candidates
    for depth in range(outputs.shape[1]):
        unary = network.logits(outputs[:, depth], target)
        if network.link is None:
            yield unary
            continue
        feature, state = network.link.feature(tokens[:, depth], outputs[:, depth], state)
        linked = unary + network.link.scores(feature, None).astype(mx.float32)
        if count is not None and count < unary.shape[-1]:
            least = mx.min(mx.topk(mx.stop_gradient(unary), count), axis=-1, keepdims=True)
            linked = mx.where(unary >= least, linked, unary)
        yield linked


class TextSurroundings:
    """The tokens of a text, and a block after some of them; a `Surroundings`.

    ``features`` are those of all tokens, shape (n, H); the rest is as for `read_blocks`.
    """

    def __init__(
        self, network: BlockNetwork, features: mx.array, sequences: mx.array, anchors: mx.array
    ):
        self.network, self.features = network, features
        self.offset = anchors + 1
        self._is_same = sequences[anchors, None] == sequences[None]
        # From a block's first entry to a token.
        self._distances = self.offset[:, None] - mx.arange(features.shape[0])

    def attend(self, attention: BlockAttention, queries: mx.array, x: mx.array) -> mx.array:
        """Attend to the text, whose entries all blocks share, and to the own block."""
        own, sinks = attention.keys_values(x, self.offset), attention.sinks
        keys, values = (x[0] for x in attention.keys_values(self.features[None], 0))
        blocks, heads, size, width = queries.shape
        groups, count = keys.shape[0], keys.shape[1]
        q = queries.reshape(blocks, groups, -1, width).swapaxes(0, 1)  # (groups, M, heads * B, D)
        to_text = q.reshape(groups, -1, width) @ keys.swapaxes(1, 2)
        to_own = q @ own[0].swapaxes(0, 1).swapaxes(2, 3)
        shape = (groups, blocks, heads // groups, size)
        scores = mx.concatenate(
            [to_text.reshape(*shape, count), to_own.reshape(*shape, size)], axis=-1
        )
        scores = attention.scale * scores
        scores = mx.where(self._mask(attention.index, size)[:, None], scores, -mx.inf)
        if sinks is not None:
            column = sinks.reshape(groups, 1, -1, 1, 1).astype(scores.dtype)
            scores = mx.concatenate([scores, mx.broadcast_to(column, (*shape, 1))], axis=-1)
        weights = mx.softmax(scores, axis=-1, precise=True)
        of_text = weights[..., :count].reshape(groups, -1, count) @ values
        of_own = weights[..., count : count + size].reshape(groups, blocks, -1, size)
        out = of_text.reshape(q.shape) + of_own @ own[1].swapaxes(0, 1)
        return out.swapaxes(0, 1).reshape(queries.shape)

    def _mask(self, layer: int, size: int) -> mx.array:
        """Build the mask of blocks to tokens and to themselves, (M, B, n + B)."""
        config, entries = self.network.config, mx.arange(size)
        seen = (self._is_same & (self._distances > 0))[:, None]
        window = config.windows[layer]
        if window is not None:
            further = 0 if config.windows_from_root else entries[:, None]
            seen = seen & (self._distances[:, None] + further < window)
        blocks, count = self._distances.shape
        seen = mx.broadcast_to(seen, (blocks, size, count))
        own = entries[None] <= (entries[:, None] if config.causal[layer] else size)
        return mx.concatenate([seen, mx.broadcast_to(own, (blocks, size, size))], axis=-1)


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
    config, scales = fit_depths(network, (predict(network, target, text) for text in usable))
    if not scales:
        return network.config
    missing = [config.inverse_temperature] * (config.num_drafts - len(scales))
    return replace(config, depth_scales=(*scales, *missing))
