"""Block drafters as students: blocks after some positions of a stretch of text.

Axes: N positions, B of them with a block after them, S unroll steps, H hidden size, V rows of the
head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import mlx.core as mx

from mlx_redrafter.proposers.block.along_text import read_blocks, score_levels
from mlx_redrafter.proposers.block.fit_block import calibrate
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.target.target import Target
from mlx_redrafter.training.generated_texts import iterate_texts
from mlx_redrafter.training.loss import TrainingBatch, draft_loss
from mlx_redrafter.training.students.kv_students import KvStudent
from mlx_redrafter.training.teacher_cache import Shard
from mlx_redrafter.training_options import Recipe

# Share of the positions of a stretch that draft: 512 of 4,096, as DeepSpec trains DSpark.
ANCHOR_SHARE = 1 / 8


class BlockStudent(KvStudent):
    """A DFlash, DFlash 2 or DSpark drafter."""

    network: BlockNetwork
    anchor_share = ANCHOR_SHARE

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"a {self.network.config.name} drafter"

    def start_from_head(self, head: mx.array | None) -> None:
        """Begin with the target's final norm, as the head is the target's.

        Convolutions begin as the identity, and the features of a selector near one, as the product
        of zeros would have no gradient.
        """
        network = self.network
        network.norm.weight = _norm_weight(self.target)
        for layer in network.layers:
            for part in (layer.get("attention_conv"), layer.get("mlp_conv")):
                if part is not None:
                    part.base_kernel[:, 0] = 1
                    part.kernel_projection.weight = mx.zeros_like(part.kernel_projection.weight)
        if (selector := network.get("candidate_selector")) is not None:
            shape = selector.predecessor_codebook.shape
            selector.predecessor_codebook = 1 + 0.1 * mx.random.normal(shape)

    def outputs(self, network: BlockNetwork, batch: TrainingBatch) -> mx.array:
        """Compute the outputs of a block after each anchor, shape (B, S, H)."""
        levels, roots = batch.tokens.shape[1] - 1, batch.tokens[:, 0]
        states, sequences, anchors = batch.states, batch.sequences, batch.anchors
        return read_blocks(network, self.target, roots, states, sequences, anchors, levels)

    def levels(self, network: BlockNetwork, batch: TrainingBatch) -> Iterator[mx.array]:
        return score_levels(network, self.target, self.outputs(network, batch), batch.tokens)

    def loss(
        self, network: BlockNetwork, batch: TrainingBatch, counts: mx.array, recipe: Recipe
    ) -> mx.array:
        outputs = self.outputs(network, batch)
        levels = score_levels(network, self.target, outputs, batch.tokens)
        logits = mx.stack(list(levels), axis=1)
        confidences = None
        if network.config.has_confidence:
            found = [
                network.confidences(outputs[:, depth], batch.tokens[:, depth])
                for depth in range(outputs.shape[1])
            ]
            confidences = mx.concatenate(found, axis=1)
        return draft_loss(logits, batch, counts, recipe, confidences)

    def calibrate(self, texts: Iterable[Shard]) -> None:
        self.network.config = calibrate(self.network, self.target, iterate_texts(texts))


def _norm_weight(target: Target) -> mx.array:
    """Compute the factors of the target's final norm, float32, shape (H,); its biases cancel."""
    signs = 1.0 - 2.0 * (mx.arange(target.hidden_size) % 2)
    modules = target.modules
    rows = modules.normalise(mx.stack([signs, -signs]).astype(modules.dtype)).astype(mx.float32)
    return signs * (rows[0] - rows[1]) / 2
