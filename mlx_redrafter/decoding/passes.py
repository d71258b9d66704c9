"""Forward passes of the target: how tokens are sampled and accepted after one, and the outcome.

Axes: G sequences, N nodes of a tree, L its levels, the root's included, H hidden size, V
vocabulary, K most probable tokens that a drafting asks for.

Several sequences are sampled with the operations of one, on more rows. Each row has the noise that
its sequence has alone, so that the tokens are those of each sequence alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import mlx.core as mx

from mlx_redrafter.decoding.sampling import (
    NOT_A_NUMBER,
    NOT_A_TOKEN,
    GumbelNoise,
    TokenSampler,
    choose,
    mark_nan,
    top_k,
)
from mlx_redrafter.device_read import to_floats, to_ints, to_rows
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import ConfigError, NonFiniteError
from mlx_redrafter.target.target import TargetOutputs
from mlx_redrafter.trees.tree import Drafts, TokenTree, TreeBatch

# Path, number of accepted drafts, bonus token, last node and tokens of the path, see `accept`.
Accepted = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]


@dataclass(frozen=True, eq=False)
class Results:
    """Arrays of a forward pass over G sequences, which the device may still compute.

    Those of several sequences have an axis of G before the others, or have their rows in a row.

    Attributes:
        packed: Bonus token, `NOT_A_NUMBER` or `NOT_A_TOKEN`, and for trees, number of accepted
            drafts, node indices and tokens of the path, int32, shape (1,) or (2 + 2 L + Z,). For
            one token, never `NOT_A_NUMBER`. The last Z numbers are those of `Pass.best`.
        roots: The bonus tokens, which are the next roots, int32, shape (G,); tokens in any case.
        hidden_states: Target states that predicted them, shape (G, H).
        log_probs: Natural log-probabilities after the nodes, shape (G N, V).
        states: States of the nodes that a `StateReader` asks for, shape (G N, S), or None.
        paths: Accepted path, int32, shape (L,), junk after the accepted nodes; None for roots.
        normalisers: Those of `choose` after roots, shape (G,), for the host to find NaN.
    """

    packed: mx.array
    roots: mx.array
    hidden_states: mx.array
    log_probs: mx.array
    states: mx.array | None
    paths: mx.array | None = None
    normalisers: mx.array | None = None
    # Arrays cut into those of each sequence, by name: hardly any are needed in plain decoding.
    _parts: dict[str, list[mx.array]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of sequences, G."""
        return self.roots.shape[0]

    def part(self, name: str, number: int) -> mx.array:
        """Return an array of one sequence, by its number; all but the states have one axis."""
        if name not in self._parts:
            array = getattr(self, name)
            assert isinstance(array, mx.array)
            rows = array if name == "states" else array.flatten()  # no operation on one axis
            self._parts[name] = [rows] if self.count == 1 else list(mx.split(rows, self.count))
        return self._parts[name][number]

    @cached_property
    def outcomes(self) -> list[list[int]]:
        """``packed`` of each sequence on the host, with `NOT_A_NUMBER`; waits for the device."""
        # The array itself: MLX would compute a view of it behind all that is dispatched meanwhile.
        if self.packed.ndim > 1:
            rows = to_rows(self.packed)
        elif self.count == 1:
            rows = [to_ints(self.packed)]
        else:
            rows = [[token] for token in to_ints(self.packed)]
        if self.normalisers is None:
            return rows
        found = zip(rows, to_floats(self.normalisers), strict=True)
        return [row if math.isfinite(one) else [NOT_A_NUMBER] for row, one in found]


# The results of a forward pass, and the number of a sequence in it.
Part = tuple[Results, int]


