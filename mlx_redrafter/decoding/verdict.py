"""What the target makes of a root or a tree: for one text, or for several at once.

Axes: G texts, N nodes of a tree, L its levels, the root's included, H hidden size, V vocabulary.

Several texts are judged with the operations of one, on more rows: each row has the noise that its
text has alone, so that the answers are those of each text alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx

from mlx_redrafter.decoding.accept import Acceptance, accept
from mlx_redrafter.decoding.records import NOT_A_NUMBER, PendingPass
from mlx_redrafter.decoding.sampling import (
    GumbelNoise,
    KeyedChooser,
    TokenChooser,
    choose,
    gumbel_noise,
)
from mlx_redrafter.device_read import to_floats, to_ints
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.target.target import TargetOutputs
from mlx_redrafter.trees.tree import TokenTree
from mlx_redrafter.trees.tree_batch import TreeBatch

# Made once: small models notice every operation between two tokens.
_DEPTH_OF_ROOT = mx.zeros((1,), dtype=mx.int32)


class TargetChoice(NamedTuple):
    """The target's answer to one text.

    Attributes:
        outcome: As in `PendingPass`, shape (1,) for a root, (2 + 2 L,) for a tree.
        root: As in `PendingPass`.
        log_probs: Natural log-probabilities after the nodes, shape (N, V).
        hidden_state: Target state that predicted the bonus token, shape (H,).
        states: As in `TargetOutputs`.
        path: As in `PendingPass`; None for a root.
        read: Function that reads the outcome; None where it is read as it stands.
    """

    outcome: mx.array
    root: mx.array
    log_probs: mx.array
    hidden_state: mx.array
    states: mx.array | None
    path: mx.array | None = None
    read: Callable[[], list[int]] | None = None

    def of_root(self, length: int, num_nodes: int, plan: DraftPlan | None = None) -> PendingPass:
        """The forward pass over a root.

        Args:
            length: Committed tokens, that root included.
            num_nodes: As in `PendingPass`.
            plan: As in `PendingPass`.
        """
        return PendingPass(
            outcome=self.outcome,
            root=self.root,
            hidden_state=self.hidden_state,
            log_probs=self.log_probs,
            length=length - 1,
            path=None,
            plan=plan,
            num_nodes=num_nodes,
            num_unmerged=num_nodes,
            states=self.states,
            read=self.read,
        )

    def of_tree(self, length: int, tree: TokenTree, plan: DraftPlan) -> PendingPass:
        """The forward pass over a tree after ``length`` committed tokens."""
        return PendingPass(
            outcome=self.outcome,
            root=self.root,
            hidden_state=self.hidden_state,
            log_probs=self.log_probs,
            length=length,
            path=self.path,
            plan=plan,
            num_nodes=tree.num_nodes,
            num_unmerged=tree.num_unmerged,
            known=tree.known,
            states=self.states,
            read=self.read,
        )


def judge_root(
    chooser: TokenChooser, outputs: TargetOutputs, noise: GumbelNoise | None
) -> TargetChoice:
    """The answer to a root, N = 1, dispatched.

    Instead of the device, which would have an operation more to do, the host looks for NaN.
    """
    log_probs, token, normaliser = choose(chooser, outputs.logits, _DEPTH_OF_ROOT, noise, 1)
    mx.async_eval(token, normaliser, outputs.hidden_states, log_probs, outputs.states)

    def read() -> list[int]:
        return to_ints(token) if math.isfinite(*to_floats(normaliser)) else [NOT_A_NUMBER]

    hidden_state = outputs.hidden_states.squeeze(0)
    return TargetChoice(token, token, log_probs, hidden_state, outputs.states, read=read)


def judge_tree(
    chooser: TokenChooser, outputs: TargetOutputs, tree: TokenTree, noise: GumbelNoise | None
) -> TargetChoice:
    """The answer to a tree, dispatched."""
    num_levels = tree.max_depth + 1
    choices = choose(chooser, outputs.logits, tree.depths, noise, num_levels)
    log_probs = choices.log_probs
    path, num_accepted, bonus, last, tokens = accept(tree, choices.checked)
    hidden_state = outputs.hidden_states[last].squeeze(0)
    outcome = mx.concatenate([bonus, num_accepted, path, tokens])
    mx.async_eval(outcome, hidden_state, log_probs, outputs.states)
    root = mx.maximum(bonus, 0)
    return TargetChoice(outcome, root, log_probs, hidden_state, outputs.states, path)


def judge_roots(
    choosers: Sequence[KeyedChooser], outputs: TargetOutputs, positions: Sequence[int]
) -> list[TargetChoice]:
    """The answers to the roots of several texts, dispatched.

    Args:
        choosers: One per text; they differ in their seeds only.
        outputs: Outputs for all texts, each array with an axis of G before its others; those of
            the first nodes count.
        positions: Position of the token chosen, text by text.
    """
    first, noise = choosers[0], None
    if first.params.temp:
        seeds = mx.array([one.params.seed for one in choosers], dtype=mx.uint32)
        values = gumbel_noise(seeds, mx.array(list(positions)), first.vocab_size)
        noise = GumbelNoise(first.params, values)
    count = len(choosers)
    choices = choose(first, outputs.logits[:, 0], mx.arange(count), noise, count)
    log_probs, chosen = choices.log_probs, choices.checked
    outcomes = _Outcomes(chosen[:, None])
    mx.async_eval(chosen, log_probs, outputs.hidden_states, outputs.states)
    states = [None] * count if outputs.states is None else outputs.states[:, :1]
    parts = zip(
        outcomes.values,
        mx.split(mx.maximum(chosen, 0), count),
        mx.split(log_probs, count),
        outputs.hidden_states[:, 0],
        states,
        strict=True,
    )
    return [TargetChoice(*part, read=outcomes.reader(text)) for text, part in enumerate(parts)]


def judge_trees(
    choosers: Sequence[KeyedChooser],
    outputs: TargetOutputs,
    forest: TreeBatch,
    noises: Sequence[GumbelNoise | None],
) -> list[TargetChoice]:
    """The answers to the trees of several texts, dispatched.

    Args:
        choosers: As in `judge_roots`.
        outputs: Outputs for all texts, each array with an axis of G before its others.
        forest: The trees.
        noises: Noise of the choices after nodes of each depth, of as many depths for all texts, L
            or more; None where there is none.
    """
    count, size, rows = len(forest), forest.size, forest.depths
    values, noise = [one.values for one in noises if one is not None], None
    if values:
        noise = GumbelNoise(choosers[0].params, mx.concatenate(values))
        rows = rows + values[0].shape[0] * mx.arange(count, dtype=mx.int32)[:, None]
    num_rows = count * size
    logits = outputs.logits.reshape(num_rows, -1)
    choices = choose(choosers[0], logits, rows.reshape(-1), noise, num_rows)
    log_probs = choices.log_probs
    accepted = _accept_all(forest, choices.checked.reshape(count, size))
    paths, num_accepted, bonus, last, tokens = accepted
    hidden_states = mx.take_along_axis(outputs.hidden_states, last[..., None], axis=1)
    outcomes = _Outcomes(mx.concatenate([bonus, num_accepted, paths, tokens], axis=1))
    mx.async_eval(outcomes.values, hidden_states, log_probs, outputs.states)
    states = [None] * count if outputs.states is None else outputs.states
    parts = zip(
        outcomes.values,
        mx.maximum(bonus, 0),
        mx.split(log_probs, count),
        hidden_states[:, 0],
        states,
        strict=True,
    )
    return [
        TargetChoice(*part, path, outcomes.reader(text))
        for text, (part, path) in enumerate(zip(parts, paths, strict=True))
    ]


def _accept_all(forest: TreeBatch, chosen: mx.array) -> Acceptance:
    """What `accept` makes of each tree, given choices of shape (G, N)."""
    size, max_depth = forest.size, max(forest.max_depths)

    def accept_one(
        tokens: mx.array,
        parents: mx.array,
        depths: mx.array,
        ancestors: mx.array,
        choices: mx.array,
    ) -> Acceptance:
        tree = TokenTree(tokens, parents, depths, ancestors, size, size, max_depth)
        return accept(tree, choices)

    accept_each: Callable[..., tuple[mx.array, ...]] = mx.vmap(accept_one)
    arrays = forest.tokens, forest.parents, forest.depths, forest.ancestors
    return Acceptance(*accept_each(*arrays, chosen))


class _Outcomes:
    """Outcomes of several texts, which the host reads at once.

    Args:
        values: int32, shape (G, numbers of an outcome).
    """

    def __init__(self, values: mx.array):
        self.values = values

    def reader(self, text: int) -> Callable[[], list[int]]:
        """What reads the outcome of one text."""
        return lambda: self._read[text]

    @cached_property
    def _read(self) -> list[list[int]]:
        count, width = self.values.shape
        values = to_ints(self.values.reshape(-1))
        return [values[text * width : (text + 1) * width] for text in range(count)]
