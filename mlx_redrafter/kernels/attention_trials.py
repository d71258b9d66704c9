"""Trials of tree attention on the user's machine, at load.

The kernel is used only where its results are bit for bit those of MLX's attention for one token
whose cache is a node's path, and it is no slower than MLX's attention with a mask. Bits are
compared at every load; times are kept.

Axes: N nodes of a tree, S committed tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.errors import first_line
from mlx_redrafter.kernels.attention import (
    AttentionChoice,
    AttentionChoices,
    AttentionShape,
    attention_shapes,
    use_attention,
)
from mlx_redrafter.kernels.kernel_times import Times, known_times, time_in_turns
from mlx_redrafter.kernels.small_t import as_integers
from mlx_redrafter.kernels.tree_attention import tree_attention
from mlx_redrafter.kernels.variant import DTYPES
from mlx_redrafter.trees.tree import ancestor_mask

# Most time of a kernel that is used, in times of MLX's own: as much, but for noise.
MOST_TIME = 1.05
# A tree with branches whose nodes stand apart from their parents.
PARENTS = (0, 0, 0, 1, 2, 3, 3, 5, 4, 7, 7, 0, 6, 11, 9, 14)
# Most keys that MLX reads in one pass where heads share keys, and on chips of the sizes Max and
# Ultra; beyond, it divides them by other rules.
MOST_KEYS = (4095, 1023)
# Committed tokens of further comparisons: less than a key per SIMD group, and some of them.
FEW_KEYS = (5, 200)


@dataclass(frozen=True)
class AttentionTrial:
    """What a trial of the kernel for one shape of attention has shown.

    Attributes:
        shape: Shape of the attention.
        num_layers: Layers with such an attention.
        most_keys: Most keys of a node for which the kernel is equal; None where it is for none.
        times: Times by nodes N; none where it is not equal.
        error: Message of a kernel that could not be compiled or run; None where it could.
    """

    shape: AttentionShape
    num_layers: int
    most_keys: int | None
    times: dict[int, Times]
    error: str | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """Values of N for which the kernel is used."""
        return tuple(rows for rows, times in self.times.items() if times.is_at_most(MOST_TIME))

    @property
    def failure(self) -> str | None:
        """What is wrong with the kernel, None where it may be used."""
        if self.error is not None:
            return self.error
        return None if self.most_keys else "its bits are not those of MLX's attention for one token"

    @property
    def outcome(self) -> str:
        """For how many keys the kernel is equal."""
        return f"equal: up to {self.most_keys} keys"


def try_attentions(model: nn.Module) -> list[AttentionTrial]:
    """Try the kernel for every shape of a model's attention."""
    return [try_attention(*found) for found in attention_shapes(model).items()]


def use_tried(model: nn.Module, trials: list[AttentionTrial]) -> None:
    """Let a model use the kernel where its trials allow that."""
    chosen = tuple(
        AttentionChoice(trial.shape, trial.most_keys, trial.rows)
        for trial in trials
        if trial.most_keys and trial.rows
    )
    if chosen:
        use_attention(model, AttentionChoices(chosen))


def try_attention(shape: AttentionShape, num_layers: int) -> AttentionTrial:
    """Try the kernel for one shape of attention."""
    try:
        most_keys = _most_keys(shape)
        times = _known_times(shape, most_keys) if most_keys else {}
    except Exception as error:  # whatever a compiler or a driver makes of it, MLX's kernel remains
        return AttentionTrial(shape, num_layers, None, {}, first_line(error))
    return AttentionTrial(shape, num_layers, most_keys, times)


def probe(shape: AttentionShape, committed: int) -> tuple[mx.array, mx.array, mx.array]:
    """Random queries, keys and values of the tree `PARENTS` after ``committed`` tokens.

    Queries are long, so that a few keys weigh more than all others together.
    """
    nodes, size = len(PARENTS), shape.head_size
    rows = (1, shape.key_heads, committed + nodes, size)
    queries, keys, values = (
        mx.random.normal(one, key=mx.random.key(seed)).astype(DTYPES[shape.dtype])
        for seed, one in enumerate([(1, shape.heads, nodes, size), rows, rows])
    )
    return 3 * queries, keys, values


def time_attention(shape: AttentionShape, num_keys: int, nodes: int) -> Times:
    """Times of the attention of N nodes to ``num_keys`` keys. Waits for the device."""
    queries, keys, values = probe(shape, num_keys - len(PARENTS))
    queries, scale = mx.contiguous(queries[:, :, :nodes]), shape.head_size**-0.5
    parents = mx.array(PARENTS[:nodes])
    committed = mx.ones((nodes, num_keys - nodes), dtype=mx.bool_)
    mask = mx.concatenate([committed, ancestor_mask(parents, nodes)], axis=1)
    mx.eval(queries, keys, values, mask)
    return time_in_turns(
        lambda: [
            mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
        ],
        lambda: [tree_attention(queries, keys, values, parents, scale)],
    )


def _most_keys(shape: AttentionShape) -> int | None:
    """The first of `MOST_KEYS` up to which the kernel is equal."""
    depth = max(len(_path(node)) for node in range(len(PARENTS)))
    if not all(_is_equal(shape, committed) for committed in FEW_KEYS):
        return None
    return next((most for most in MOST_KEYS if _is_equal(shape, most - depth)), None)


def _is_equal(shape: AttentionShape, committed: int) -> bool:
    """Whether all nodes have the bits of one token after their paths. Waits for the device."""
    queries, keys, values = probe(shape, committed)
    scale = shape.head_size**-0.5
    y = tree_attention(queries, keys, values, mx.array(PARENTS), scale)
    same = []
    for node in range(len(PARENTS)):
        seen = mx.array([*range(committed), *(committed + above for above in _path(node))])
        alone = mx.fast.scaled_dot_product_attention(
            queries[:, :, node : node + 1], keys[:, :, seen], values[:, :, seen], scale=scale
        )
        same.append(mx.all(as_integers(y[:, :, node : node + 1]) == as_integers(alone)))
    return bool(mx.all(mx.stack(same)).item())


def _path(node: int) -> list[int]:
    """The root, the nodes on the way, and the node."""
    return [0] if node == 0 else [*_path(PARENTS[node]), node]


def _known_times(shape: AttentionShape, most_keys: int) -> dict[int, Times]:
    return known_times(
        shape,
        ("tree_attention", most_keys),
        [],
        lambda nodes: time_attention(shape, most_keys, nodes),
    )
