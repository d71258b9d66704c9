"""The interface that training needs from every kind of drafter, and simulated decoding with it.

Every kind is measured by chains. A draft of a chain is accepted if it and all before it are the
tokens of the text. So the logits that training unrolls along the text are those of decoding.

Decoding reproduces a text of the target. So drafting from the cached hidden states, and comparing
the drafts with the text, gives the steps of decoding without running the target. Sampled texts are
drafted with posterior Gumbel noise, as decoding with a seed ranks drafts with the target's.

Axes: B positions, S unroll steps, p roots, H hidden size, V rows of the head, L beam length.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.decoding.delivery import DecodingStats
from mlx_redrafter.training.batches import gather
from mlx_redrafter.training.generated_texts import (
    find_generated,
    read_following,
    sample_posterior_noise,
)
from mlx_redrafter.training.loss import TrainingBatch, draft_loss
from mlx_redrafter.training.teacher_cache import Shard
from mlx_redrafter.training_options import Recipe

# Default share of the positions that draft, drawn in every step.
ANCHOR_SHARE = 1 / 3
# Share of most probable tokens in a text above which the text counts as greedy.
GREEDY_SHARE = 0.97


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
        config = self.network.config
        return int(config.draft_vocab_size or config.vocab_size)

    @property
    def rows(self) -> mx.array | None:
        """Row of the head by token, int32, -1 for tokens without one; None if rows are tokens."""
        if (ids := self.network.row_ids) is None:
            return None
        rows = mx.full((self.network.config.vocab_size,), -1, dtype=mx.int32)
        rows[ids] = mx.arange(len(ids), dtype=mx.int32)
        return rows

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

        ``head`` is the target's as a matrix, shape (all tokens, H), None if it is not one.
        ``token_ids`` are those of the rows of a reduced head, ascending, int32.
        """
        mx.random.seed(seed)
        self.network = self.new_network()
        if token_ids is not None:
            self.network.token_ids = mx.array(token_ids)
            head = None if head is None else head[self.network.token_ids]
        self.start_from_head(head)
        mx.eval(self.network.parameters())

    @abstractmethod
    def levels(self, network: Any, batch: TrainingBatch) -> Iterator[mx.array]:
        """Compute a network's logits after the root, then after each draft but the last.

        Float32, shape (B, V) each; arbitrary where the weight is 0. The positions of a drafter that
        attends to the context are those of one stretch.
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

    def calibrate(self, texts: Iterable[Shard]) -> None:  # noqa: B027
        """Fit the scalars that rank drafts to self-generated texts, if the drafter has any."""

    def count_accepted(
        self, shard: Shard, roots: NDArray[np.int64], length: int, temp: float
    ) -> NDArray[np.int64]:
        """Count the drafts of a chain accepted in a step from each root, int64, shape (p,).

        ``roots`` are indices of consecutive tokens of one text, none the first one, shape (p,). The
        text was sampled at ``temp``; 0 drafts without Gumbel noise.
        """
        starts = np.array(shard.starts)
        # A drafter that attends to the context needs all of it.
        begin = starts[np.searchsorted(starts, roots[0], side="right") - 1]
        first = int(begin) if self.reads_context else int(roots[0]) - 1
        positions = np.arange(first, int(roots[-1]))
        steps = np.ones((shard.tokens.shape[0], length - 1), np.bool_)
        batch = gather(shard, steps, positions, len(positions), length)
        following = read_following(shard, roots, length)
        network, noise = self.network, None
        if temp:
            states = mx.arange(int(roots[0]), int(roots[-1]) + length - 1)
            noise = sample_posterior_noise(shard, states, network.config.vocab_size, temp)
            rows = network.row_ids
            noise = noise[:, : self.head_rows] if rows is None else noise[:, rows]
        is_right = np.ones(len(roots), np.bool_)
        count = np.zeros(len(roots), np.int64)
        for depth, logits in enumerate(self.levels(network, batch)):
            logits = logits[-len(roots) :]
            if noise is not None:
                here = noise[depth : depth + len(roots)]
                logits = logits / temp + network.coupling_weight * here
            chosen = network.to_token_ids(mx.argmax(logits, axis=-1))
            is_right &= np.array(chosen) == following[:, depth]
            count += is_right
        return count

    def with_weights(self, weights: dict[str, Any]) -> Self:
        """Copy this student with other parameters; it shares those that are not given."""
        network = self.new_network()
        network.update(self.network.parameters())
        network.update(weights)
        network.eval()
        other = copy.copy(self)
        other.network = network
        return other


def simulate(
    student: Student, shards: Iterable[Shard], length: int, temp: float = 0.0
) -> DecodingStats:
    """Count the steps of decoding all texts with chains of ``length`` tokens, roots included.

    ``temp`` is the temperature of the texts that are not greedy; 0 drafts them without Gumbel
    noise, like decoding with one of mlx-lm's samplers. The counts are as if all texts were one: of
    their first tokens, which belong to no step, one counts. Blocks until MLX has evaluated them.
    """
    total = DecodingStats(num_tokens=1)
    for shard in shards:
        for start, generated in find_generated(shard):
            roots = np.arange(start + generated[0], start + generated[-1])
            noise_temp = 0.0 if _is_greedy(shard, start + generated) else temp
            accepted = student.count_accepted(shard, roots, length, noise_temp)
            _walk(accepted.tolist(), length, total)
    return total


def _is_greedy(shard: Shard, generated: NDArray[np.int64]) -> bool:
    # In low precision a few tokens may differ.
    best = np.array(shard.top_ids[:, 0])[generated - 1]
    return bool(np.mean(best == np.array(shard.tokens)[generated]) > GREEDY_SHARE)


def _walk(accepted: Sequence[int], length: int, total: DecodingStats) -> None:
    root = 0
    while root < len(accepted):
        # The token after the accepted drafts is the bonus token, unless the text ends before it.
        step = min(accepted[root] + 1, len(accepted) - root)
        total.count_step(accepted[root], length)
        total.num_tokens += step
        root += step
