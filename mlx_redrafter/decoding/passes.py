"""Forward passes of the target: how tokens are sampled and accepted after one, and the outcome.

Axes: G sequences, N nodes of a tree, L its levels, the root's included, H hidden size, V
vocabulary, K most probable tokens that a drafting asks for.

Several sequences are sampled with the operations of one, on more rows. Each row has the noise that
its sequence has alone, so that the tokens are those of each sequence alone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_redrafter.decoding.records import NOT_A_NUMBER, NOT_A_TOKEN
from mlx_redrafter.decoding.sampling import (
    GumbelNoise,
    KeyedSampler,
    TokenSampler,
    choose,
    mark_nan,
    noise_for_all,
    top_k,
)
from mlx_redrafter.device_read import to_floats, to_ints, to_rows
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError, NonFiniteError
from mlx_redrafter.target.target import TargetOutputs
from mlx_redrafter.trees.tree import Drafts, TokenTree, TreeBatch

# Path, number of accepted drafts, bonus token, last node and tokens of the path, see `accept`.
Accepted = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]


class Outcome(NamedTuple):
    """The outcome of a pass, as the host has read it.

    Attributes:
        rows: Node indices of the accepted path.
        tokens: Accepted drafts, and the bonus token if there is one.
        bonus: The target's own token after them, `NOT_A_NUMBER` or `NOT_A_TOKEN`.
        best: `best_rows` of the logits, of Z numbers; empty unless the drafting asks for them.
    """

    rows: Sequence[int]
    tokens: list[int]
    bonus: int
    best: list[int]


@dataclass(frozen=True, eq=False)
class Pass:
    """A dispatched forward pass, with its outcome as arrays that the device may still compute.

    Attributes:
        packed: Bonus token, `NOT_A_NUMBER` or `NOT_A_TOKEN`, and for a tree, number of accepted
            drafts, node indices and tokens of the path, int32, shape (1,) or (2 + 2 L + Z,). For
            one token, never `NOT_A_NUMBER`. The last Z numbers are those of `Outcome.best`.
        root: The bonus token, which is the next root, int32, shape (1,); a token in any case.
        hidden_state: Target state that predicted it, shape (H,).
        log_probs: Natural log-probabilities after the nodes, shape (N, V).
        states: States of the nodes that a `StateReader` asks for, shape (N, S); None without one.
        path: Accepted path, int32, shape (L,), junk after the accepted nodes; None for one token.
        read: Function that reads ``packed``, with `NOT_A_NUMBER`; None to read the array.
        num_nodes: Nodes verified; 0 for the prefill, which is no step.
        num_unmerged: Nodes as they would have been without merging.
        known: Drafts verified, if the host knows them without waiting; else None.
        length: Committed tokens before the root of this pass.
        plan: Plan of the drafts; None if nothing was drafted.
    """

    packed: mx.array
    root: mx.array
    hidden_state: mx.array
    log_probs: mx.array
    states: mx.array | None = None
    path: mx.array | None = None
    read: Callable[[], list[int]] | None = None
    num_nodes: int = 1
    num_unmerged: int = 1
    known: Drafts | None = None
    length: int = 0
    plan: DraftPlan | None = None

    @property
    def num_accepted(self) -> mx.array:
        """Number of accepted drafts, int32, shape (1,)."""
        return mx.zeros((1,), dtype=mx.int32) if self.path is None else self.packed[1:2]

    @property
    def max_accepted(self) -> int:
        return 0 if self.path is None else self.path.shape[0] - 1

    @property
    def following_tokens(self) -> mx.array:
        """Tokens after each of the accepted path, the bonus token last, int32, shape (L,).

        Behind the bonus token they are junk, but token ids in any case.
        """
        if self.path is None:
            path = self.packed
        else:
            length = self.path.shape[0]
            path = self.packed[2 + length : 2 + 2 * length]
        is_last = mx.arange(path.shape[0]) == self.num_accepted
        following = mx.concatenate([path[1:], path[:1]])
        return mx.maximum(mx.where(is_last, self.root, following), 0)

    @property
    def path_states(self) -> mx.array:
        """States after the tokens of the accepted path, shape (L, S); junk after them."""
        assert self.states is not None
        return self.states if self.path is None else self.states[self.path]

    @property
    def is_read(self) -> bool:
        return "outcome" in self.__dict__

    @cached_property
    def outcome(self) -> Outcome:
        """The outcome; the first use waits for the device."""
        values = to_ints(self.packed) if self.read is None else self.read()
        bonus = values[0]
        own = [bonus] if bonus >= 0 else []
        if self.path is None:
            return Outcome((0,), own, bonus, values[1:])
        length, num_accepted = self.path.shape[0], values[1]
        tokens = values[3 + length : 3 + length + num_accepted] + own
        return Outcome(values[2 : 3 + num_accepted], tokens, bonus, values[2 + 2 * length :])

    @property
    def rows(self) -> Sequence[int]:
        return self.outcome.rows

    @property
    def tokens(self) -> list[int]:
        """Accepted drafts and the bonus token, if any; waits, and raises as `check_finite` does."""
        if not self.outcome.tokens:
            self.check_finite()
        return self.outcome.tokens

    @property
    def is_finite(self) -> bool:
        """Whether there is a bonus token; waits for the device."""
        return self.outcome.bonus >= 0

    def check_finite(self) -> None:
        """Raise NonFiniteError if the logits are NaN; waits for the device.

        A user's sampler that has returned no token of the vocabulary raises ConfigError.
        """
        if not self.is_finite:
            if self.outcome.bonus == NOT_A_TOKEN:
                size = self.log_probs.shape[-1]
                raise ConfigError(f"sampler must return token ids from 0 to {size - 1}")
            where = "in the text" if self.num_nodes else "after the prompt"
            raise NonFiniteError(
                f"the target's logits {where} are NaN; its weights are damaged, its dtype "
                "overflows (bfloat16 or float32 may not), or a logits processor left no token, or "
                "a grammar did, which is too complex or which a sampler has broken"
            )


def accept(tree: TokenTree, chosen: mx.array) -> Accepted:
    """Walk from the root for as long as the target's choice is one of the drafts.

    Every token on the path, and the bonus token, is the target's choice after its true prefix: the
    text is the target's whatever the tree. This is sample-then-match; for drafts that do not depend
    on the target's noise no lossless rule accepts more.

    Args:
        tree: The verified drafts.
        chosen: The target's token after every node, integer, shape (N,).

    Returns:
        `Accepted`, all int32. The path has shape (L,), junk after ``num_accepted + 1`` nodes, as
        have its tokens; the other arrays have shape (1,).
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


