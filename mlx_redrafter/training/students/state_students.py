"""Students that draft from one state of the target: recurrent drafters and Medusa heads.

A new drafter's heads start as the target's head, and the residual blocks as the identity. A
recurrent drafter's head is projected on its leading singular directions if it is narrower. The
projection to that head starts random: if the target's state reached the head as in the target, the
drafter would first predict the root, which is known, and unlearning that took longer.

Axes: B positions, S unroll steps, V rows of the head, H hidden size, D exit_dim.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from numpy.typing import NDArray

from mlx_redrafter.proposers.medusa import network as medusa
from mlx_redrafter.proposers.medusa.network import Medusa
from mlx_redrafter.proposers.redrafter import network as redrafter
from mlx_redrafter.proposers.redrafter.network import Drafter, Embed
from mlx_redrafter.training.generated_texts import iterate_texts
from mlx_redrafter.training.loss import TrainingBatch
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training.teacher_cache import Shard


class RecurrentStudent(Student):
    name = "a recurrent drafter (ReDrafter, arXiv 2403.09919)"
    network: Drafter

    def __init__(self, network: Drafter, embed: Embed):
        super().__init__(network)
        self.embed = embed

    @property
    def learning_rate(self) -> float:
        """2e-3 for a head of 1024, inverse to its width."""
        return min(2.0 / self.network.config.exit_dim, 1.6e-2)

    def start_from_head(self, head: mx.array | None) -> None:
        drafter = self.network
        for block in drafter.lm_head[:-1]:
            block.update(tree_map(mx.zeros_like, block.parameters()))
        if head is not None:
            last = drafter.lm_head[-1]
            last.weight = _project_head(np.array(head.astype(mx.float32)), np.array(last.weight))

    def leave_target(self) -> None:
        """Replace the target's embedding by a table; blocks until MLX has evaluated it."""
        embedding = self.embed(mx.arange(self.network.config.vocab_size))
        mx.eval(embedding)
        self.embed = lambda tokens: embedding[tokens]

    def levels(self, network: Drafter, batch: TrainingBatch) -> Iterator[mx.array]:
        hidden = batch.states.astype(network.dtype)
        for state in self._states(network, batch):
            yield network.logits(hidden, state).astype(mx.float32)

    def logits(self, network: Drafter, batch: TrainingBatch) -> mx.array:
        """Compute the logits of all levels in one pass of the head."""
        hidden = batch.states[:, None].astype(network.dtype)
        states = mx.stack(list(self._states(network, batch)), axis=1)
        return network.logits(hidden, states).astype(mx.float32)

    def _states(self, network: Drafter, batch: TrainingBatch) -> Iterator[mx.array]:
        """Compute the states after the root and each draft but the last, shape (B, H)."""
        inputs = network.project_input(self.embed(batch.tokens[:, :-1]))  # (B, S, H)
        state = network.start(inputs[:, 0])
        yield state
        for step in range(1, inputs.shape[1]):
            state = network.advance(state, inputs[:, step])
            yield state

    def calibrate(self, texts: Iterable[Shard]) -> None:
        self.network.config = redrafter.calibrate(self.network, self.embed, iterate_texts(texts))


def _project_head(head: NDArray[np.float32], random: NDArray[np.float32]) -> mx.array:
    """Fit the target's head, shape (V, H), into random weights of the drafter's, shape (V, D)."""
    hidden, width = head.shape[1], random.shape[1]
    if width >= hidden:
        random[:, :hidden] = head
        return mx.array(random)
    # The nearest matrix of rank D: the head in the basis of its leading right singular vectors,
    # which are eigenvectors of a matrix that is small even if V is large.
    _, vectors = np.linalg.eigh(head.T @ head)
    return mx.array((head @ vectors[:, ::-1][:, :width]).astype(np.float32))


class MedusaStudent(Student):
    name = "Medusa heads (arXiv 2401.10774)"
    network: Medusa

    @property
    def learning_rate(self) -> float:
        """1e-3 for 1,000 wide states, inverse to their width."""
        return min(1.0 / self.network.config.hidden_size, 1.6e-2)

    def start_from_head(self, head: mx.array | None) -> None:
        for *blocks, output in self.network.heads:
            for block in blocks:
                block.update(tree_map(mx.zeros_like, block.parameters()))
            if head is not None:
                output.weight = mx.array(head)

    def levels(self, network: Medusa, batch: TrainingBatch) -> Iterator[mx.array]:
        for head in range(batch.tokens.shape[1] - 1):
            yield network.logits(batch.states, head).astype(mx.float32)

    def calibrate(self, texts: Iterable[Shard]) -> None:
        """Fit the scalars, and the acceptance rates by rank that choose the static tree."""
        network = self.network
        found = list(iterate_texts(texts))
        config = medusa.calibrate(network, found)
        network.config = replace(config, rank_accuracies=medusa.rank_accuracies(network, found))
