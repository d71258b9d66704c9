"""Sampling after a root or a tree, and acceptance: for one sequence, or for several at once.

Axes: G sequences, N nodes of a tree, L its levels, the root's included (`TokenTree.max_depth` + 1),
H hidden size, V vocabulary, K most probable tokens that a drafting asks for.

Several sequences are sampled with the operations of one, on more rows. Each row has the noise that
its sequence has alone, so that the tokens are those of each sequence alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import mlx.core as mx

from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.records import NOT_A_NUMBER
from mlx_redrafter.decoding.sampling import (
    GumbelNoise,
    KeyedSampler,
    TokenSampler,
    choose,
    mark_nan,
    noise_for_all,
)
from mlx_redrafter.device_read import to_floats, to_ints, to_rows
from mlx_redrafter.target.target import TargetOutputs
from mlx_redrafter.trees.topk import top_k
from mlx_redrafter.trees.tree import TokenTree
from mlx_redrafter.trees.tree_batch import TreeBatch

# Path, number of accepted drafts, bonus token, last node and tokens of the path, see `accept`.
Accepted = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]


def accept(tree: TokenTree, chosen: mx.array) -> Accepted:
    """Walk from the root for as long as the target's choice is one of the drafts.

    Every token on the path, and the bonus token, is the target's choice after its true prefix: the
    text is the target's whatever the tree. This is sample-then-match; for drafts that do not
    depend on the target's noise no lossless rule accepts more.

    Args:
        tree: The verified drafts.
        chosen: The target's token after every node, integer, shape (N,).

    Returns:
        Five arrays, all int32. Node indices of the path from the root on, shape (L,), of which the
        first ``num_accepted + 1`` are valid and the rest is junk. ``num_accepted``, the number of
        accepted drafts, 0 to L - 1, shape (1,). The target's own token after the path, which is
        the next root, shape (1,). Node index of the last accepted node, shape (1,). Tokens of the
        path, shape (L,), junk after the accepted ones.
    """
    chosen = chosen.astype(mx.int32)
    if tree.is_chain and tree.size > 1:
        return _accept_chain(tree, chosen)
    size, length = tree.size, tree.max_depth + 1
    is_root = mx.arange(size) == 0
    # Functions, not operators: under mx.vmap those do not broadcast (MLX 0.32.4).
    matches = mx.logical_or(tree.tokens == chosen[tree.parents], is_root)
    # A node is on the path when it and all its ancestors match; siblings are distinct, so the
    # nodes that are form one path.
    on_path = mx.all(mx.logical_or(mx.logical_not(tree.ancestors), matches), axis=1)
    num_accepted = mx.sum(on_path, keepdims=True).astype(mx.int32) - 1
    path = mx.argsort(mx.where(on_path, tree.depths, length))[:length].astype(mx.int32)
    if size < length:
        path = mx.pad(path, (0, length - size))
    last = path[num_accepted]
    return path, num_accepted, chosen[last], last, tree.tokens[path]


def _accept_chain(tree: TokenTree, chosen: mx.array) -> Accepted:
    """Do the same with fewer operations, whose number counts with small models and fast GPUs."""
    matches = (tree.tokens[1:] == chosen[:-1]).astype(mx.int32)
    num_accepted = mx.sum(mx.cumprod(matches), keepdims=True)
    return tree.depths, num_accepted, chosen[num_accepted], num_accepted, tree.tokens


def best_rows(log_probs: mx.array, count: int) -> mx.array:
    """Find the K most probable tokens after each node, for `Outcome.best`.

    Args:
        log_probs: Natural log-probabilities, shape (N, V).
        count: K, less than V.

    Returns:
        Their ids and the bits of their log-probabilities, int32, shape (N, 2 K).
    """
    values, indices = top_k(log_probs, count)
    bits = values.astype(mx.float32).view(mx.int32)
    return mx.concatenate([indices.astype(mx.int32), bits], axis=1)


def sample_root(
    sampler: TokenSampler, outputs: TargetOutputs, noise: GumbelNoise | None, num_best: int = 0
) -> Pass:
    """Sample after a root, N = 1, and dispatch that.

    The host looks for NaN itself, which saves the device an operation.
    """
    log_probs, token, normaliser = choose(sampler, outputs.logits, None, noise, 1)
    outcome = token
    if num_best:
        outcome = mx.concatenate([token, best_rows(log_probs, num_best).reshape(-1)])
    mx.async_eval(outcome, normaliser, token, outputs.hidden_states, log_probs, outputs.states)

    def read() -> list[int]:
        return to_ints(outcome) if math.isfinite(*to_floats(normaliser)) else [NOT_A_NUMBER]

    hidden_state = outputs.hidden_states.squeeze(0)
    return Pass(token, token, hidden_state, log_probs, outputs.states, read=read)


def sample_and_accept(
    sampler: TokenSampler,
    outputs: TargetOutputs,
    tree: TokenTree,
    noise: GumbelNoise | None,
    num_best: int = 0,
) -> Pass:
    """Sample after every node of a tree, accept what agrees, and dispatch that."""
    num_levels = tree.max_depth + 1
    log_probs, tokens, normalisers = choose(sampler, outputs.logits, tree.depths, noise, num_levels)
    path, num_accepted, bonus, last, path_tokens = accept(tree, mark_nan(tokens, normalisers))
    hidden_state = outputs.hidden_states[last].squeeze(0)
    best = [best_rows(log_probs, num_best).reshape(-1)] if num_best else []
    outcome = mx.concatenate([bonus, num_accepted, path, path_tokens, *best])
    mx.async_eval(outcome, hidden_state, log_probs, outputs.states)
    root = mx.maximum(bonus, 0)
    return Pass(outcome, root, hidden_state, log_probs, outputs.states, path)


def sample_roots(
    samplers: Sequence[KeyedSampler],
    outputs: TargetOutputs,
    positions: Sequence[int],
    num_best: int = 0,
) -> list[Pass]:
    """Sample after the roots of several sequences, and dispatch that.

    Args:
        samplers: One per sequence; they differ in their seeds only.
        outputs: Outputs for all sequences, N = 1, each array with an axis of G before its others.
        positions: Position of each root.
        num_best: K; 0 for none.
    """
    first, noise = samplers[0], None
    if first.params.temp:
        noise = GumbelNoise(first.params, noise_for_all(samplers, positions))
    count = len(samplers)
    log_probs, tokens, normalisers = choose(first, outputs.logits.squeeze(1), None, noise, count)
    outcomes = tokens[:, None]
    if num_best:
        outcomes = mx.concatenate([outcomes, best_rows(log_probs, num_best)], axis=1)
    mx.async_eval(tokens, outcomes, normalisers, log_probs, outputs.hidden_states, outputs.states)

    @cache
    def read() -> list[list[int]]:
        found = zip(to_rows(outcomes), to_floats(normalisers), strict=True)
        return [row if math.isfinite(one) else [NOT_A_NUMBER] for row, one in found]

    parts = zip(
        mx.split(tokens, count),
        mx.split(outputs.hidden_states.reshape(-1), count),
        mx.split(log_probs, count),
        _split_states(outputs.states, count),
        strict=True,
    )
    return [
        Pass(root, root, hidden_state, one, state, read=partial(_item, read, number))
        for number, (root, hidden_state, one, state) in enumerate(parts)
    ]


def sample_and_accept_all(
    samplers: Sequence[KeyedSampler],
    outputs: TargetOutputs,
    trees: TreeBatch,
    noises: Sequence[GumbelNoise | None],
    num_best: int = 0,
) -> list[Pass]:
    """Sample after every node of several trees, accept what agrees, and dispatch that.

    Args:
        samplers: As in `sample_roots`.
        outputs: Outputs for all sequences, each array with an axis of G before its others.
        trees: The trees.
        noises: Noise of the choices after nodes of each depth, of the same number of depths for
            all sequences, L or more; None without noise.
        num_best: K; 0 for none.
    """
    count, size, rows = len(trees), trees.size, trees.depths
    values, noise = [one.values for one in noises if one is not None], None
    if values:
        noise = GumbelNoise(samplers[0].params, mx.concatenate(values))
        rows = rows + values[0].shape[0] * mx.arange(count, dtype=mx.int32)[:, None]
    num_rows = count * size
    logits = outputs.logits.reshape(num_rows, -1)
    log_probs, sampled, normalisers = choose(samplers[0], logits, rows.reshape(-1), noise, num_rows)
    chosen = mark_nan(sampled, normalisers).reshape(count, size)
    paths, num_accepted, bonus, last, tokens = _accept_all(trees, chosen)
    hidden_states = mx.take_along_axis(outputs.hidden_states, last[..., None], axis=1)
    best = [best_rows(log_probs, num_best).reshape(count, -1)] if num_best else []
    outcomes = mx.concatenate([bonus, num_accepted, paths, tokens, *best], axis=1)
    mx.async_eval(outcomes, hidden_states, log_probs, outputs.states)
    # Read the array itself: MLX would compute a view of it behind all that is dispatched meanwhile.
    read = cache(lambda: to_rows(outcomes))
    parts = zip(
        *(mx.split(one.reshape(-1), count) for one in (outcomes, mx.maximum(bonus, 0))),
        mx.split(hidden_states.reshape(-1), count),
        mx.split(log_probs, count),
        _split_states(outputs.states, count),
        mx.split(paths.reshape(-1), count),
        strict=True,
    )
    return [
        Pass(outcome, root, hidden_state, one, state, path, partial(_item, read, number))
        for number, (outcome, root, hidden_state, one, state, path) in enumerate(parts)
    ]


def _split_states(states: mx.array | None, count: int) -> list[Any]:
    """Split states, shape (G, N, S), into those of each sequence, (N, S)."""
    if states is None:
        return [None] * count
    return list(mx.split(states.reshape(-1, states.shape[-1]), count))


def _item(read: Callable[[], list[list[int]]], number: int) -> list[int]:
    """Return the outcome of one of several sequences, which the host reads together."""
    return read()[number]


def _accept_all(trees: TreeBatch, chosen: mx.array) -> tuple[mx.array, ...]:
    """Call `accept` on each tree, given choices of shape (G, N)."""
    size, max_depth = trees.size, max(trees.max_depths)

    def accept_one(
        tokens: mx.array,
        parents: mx.array,
        depths: mx.array,
        ancestors: mx.array,
        choices: mx.array,
    ) -> tuple[mx.array, ...]:
        tree = TokenTree(tokens, parents, depths, ancestors, size, size, max_depth)
        return accept(tree, choices)

    accept_each: Callable[..., tuple[mx.array, ...]] = mx.vmap(accept_one)
    return accept_each(trees.tokens, trees.parents, trees.depths, trees.ancestors, chosen)