def num_best_of(drafting: object) -> int:
    """Return the number of tokens after each node that a drafting wants in `Outcome.best`.

    They are those that the target finds most probable; only a lookup learns them.
    """
    return getattr(drafting, "num_best", 0)


def best_rows(log_probs: mx.array, count: int) -> mx.array:
    """Find the K < V most probable tokens after each node, given log-probabilities (N, V).

    Return their ids and the bits of their log-probabilities, int32, shape (N, 2 K).
    """
    values, indices = top_k(log_probs, count)
    bits = values.astype(mx.float32).view(mx.int32)
    return mx.concatenate([indices.astype(mx.int32), bits], axis=1)


def sample_root(
    sampler: TokenSampler, outputs: TargetOutputs, noise: GumbelNoise | None, num_best: int
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
    num_best: int,
) -> Pass:
    """Sample after every node of a tree, accept what agrees, and dispatch that."""
    num_levels = tree.max_depth + 1
    log_probs, tokens, normalisers = choose(sampler, outputs.logits, tree.depths, noise, num_levels)
    path, num_accepted, bonus, last, path_tokens = accept(tree, mark_nan(tokens, normalisers))
    hidden_state = outputs.hidden_states[last].squeeze(0)
    best = [best_rows(log_probs, num_best).reshape(-1)] if num_best else []
    outcome = mx.concatenate([bonus, num_accepted, path, path_tokens, *best])
    mx.async_eval(outcome, hidden_state, log_probs, outputs.states)
    return Pass(outcome, mx.maximum(bonus, 0), hidden_state, log_probs, outputs.states, path)


