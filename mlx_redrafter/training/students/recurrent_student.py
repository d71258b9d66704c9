"""The recurrent drafter as a student.

A new drafter's head starts as the target's head, projected on its leading singular directions if
the drafter's is narrower; the residual blocks start as the identity. The projection to the head
starts random. If the target's state reached the head as in the target, the drafter would first
predict the root, which is known; unlearning that took longer than learning from random weights.

Axes: B positions, S unroll steps, p roots, V rows of the head, H hidden size, D exit_dim, L beam
length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.decoding.accept import count_matches
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.proposers.expansion import best_nodes
from mlx_redrafter.proposers.redrafter.beam import coupled_rank, expand
from mlx_redrafter.proposers.redrafter.fit_drafter import calibrate
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.redrafter.recurrence import Embed
from mlx_redrafter.target.target import FINAL
from mlx_redrafter.training.generated_texts import (
    draw_noise,
    iterate_generated_texts,
    read_following,
)
from mlx_redrafter.training.loss import TrainingBatch
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training.teacher_cache import Shard

# Maximum number of positions drafted at once.
MAX_POSITIONS = 512
# Maximum size of the float32 logits computed at once, in bytes.
LOGITS_BYTES = 2**26


class RecurrentStudent(Student):
    """A recurrent drafter."""

    name = "a recurrent drafter (ReDrafter, arXiv 2403.09919)"
    network: Drafter

    def __init__(self, network: Drafter, embed: Embed):
        super().__init__(network)
        self.embed = embed
        self.layers = network.config.captured_layers or ()

    @property
    def learning_rate(self) -> float:
        """2e-3 for a head of 1024, inverse to its width."""
        return min(2.0 / self.network.config.exit_dim, 1.6e-2)

    def start_from_head(self, head: mx.array | None) -> None:
        drafter = self.network
        for block in drafter.lm_head[:-1]:
            block.linear.weight = mx.zeros_like(block.linear.weight)
            block.linear.bias = mx.zeros_like(block.linear.bias)
        if head is not None:
            last = drafter.lm_head[-1]
            last.weight = _project_head(np.array(head.astype(mx.float32)), np.array(last.weight))
        if self.layers:  # at first the drafter reads the last hidden state alone
            parts = [(layer == FINAL) * mx.eye(drafter.config.hidden_size) for layer in self.layers]
            drafter.fusion.weight = mx.concatenate(parts, axis=1)

    def leave_target(self) -> None:
        """Replace the target's embedding by a table; blocks until MLX has evaluated it."""
        embedding = self.embed(mx.arange(self.vocab_size))
        mx.eval(embedding)
        self.embed = lambda tokens: embedding[tokens]

    def logits(self, network: Drafter, batch: TrainingBatch) -> mx.array:
        num_steps = batch.tokens.shape[1] - 1
        inputs = network.project_input(self.embed(batch.tokens[:, :num_steps]))  # (B, S, H)
        states = [network.start(inputs[:, 0])]
        for step in range(1, num_steps):
            states.append(network.advance(states[-1], inputs[:, step]))
        hidden = network.fuse(batch.states)[:, None].astype(network.dtype)
        return network.logits(hidden, mx.stack(states, axis=1)).astype(mx.float32)

    def calibrate(self, texts: Sequence[Shard]) -> None:
        network = self.network
        fused = map(self._fused, texts)
        found = (text for shard in fused for text in iterate_generated_texts(shard))
        network.config = calibrate(network, self.embed, found).applied(network.config)

    def plans(self, length: int) -> dict[str, DraftPlan]:
        width = min(4, self.head_rows)
        return {
            f"chain of {length - 1}": DraftPlan.of(1, length),
            "tree of 8": DraftPlan.of(width, length),
        }

    def count_accepted(
        self, shard: Shard, roots: NDArray[np.int64], plan: DraftPlan, temp: float
    ) -> NDArray[np.int64]:
        """Count the accepted drafts; the functions of decoding draft the trees."""
        shard, length = self._fused(shard), plan.shape.length
        widest = max(plan.shape.width, length) if temp else plan.shape.width
        size = LOGITS_BYTES // (4 * self.head_rows * widest)
        size = max(1, min(MAX_POSITIONS, size))
        tokens = np.array(shard.tokens)
        following = read_following(shard, roots, length)
        draft = mx.vmap(self._make_drafting_function(plan, temp))
        counts = []
        for start in range(0, len(roots), size):
            places = roots[start : start + size]
            inputs = [shard.hidden[mx.array(places - 1)], mx.array(tokens[places][:, None])]
            if temp:
                states = places[:, None] + np.arange(length - 1)
                inputs.append(draw_noise(shard, states, self.vocab_size, temp))
            drafted = draft(*inputs)
            mx.eval(drafted)
            nodes, parents, depths = (np.array(array) for array in drafted)
            counts.append(count_matches(nodes, parents, depths, following[start : start + size]))
        return np.concatenate(counts)

    def _fused(self, shard: Shard) -> Shard:
        """Replace a shard's last hidden states by the fused inputs of the layers, if any."""
        if shard.states is None:
            return shard
        return replace(shard, hidden=self.network.fuse(shard.states))

    def _make_drafting_function(
        self, plan: DraftPlan, temp: float
    ) -> Callable[..., tuple[mx.array, ...]]:
        """Make the function from state (H,), root (1,) and maybe noise (L - 1, V) to tree."""
        network, params = self.network, SamplingParams(temp=temp)
        project_input = network.input_of(self.embed)

        def draft(
            hidden: mx.array, root: mx.array, noise: mx.array | None = None
        ) -> tuple[mx.array, ...]:
            rank = None if noise is None else coupled_rank(network, GumbelNoise(params, noise))
            expansion = expand(network, project_input, hidden, root, plan.shape, rank)
            tree = best_nodes(expansion, root, plan)
            return tree.tokens, tree.parents, tree.depths

        return draft


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