@dataclass(frozen=True, eq=False)
class Pass:
    """A dispatched forward pass, as one sequence sees it.

    Attributes:
        results: Its arrays; those of the sequence alone are properties.
        number: Number of the sequence in them.
        num_nodes: Nodes verified; 0 for the prefill, which is no step.
        known: Drafts verified, if the host knows them without waiting; else None.
        length: Committed tokens before the root of this pass.
        plan: Plan of the drafts; None if nothing was drafted.
    """

    results: Results
    number: int = 0
    num_nodes: int = 1
    known: Drafts | None = None
    length: int = 0
    plan: DraftPlan | None = None

    @property
    def packed(self) -> mx.array:
        return self.results.part("packed", self.number)

    @property
    def root(self) -> mx.array:
        return self.results.part("roots", self.number)

    @property
    def hidden_state(self) -> mx.array:
        return self.results.part("hidden_states", self.number)

    @property
    def path(self) -> mx.array:
        return self.results.part("paths", self.number)

    @property
    def has_path(self) -> bool:
        """True if the pass was one over a tree."""
        return self.results.paths is not None

    @property
    def num_accepted(self) -> mx.array:
        """Number of accepted drafts, int32, shape (1,)."""
        return self.packed[1:2] if self.has_path else mx.zeros((1,), dtype=mx.int32)

    @property
    def max_accepted(self) -> int:
        paths = self.results.paths
        return 0 if paths is None else paths.shape[-1] - 1

    def log_probs_after(self, node: int) -> Callable[[], mx.array]:
        """Return a function that takes the row of a node, shape (V,), from all log-probabilities.

        It keeps no other array of the pass in memory.
        """
        rows = self.results.log_probs
        first = self.number * (rows.shape[0] // self.results.count)
        return partial(rows.__getitem__, first + node)

    @property
    def following_tokens(self) -> mx.array:
        """Tokens after each of the accepted path, the bonus token last, int32, shape (L,).

        Behind the bonus token they are junk, but token ids in any case.
        """
        if not self.has_path:
            return self.root
        length = self.path.shape[0]
        path = self.packed[2 + length : 2 + 2 * length]
        is_last = mx.arange(length) == self.num_accepted
        following = mx.concatenate([path[1:], path[:1]])
        return mx.maximum(mx.where(is_last, self.root, following), 0)

    @property
    def path_states(self) -> mx.array:
        """States after the tokens of the accepted path, shape (L, S); junk after them."""
        states = self.results.part("states", self.number)
        return states[self.path] if self.has_path else states

    @property
    def is_read(self) -> bool:
        return "_values" in self.__dict__

    @cached_property
    def _values(self) -> list[int]:
        """Its own numbers of `Results.packed`; the first use waits for the device."""
        return self.results.outcomes[self.number]

    @cached_property
    def rows(self) -> Sequence[int]:
        """Node indices of the accepted path; waits for that of a tree."""
        return self._values[2 : 3 + self._values[1]] if self.has_path else (0,)

    @cached_property
    def tokens(self) -> list[int]:
        """Accepted drafts and the bonus token, if any; waits, and raises as `check_finite` does."""
        values = self._values
        tokens = values[:1] if values[0] >= 0 else []
        if self.has_path:
            first = 4 + self.max_accepted
            tokens = values[first : first + values[1]] + tokens
        if not tokens:
            self.check_finite()
        return tokens

    @property
    def best(self) -> list[int]:
        """`best_rows` of the logits, of Z numbers; empty unless the drafting asks."""
        return self._values[4 + 2 * self.max_accepted if self.has_path else 1 :]

    @property
    def is_finite(self) -> bool:
        """Whether there is a bonus token; waits for the device."""
        return self._values[0] >= 0

    def check_finite(self) -> None:
        """Raise NonFiniteError if the logits are NaN; waits for the device.

        A user's sampler that has returned no token of the vocabulary raises ConfigError.
        """
        if not self.is_finite:
            if self._values[0] == NOT_A_TOKEN:
                size = self.results.log_probs.shape[-1]
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
    """Return the number of tokens after each node that a drafting wants in `Pass.best`.

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


def in_one_pass(passes: Sequence[Pass]) -> Results | None:
    """Return the results of the passes if these are all of one forward pass, in its order."""
    results = passes[0].results
    are_all = len(passes) == results.count and all(
        one.results is results and one.number == number for number, one in enumerate(passes)
    )
    return results if are_all else None


def roots_of(passes: Sequence[Pass]) -> mx.array:
    """Return the roots behind several passes, int32, shape (G,)."""
    results = in_one_pass(passes)
    return results.roots if results else mx.concatenate([one.root for one in passes])


def hidden_states_of(passes: Sequence[Pass]) -> mx.array:
    """Return the states that predicted the roots behind several passes, shape (G, H)."""
    results = in_one_pass(passes)
    return results.hidden_states if results else mx.stack([one.hidden_state for one in passes])


def sample_roots(
    sampler: TokenSampler, outputs: TargetOutputs, noise: GumbelNoise | None, num_best: int
) -> Results:
    """Sample after a root, or after those of G sequences, and dispatch that.

    The outputs have rows of G roots. The host looks for NaN, which saves the device an operation.
    """
    log_probs, tokens, normalisers = choose(sampler, outputs.logits, None, noise, 1)
    packed = tokens
    if num_best:
        packed = mx.concatenate([tokens[:, None], best_rows(log_probs, num_best)], axis=1)
    _, hidden_states, states = outputs
    mx.async_eval(packed, normalisers, tokens, hidden_states, log_probs, states)
    return Results(packed, tokens, hidden_states, log_probs, states, normalisers=normalisers)


def sample_and_accept(
    sampler: TokenSampler,
    outputs: TargetOutputs,
    tree: TokenTree,
    noise: GumbelNoise | None,
    num_best: int,
) -> Results:
    """Sample after every node of a tree, accept what agrees, and dispatch that."""
    num_levels = tree.max_depth + 1
    log_probs, tokens, normalisers = choose(sampler, outputs.logits, tree.depths, noise, num_levels)
    path, num_accepted, bonus, last, path_tokens = accept(tree, mark_nan(tokens, normalisers))
    hidden_state = outputs.hidden_states[last]
    best = [best_rows(log_probs, num_best).reshape(-1)] if num_best else []
    packed = mx.concatenate([bonus, num_accepted, path, path_tokens, *best])
    mx.async_eval(packed, hidden_state, log_probs, outputs.states)
    return Results(packed, mx.maximum(bonus, 0), hidden_state, log_probs, outputs.states, path)


def sample_and_accept_all(
    sampler: TokenSampler,
    outputs: TargetOutputs,
    trees: TreeBatch,
    noises: Sequence[GumbelNoise | None],
    num_best: int,
) -> Results:
    """Sample after every node of several trees, accept what agrees, and dispatch that.

    The outputs have an axis of G before their others. All sequences have noise of the same number
    of depths, L or more, and of the same parameters but the seed, or none has any.
    """
    count, size, rows = len(trees), trees.size, trees.depths
    known = [one for one in noises if one is not None]
    noise = None
    if known:
        noise = GumbelNoise(known[0].params, mx.concatenate([one.values for one in known]))
        rows = rows + known[0].values.shape[0] * mx.arange(count, dtype=mx.int32)[:, None]
    num_rows = count * size
    logits = outputs.logits.reshape(num_rows, -1)
    log_probs, sampled, normalisers = choose(sampler, logits, rows.reshape(-1), noise, num_rows)
    chosen = mark_nan(sampled, normalisers).reshape(count, size)
    paths, num_accepted, bonus, last, tokens = _accept_all(trees, chosen)
    hidden_states = mx.take_along_axis(outputs.hidden_states, last[..., None], axis=1)
    best = [best_rows(log_probs, num_best).reshape(count, -1)] if num_best else []
    packed = mx.concatenate([bonus, num_accepted, paths, tokens, *best], axis=1)
    mx.async_eval(packed, hidden_states, log_probs, outputs.states)
    roots, states = mx.maximum(bonus, 0).reshape(-1), outputs.states
    states = None if states is None else states.flatten(0, 1)
    return Results(packed, roots, hidden_states.squeeze(1), log_probs, states, paths)


def _accept_all(trees: TreeBatch, chosen: mx.array) -> tuple[mx.array, ...]:
    """Call `accept` on each tree, given choices of shape (G, N)."""
    size, max_depth = trees.size, max(trees.max_depths)

    def accept_one(choices: mx.array, *arrays: mx.array) -> tuple[mx.array, ...]:
        tokens, parents, depths, ancestors = arrays
        return accept(TokenTree(tokens, parents, depths, ancestors, size, max_depth), choices)

    accept_each: Callable[..., tuple[mx.array, ...]] = mx.vmap(accept_one)
    return accept_each(chosen, trees.tokens, trees.parents, trees.depths, trees.ancestors)
