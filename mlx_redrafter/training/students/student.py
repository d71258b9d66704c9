"""The interface that training needs from every kind of drafter.

Every kind is measured by chains. A draft of a chain is accepted if it and all before it are the
tokens of the text. So the logits that training unrolls along the text are those of decoding.

Axes: B positions, S unroll steps, p roots, H hidden size, V rows of the head, L beam length.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.proposers.checkpoint import write_drafter
from mlx_redrafter.training.batches import HeadRows, ShardGroup, gather
from mlx_redrafter.training.generated_texts import read_following, sample_posterior_noise
from mlx_redrafter.training.loss import TrainingBatch, draft_loss
from mlx_redrafter.training.teacher_cache import Shard
from mlx_redrafter.training_options import Recipe

# Default share of the positions that draft, drawn in every step.
ANCHOR_SHARE = 1 / 3


class Student(ABC):
    """A drafter of some kind during its training.

    Attributes:
        network: Weights, in float32, and sizes.
        name: Name of the kind, as a phrase with an article if it has one.
        reads_context: Whether the drafter attends to the context, so that its examples are
            stretches of text; otherwise it drafts from one state of the target.
        layers: Layers of the target whose inputs the drafter reads, () for the last hidden states.
        anchor_share: Share of the positions that draft, drawn in every step.
    """

    name: str
    reads_context = False
    layers: Sequence[int] = ()
    anchor_share = ANCHOR_SHARE

    def __init__(self, network: nn.Module):
        self.network: Any = network

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """Default of the peak learning rate."""

    @property
    def summary(self) -> str:
        """Sizes, and calibration if the drafter has one, in words."""
        config = self.network.config
        text: str = config.summary
        if hasattr(config, "inverse_temperature"):
            scale, share = config.inverse_temperature, config.coupling_weight
            text += f"; score scale {scale:.2f}, noise share {share:g}"
        return text

    @property
    def head_rows(self) -> int:
        """Number of tokens that the drafter can propose, V."""
        return int(self.network.config.head_rows)

    @property
    def vocab_size(self) -> int:
        return int(self.network.config.vocab_size)

    @property
    def row_ids(self) -> mx.array | None:
        """Token ids of the rows of a reduced head, integer, shape (V,); None for a full one."""
        return self.network.get("token_ids")

    @property
    def rows(self) -> HeadRows:
        ids = self.row_ids
        return HeadRows(None if ids is None else np.array(ids), self.vocab_size)

    def new_network(self) -> nn.Module:
        """Create a network of the same sizes, whose random weights are not computed."""
        network: nn.Module = type(self.network)(self.network.config)
        return network

    def start_from_head(self, head: mx.array | None) -> None:  # noqa: B027
        """Replace some of the random weights, most often by the target's head.

        ``head`` has the rows of the tokens that the drafter can propose; None if it is no matrix.
        """

    def initialise(
        self, head: mx.array | None, seed: int, token_ids: NDArray[np.int32] | None = None
    ) -> None:
        """Create the initial weights of a training run. Seeds MLX's global random state.

        Args:
            head: The target's head as a matrix, shape (all tokens, H), None if it is not one.
            seed: Random seed for the weights.
            token_ids: Token id of each row of a reduced head, ascending, int32; None for a full
                one.
        """
        mx.random.seed(seed)
        self.network = self.new_network()
        if token_ids is not None:
            self.network.token_ids = mx.array(token_ids)
            head = None if head is None else head[self.network.token_ids]
        self.start_from_head(head)
        mx.eval(self.network.parameters())

    @property
    def coupling_weight(self) -> float:
        """Weight of the target's Gumbel noise in the ranking of drafts, 0 to 1."""
        return float(self.network.coupling_weight)

    @abstractmethod
    def levels(self, network: Any, batch: TrainingBatch) -> Iterator[mx.array]:
        """Compute a network's logits after the root, then after each draft but the last.

        Float32, shape (B, V) each; arbitrary where the weight is 0.
        """

    def logits(self, network: Any, batch: TrainingBatch) -> mx.array:
        """Compute the logits of all `levels` at once, shape (B, S, V)."""
        return mx.stack(list(self.levels(network, batch)), axis=1)

    def loss(
        self, network: Any, batch: TrainingBatch, counts: mx.array, recipe: Recipe
    ) -> mx.array:
        return draft_loss(self.logits(network, batch), batch, counts, recipe)

    def leave_target(self) -> None:  # noqa: B027
        """Drop the references to the target that training does not need."""

    def save(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Write the network, with further keys for its ``config.json``."""
        write_drafter(self.network, folder, extra)

    def calibrate(self, texts: Iterable[Shard]) -> None:  # noqa: B027
        """Fit the scalars that rank drafts to self-generated texts, if the drafter has any."""

    def count_accepted(
        self, shard: Shard, roots: NDArray[np.int64], length: int, temp: float
    ) -> NDArray[np.int64]:
        """Count the drafts of a chain accepted in a step from each root, int64, shape (p,).

        Args:
            shard: Texts.
            roots: Indices of consecutive tokens of one text, none the first one, shape (p,).
            length: L.
            temp: Sampling temperature of the text; 0 drafts without Gumbel noise.
        """
        starts = np.array(shard.starts)
        # A drafter that attends to the context needs all of it.
        begin = starts[np.searchsorted(starts, roots[0], side="right") - 1]
        first = int(begin) if self.reads_context else int(roots[0]) - 1
        positions = np.arange(first, int(roots[-1]))
        group = ShardGroup(shard, roots, np.ones((shard.tokens.shape[0], length - 1), np.bool_))
        batch = gather(group, positions, len(positions), length, HeadRows())
        following = read_following(shard, roots, length)
        noise: mx.array | None = None
        if temp:
            states = mx.arange(int(roots[0]), int(roots[-1]) + length - 1)
            noise = sample_posterior_noise(shard, states, self.vocab_size, temp)
            noise = noise[:, : self.head_rows] if self.row_ids is None else noise[:, self.row_ids]
        is_right = np.ones(len(roots), np.bool_)
        count = np.zeros(len(roots), np.int64)
        for depth, logits in enumerate(self.levels(self.network, batch)):
            logits = logits[-len(roots) :]
            if noise is not None:
                here = noise[depth : depth + len(roots)]
                logits = logits / temp + self.coupling_weight * here
            chosen = self.network.to_token_ids(mx.argmax(logits, axis=-1))
            is_right &= np.array(chosen) == following[:, depth]
            count += is_right
        return count

    def holding(self, network: nn.Module) -> Self:
        other = copy.copy(self)
        other.network = network
        return other

    def with_weights(self, weights: Mapping[str, mx.array]) -> Self:
        """Copy this student with other weights; it shares the weights that are not given."""
        network = self.new_network()
        network.update(self.network.parameters())
        network.load_weights(list(weights.items()), strict=False)
        network.eval()
        return self.holding(network)

    def in_dtype(self, dtype: mx.Dtype) -> Self:
        other = self.with_weights({})
        other.network.set_dtype(dtype)
        return other
