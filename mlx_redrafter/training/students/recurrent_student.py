"""The recurrent drafter as a student.

Axes: B positions, S unroll steps, p roots, H hidden size, V vocabulary, L beam length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.decoding.accept import count_matches
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.expansion import best_nodes
from mlx_redrafter.proposers.redrafter.beam import coupled_rank, expand
from mlx_redrafter.proposers.redrafter.fit_drafter import calibrate
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.redrafter.recurrence import Embed
from mlx_redrafter.training.hindsight import draw_noise, iterate_generated_texts, read_following
from mlx_redrafter.training.initial import start_drafter
from mlx_redrafter.training.loss import Batch
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training.teacher_cache import Shard

# Largest number of positions drafted at once.
MAX_POSITIONS = 512
# Largest size of the float32 logits computed at once, in bytes.
LOGITS_BYTES = 2**26


class RecurrentStudent(Student):
    """A recurrent drafter.

    Args:
        network: The drafter.
        embed: The target's input embedding.
    """

    name = "a recurrent drafter (ReDrafter, arXiv 2403.09919)"
    network: Drafter

    def __init__(self, network: Drafter, embed: Embed):
        super().__init__(network)
        self.embed = embed
        self.layers = network.config.captured_layers or ()

    @property
    def learning_rate(self) -> float:
        """See `Student.learning_rate`: 2e-3 for a head of 1024, inverse to its width."""
        return min(2.0 / self.network.config.exit_dim, 1.6e-2)

    def new_network(self) -> Drafter:
        """See `Student.new_network`."""
        return Drafter(self.network.config)

    def start(self, head: mx.array | None, token_ids: NDArray[np.int32] | None) -> None:
        """See `Student.start`, and `initial`."""
        start_drafter(self.network, head, token_ids)

    def leave_target(self) -> None:
        """See `Student.leave_target`; a table is left."""
        embedding = self.embed(mx.arange(self.vocab_size))
        mx.eval(embedding)
        self.embed = lambda tokens: embedding[tokens]

    def logits(self, network: Drafter, batch: Batch) -> mx.array:
        """See `Student.logits`."""
        num_steps = batch.tokens.shape[1] - 1
        inputs = network.project_input(self.embed(batch.tokens[:, :num_steps]))  # (B, S, H)
        states = [network.start(inputs[:, 0])]
        for step in range(1, num_steps):
            states.append(network.advance(states[-1], inputs[:, step]))
        hidden = network.fuse(batch.states)[:, None].astype(network.dtype)
        return network.logits(hidden, mx.stack(states, axis=1)).astype(mx.float32)

    def calibrate(self, texts: Sequence[Shard]) -> None:
        """See `Student.calibrate`."""
        network = self.network
        fused = map(self._fused, texts)
        found = (text for shard in fused for text in iterate_generated_texts(shard))
        network.config = calibrate(network, self.embed, found).applied(network.config)

    def save(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """See `Student.save`."""
        save_drafter(self.network, folder, extra)

    def plans(self, length: int) -> dict[str, DraftPlan]:
        """See `Student.plans`; with a tree."""
        width = min(4, self.head_rows)
        return {
            f"chain of {length - 1}": DraftPlan.of(1, length),
            "tree of 8": DraftPlan.of(width, length),
        }

    def count_accepted(
        self, shard: Shard, roots: NDArray[np.int64], plan: DraftPlan, temp: float
    ) -> NDArray[np.int64]:
        """See `Student.count_accepted`; trees are drafted by the functions of decoding."""
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
        """A shard with what the drafter reads in place of the last hidden states."""
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