def sample_roots(
    samplers: Sequence[KeyedSampler],
    outputs: TargetOutputs,
    positions: Sequence[int],
    num_best: int,
) -> list[Pass]:
    """Sample after the roots of several sequences, and dispatch that.

    The samplers differ in their seeds only. The outputs have an axis of G before their others, and
    N = 1. ``positions`` are those of the roots.
    """
    first, noise = samplers[0], None
    if first.params.temp:
        noise = GumbelNoise(first.params, noise_for_all(samplers, positions))
    count = len(samplers)
    log_probs, tokens, normalisers = choose(first, outputs.logits.squeeze(1), None, noise, count)
    outcomes = tokens[:, None]
    if num_best:
        outcomes = mx.concatenate([outcomes, best_rows(log_probs, num_best)], axis=1)
    each = mx.split(log_probs, count)
    mx.async_eval(tokens, outcomes, normalisers, each, outputs.hidden_states, outputs.states)

    @cache
    def read() -> list[list[int]]:
        found = zip(to_rows(outcomes), to_floats(normalisers), strict=True)
        return [row if math.isfinite(one) else [NOT_A_NUMBER] for row, one in found]

    return _passes(read, tokens, outputs.hidden_states, each, outputs.states)


def sample_and_accept_all(
    samplers: Sequence[KeyedSampler],
    outputs: TargetOutputs,
    trees: TreeBatch,
    noises: Sequence[GumbelNoise | None],
    num_best: int,
) -> list[Pass]:
    """Sample after every node of several trees, accept what agrees, and dispatch that.

    Samplers and outputs are as in `sample_roots`. All sequences have noise of the same number of
    depths, L or more, or none has any.
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
    each = mx.split(log_probs, count)
    mx.async_eval(outcomes, hidden_states, each, outputs.states)
    # Read the array itself: MLX would compute a view of it behind all that is dispatched meanwhile.
    read = cache(lambda: to_rows(outcomes))
    roots = mx.maximum(bonus, 0)
    return _passes(read, roots, hidden_states, each, outputs.states, outcomes, paths)


def _passes(
    read: Callable[[], list[list[int]]],
    roots: mx.array,
    hidden_states: mx.array,
    log_probs: Iterable[mx.array],
    states: mx.array | None,
    outcomes: mx.array | None = None,
    paths: mx.array | None = None,
) -> list[Pass]:
    """Make the passes of G sequences, over one token each without outcomes and paths of trees."""
    count = roots.size

    def split(array: mx.array | None) -> list[Any]:
        if array is None:
            return [None] * count
        return list(mx.split(array.reshape(-1, *array.shape[2:]), count))

    own_roots = split(roots)
    parts = zip(
        own_roots if outcomes is None else split(outcomes),
        own_roots,
        split(hidden_states.reshape(count, -1)),
        log_probs,
        split(states),
        split(paths),
        strict=True,
    )
    return [
        Pass(packed, root, hidden_state, one, state, path, partial(_item, read, number))
        for number, (packed, root, hidden_state, one, state, path) in enumerate(parts)
    ]


def _item(read: Callable[[], list[list[int]]], number: int) -> list[int]:
    return read()[number]


def _accept_all(trees: TreeBatch, chosen: mx.array) -> tuple[mx.array, ...]:
    """Call `accept` on each tree, given choices of shape (G, N)."""
    size, max_depth = trees.size, max(trees.max_depths)

    def accept_one(choices: mx.array, *arrays: mx.array) -> tuple[mx.array, ...]:
        tokens, parents, depths, ancestors = arrays
        return accept(TokenTree(tokens, parents, depths, ancestors, size, size, max_depth), choices)

    accept_each: Callable[..., tuple[mx.array, ...]] = mx.vmap(accept_one)
    return accept_each(chosen, trees.tokens, trees.parents, trees.depths, trees.ancestors)
