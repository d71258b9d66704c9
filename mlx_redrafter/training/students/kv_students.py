"""Students that attend to the context: EAGLE heads, MTP modules, SpecFormers, block drafters.

Axes: n positions of a stretch of text, B of them with a block after them, S slots or unroll steps,
H hidden size, V rows of the head.

EAGLE heads and MTP modules draft a token at a time. Their first level reads the states of the
target. Every further level reads the outputs that the level before fed back, one position later, as
in decoding: row q of level i drafts after the root at position q - i. It attends to the entries of
the first level up to there, and to one entry of each level since (training-time test of EAGLE-3,
arXiv 2503.01840). The slots of a SpecFormer draft all levels in parallel. Block drafters draft
blocks after some of the positions.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ConcatenateKVCache

from mlx_redrafter.proposers.block.along_text import calibrate, read_blocks, score_levels
from mlx_redrafter.proposers.block.network import BlockNetwork
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.kv_drafting import AutoregressiveNetwork, KvNetwork
from mlx_redrafter.proposers.mtp.network import Mtp
from mlx_redrafter.proposers.specformer import SpecFormer
from mlx_redrafter.target.hooks import FINAL
from mlx_redrafter.target.target import Target
from mlx_redrafter.training.generated_texts import iterate_texts
from mlx_redrafter.training.loss import TrainingBatch, draft_loss
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training.teacher_cache import Shard
from mlx_redrafter.training_options import Recipe

# Share of the positions of a stretch that draft: 512 of 4,096, as DeepSpec trains DSpark.
BLOCK_SHARE = 1 / 8


class KvStudent(Student):
    """A network that attends to the context, and uses the target's embedding and maybe its head."""

    reads_context = True
    network: KvNetwork

    def __init__(self, network: KvNetwork, target: Target):
        super().__init__(network)
        self.target = target
        captured = tuple(network.captured_layers(target))
        if captured != (FINAL,):
            self.layers = captured
            target.modules.watch(captured)

    @property
    def learning_rate(self) -> float:
        """1e-3 for 640 wide states, inverse to their width."""
        return min(0.64 / self.target.hidden_size, 1e-2)


class AutoregressiveStudent(KvStudent):
    network: AutoregressiveNetwork

    def levels(self, network: AutoregressiveNetwork, batch: TrainingBatch) -> Iterator[mx.array]:
        embeddings = self.target.modules.embed(batch.following)
        features = network.fuse(batch.states)
        caches = [LevelEntries() for _ in range(network.num_layers)]
        for level, mask in enumerate(level_masks(batch.sequences, batch.tokens.shape[1] - 1)):
            for cache in caches:
                cache.begin(mask)
            outputs = network(features, embeddings, caches)
            drafting = outputs[mx.minimum(batch.anchors + level, len(outputs) - 1)]
            logits = network.logits(drafting, self.target)[:, : self.head_rows]
            yield logits.astype(mx.float32)
            fed_back = network.feed_back(outputs)
            features = mx.concatenate([mx.zeros_like(fed_back[:1]), fed_back[:-1]])


class EagleStudent(AutoregressiveStudent):
    """An EAGLE head. The head of EAGLE-3 begins as the target's head."""

    network: Eagle

    @property
    def name(self) -> str:  # type: ignore[override]
        papers = {1: "2401.15077", 3: "2503.01840"}
        config = self.network.config
        return f"an {config.name} head (arXiv {papers[config.version]})"

    def start_from_head(self, head: mx.array | None) -> None:
        if head is not None and self.network.config.version == 3:
            self.network.lm_head.weight = mx.array(head)


class MtpStudent(AutoregressiveStudent):
    name = "an MTP module (arXiv 2412.19437)"
    network: Mtp

    def new_network(self) -> Mtp:
        return Mtp(self.network.config.values)


class SpecFormerStudent(KvStudent):
    name = "a SpecFormer"
    network: SpecFormer

    def levels(self, network: SpecFormer, batch: TrainingBatch) -> Iterator[mx.array]:
        cache = LevelEntries()
        cache.begin(next(level_masks(batch.sequences, 1)))
        outputs = network(network.fuse(batch.states), mx.array([]), [cache])
        slots = network.slots(outputs[batch.anchors], batch.tokens.shape[1] - 1)
        for slot in range(slots.shape[1]):
            logits = network.logits(slots[:, slot], self.target)[:, : self.head_rows]
            yield logits.astype(mx.float32)


class BlockStudent(KvStudent):
    """A DFlash, DFlash 2 or DSpark drafter."""

    network: BlockNetwork
    anchor_share = BLOCK_SHARE

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
            confidences = network.confidences(outputs, batch.tokens[:, :-1]).squeeze(-1)
        return draft_loss(logits, batch, counts, recipe, confidences)

    def calibrate(self, texts: Iterable[Shard]) -> None:
        self.network.config = calibrate(self.network, self.target, iterate_texts(texts))


def _norm_weight(target: Target) -> mx.array:
    """Compute the factors of the target's final norm, float32, shape (H,); its biases cancel."""
    signs = 1.0 - 2.0 * (mx.arange(target.hidden_size) % 2)
    modules = target.modules
    rows = modules.normalise(mx.stack([signs, -signs]).astype(modules.dtype)).astype(mx.float32)
    return signs * (rows[0] - rows[1]) / 2


class LevelEntries(ConcatenateKVCache):
    """K/V entries of one layer during training, of all levels, with the newest level's mask."""

    def begin(self, mask: mx.array) -> None:
        """Begin a level; its entries have the positions of the first one."""
        self.mask, self.offset = mask, 0

    def make_mask(self, *arguments: Any, **options: Any) -> mx.array:
        return self.mask


def level_masks(sequences: mx.array, num_levels: int) -> Iterator[mx.array]:
    """Build the mask of each level, (n, levels * n), to the entries of all levels so far."""
    queries, keys = mx.arange(len(sequences))[:, None], mx.arange(len(sequences))[None]
    is_same = sequences[:, None] == sequences[None]
    for level in range(num_levels):
        aside = [keys == queries - level + i for i in range(1, level + 1)]
        yield mx.concatenate([is_same & (keys <= queries - level), *aside], axis=1)
