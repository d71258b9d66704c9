"""Samplers of the target's tokens: greedy, with noise keyed by position, or mlx-lm's; exact top-k.

Axes: N nodes or rows, V vocabulary, L levels of the tree, the root's included.

A sampler returns the target's token after every node of a tree. In plain decoding the same sampler
has one node at a time, and the tokens agree: a token depends on the logits at the node and on the
node's position, never on the tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.target.caches.batch_layers import MAX_OPEN

Sampler = Callable[[mx.array], mx.array]

# Stands for the token after logits that are NaN. Padding nodes have another number, `NO_TOKEN`.
NOT_A_NUMBER = -2
# Stands for a token id of the user's sampler that is not in the vocabulary.
NOT_A_TOKEN = -3
# Noise per position is drawn in multiples of this, so that vector units treat all tokens alike.
NOISE_ALIGNMENT = 64
# Maximum number of positions whose noise is drawn ahead with one set of operations, which cost more
# than the numbers if the vocabulary is small.
MAX_POSITIONS = 16
# Maximum number of numbers drawn ahead.
MAX_NOISE = 2**14
# Smallest temperature and nucleus mass that float32 keeps apart from 0. With a mass of 0, mlx-lm
# would read past the end of the vocabulary.
MIN_FACTOR = 1e-30
# Minimum entries of a row that `top_k` does not sort whole.
MIN_SORTED = 512
# Minimum number of blocks per result in such a row.
MIN_BLOCKS = 2


class TokenSampler:
    """Samples the target's token after every node of a tree: the most probable one, or by noise."""

    def noise(
        self, position: int, num_levels: int, further: mx.array | None = None, furthest: int = 0
    ) -> GumbelNoise | None:
        """Return the noise of the choices after nodes of each depth, if it is known beforehand.

        Args:
            position: Position of the root, the number of tokens before it, or its minimum.
            num_levels: Levels of the tree, the root's included, L.
            further: Distance of the root from there, int32, shape (1,), unless ``furthest`` is 0.
            furthest: Upper bound of ``further``.
        """
        return None

    def sample(
        self,
        log_probs: mx.array,
        depths: mx.array | None,
        noise: GumbelNoise | None,
        num_levels: int,
    ) -> mx.array:
        """Return the target's token after each node, integer, shape (N,).

        Args:
            log_probs: Natural log-probabilities after logits processors, shape (N, V).
            depths: Depth of each node, int32, shape (N,); None for roots alone.
            noise: Result of `noise`.
            num_levels: Bound above all depths, L.
        """
        return mx.argmax(log_probs, axis=-1) if noise is None else noise.sample(log_probs, depths)

    def commit(self, num_choices: int) -> None:
        """Keep the first choices of the last `sample` along the path, and forget the others.

        What others have done with the random state meanwhile stays, here and in `go_back`.
        """

    def go_back(self, num_choices: int) -> None:
        """Leave what there is after so many choices in all, of the last `MAX_OPEN` passes."""


class GumbelNoise(NamedTuple):
    """Gumbel noise keyed by (seed, absolute position), for the choices after a tree's nodes.

    The token at position t is ``argmax(filtered log_probs / temp + G_t)``: a sample from the
    tempered distribution (Gumbel-max), and a function of the seed and the tokens before it alone.

    Attributes:
        params: Temperature and filters.
        values: Standard Gumbel noise of the choice after a node of each depth, float32, (L, V).
    """

    params: SamplingParams
    values: mx.array

    def sample(self, log_probs: mx.array, depths: mx.array | None) -> mx.array:
        """Return the token after each node: log_probs (N, V), depths (N,), to ids (N,).

        Without depths, each node has the row of its number.
        """
        rows = self.values if depths is None else self.values[depths]
        return mx.argmax(self._tempered(log_probs) + rows, axis=-1)

    def rank(
        self, log_probs: mx.array, depth: int | mx.array, token_ids: mx.array | None, weight: float
    ) -> mx.array:
        """Estimate what `sample` will choose after nodes of one depth, for a drafter.

        A drafter that ranks tokens with the noise of the target proposes what the target would
        sample, rather than what is most probable (drafter-invariant coupling, arXiv 2408.07978).

        Args:
            log_probs: The drafter's natural log-probabilities, shape (W, n), as is the result.
            depth: Depth of the nodes, or of each of them, int32, shape (W,).
            token_ids: Token ids of the columns, (n,) or (W, n); None for the first tokens in order.
            weight: Weight of the noise, 0 to 1.
        """
        rows = self.values[depth]
        if token_ids is None:
            rows = rows[..., : log_probs.shape[-1]]
        elif token_ids.ndim == 1:
            rows = rows[..., token_ids]
        else:
            rows = mx.take_along_axis(rows, token_ids, axis=-1)
        scores = self._tempered(log_probs) + weight * rows
        return scores - mx.logsumexp(scores, axis=-1, keepdims=True)

    def _tempered(self, log_probs: mx.array) -> mx.array:
        # mlx-lm's order: all filters look at the distribution at temperature 1.
        params, log_probs = self.params, log_probs.astype(mx.float32)
        if 0 < params.top_p < 1:
            log_probs = apply_top_p(log_probs, max(params.top_p, MIN_FACTOR))
        if params.min_p > 0:
            log_probs = apply_min_p(log_probs, params.min_p)
        if 0 < params.top_k < log_probs.shape[-1]:
            log_probs = apply_top_k(log_probs, params.top_k)
        # Small models notice every operation, and the temperature is mostly 1.
        return log_probs if params.temp == 1 else log_probs / max(params.temp, MIN_FACTOR)


class KeyedSampler(TokenSampler):
    """Greedy choice, or sampling with `GumbelNoise`."""

    def __init__(self, params: SamplingParams, vocab_size: int):
        if params.top_k >= vocab_size:
            raise ConfigError(
                f"top_k must be below the vocabulary size {vocab_size}, got {params.top_k}; "
                "use 0 to keep every token"
            )
        self.params = params
        self.vocab_size = vocab_size
        # Noise of the choices at positions in a row, shape (n, V), the first of these positions,
        # and the rows one by one, once a root alone needs them.
        self._rows = mx.zeros((0, vocab_size))
        self._first = 0
        self._single: list[mx.array] = []

    @cached_property
    def kind(self) -> tuple[float, ...]:
        """Parameters except the seed, () if greedy; equal ones share the operations."""
        return astuple(replace(self.params, seed=0)) if self.params.temp else ()

    def noise(
        self, position: int, num_levels: int, further: mx.array | None = None, furthest: int = 0
    ) -> GumbelNoise | None:
        if self.params.temp == 0:
            return None
        if num_levels == 1 and not furthest:
            return GumbelNoise(self.params, self._row_of_root(position))
        # The token after a node of depth d stands d + 1 after the root.
        first, count = position + 1, furthest + num_levels
        if not furthest:
            further = None
        if count > self._max_positions:
            positions = mx.arange(first, first + num_levels)
            positions = positions if further is None else further + positions
            values = gumbel_noise(self.params.seed, positions, self.vocab_size)
            return GumbelNoise(self.params, values)
        if not self._first <= first <= self._first + len(self._rows) - count:
            self._draw(first)
        start, stop = first - self._first, first - self._first + num_levels
        if further is None:
            return GumbelNoise(self.params, self._rows[start:stop])
        return GumbelNoise(self.params, self._rows[further + mx.arange(start, stop)])

    def _row_of_root(self, position: int) -> mx.array:
        number = position + 1 - self._first
        if not 0 <= number < len(self._rows):
            self._draw(position + 1)
            number = 0
        if not self._single:
            count = len(self._rows)
            self._single = list(mx.split(self._rows, count)) if count > 1 else [self._rows]
        return self._single[number]

    @property
    def _max_positions(self) -> int:
        return min(MAX_POSITIONS, MAX_NOISE // self.vocab_size)

    def _draw(self, first: int) -> None:
        seed, size, count = self.params.seed, self.vocab_size, max(1, self._max_positions)
        self._first, self._single = first, []
        if count == 1:
            self._rows = gumbel_noise_at(seed, first, size)
        else:
            self._rows = gumbel_noise(seed, mx.arange(first, first + count), size)


def noise_for_all(
    samplers: Sequence[KeyedSampler],
    positions: Sequence[int],
    num_levels: int = 1,
    further: mx.array | None = None,
) -> mx.array:
    """Draw the noise of G sequences, the same numbers as each one's `KeyedSampler.noise`.

    ``further`` has shape (G,). The result has the L rows of each one in a row, shape (G L, V).
    """
    seeds = mx.array([one.params.seed for one in samplers], dtype=mx.uint32)
    first = mx.array(list(positions), dtype=mx.int32)
    roots = first if further is None else first + further
    following = roots[:, None] + mx.arange(1, num_levels + 1, dtype=mx.int32)
    return gumbel_noise(seeds[:, None], following, samplers[0].vocab_size)


def gumbel_noise(seed: int | mx.array, positions: mx.array, vocab_size: int) -> mx.array:
    """Draw standard Gumbel noise for n positions, integer, with one seed or one for each.

    A row of the result, float32, shape (n, V), depends on (seed, its position) alone.
    """
    width = _noise_width(vocab_size)
    positions = positions.astype(mx.uint32)
    seeds = mx.full(positions.shape, seed, dtype=mx.uint32)
    keys = mx.stack([seeds, positions], axis=-1).reshape(-1, 2)
    draw = mx.vmap(lambda key: mx.random.gumbel((width,), key=key))
    return draw(keys)[:, :vocab_size]


def gumbel_noise_at(seed: int, position: int, vocab_size: int) -> mx.array:
    """Draw the noise of `gumbel_noise` for one position, with a third of its operations."""
    key = mx.array([seed, position], dtype=mx.uint32)
    return mx.random.gumbel((1, _noise_width(vocab_size)), key=key)[:, :vocab_size]


def _noise_width(vocab_size: int) -> int:
    return -(-vocab_size // NOISE_ALIGNMENT) * NOISE_ALIGNMENT


class StockSampler(TokenSampler):
    """A sampler in mlx-lm's form, exact with the same ``mx.random.seed``.

    All nodes of one depth sample from the same random state, the one that plain decoding would
    have there, and the state after a step is the one after the last choice that counted. The
    sampler must depend on its argument and on ``mx.random.state`` only, and draw as many numbers
    for every argument.
    """

    def __init__(self, sampler: Sampler):
        self.sampler = sampler
        # Choices before the newest pass, and those of it that count.
        self._num_before = self._num_chosen = 0
        # Random states before each level of a pass and after the last one, by the choices before
        # it: the newest passes.
        self._keys: dict[int, mx.array] = {}
        # The array of the random state that it has left.
        self._left: mx.array | None = None

    def sample(
        self,
        log_probs: mx.array,
        depths: mx.array | None,
        noise: GumbelNoise | None,
        num_levels: int,
    ) -> mx.array:
        """Sample as mlx-lm would, and leave the random state after the deepest choice.

        So texts in turns never draw the same numbers.
        """
        keys, chosen = [random_state()], list[mx.array]()
        for _ in range(num_levels):  # all but the first choice are for the states they leave
            chosen.append(self._sample(log_probs[:1], keys[-1]))
            keys.append(random_state())
        del chosen[1:]
        states = mx.stack(keys)
        for node in range(1, log_probs.shape[0]):
            assert depths is not None
            chosen.append(self._sample(log_probs[node : node + 1], states[depths[node]]))
        self._num_before += self._num_chosen
        self._keys[self._num_before] = states
        self._keys = dict(list(self._keys.items())[-MAX_OPEN:])
        self._num_chosen = 1
        self._leave(self._num_before + num_levels)
        return mx.concatenate(chosen)

    def commit(self, num_choices: int) -> None:
        self._num_chosen = num_choices
        self.go_back(self._num_before + num_choices)

    def go_back(self, num_choices: int) -> None:
        if _random_array() is self._left:
            self._leave(num_choices)

    def _leave(self, num_choices: int) -> None:
        first = max(one for one in self._keys if one <= num_choices)
        _set_random_state(self._keys[first][num_choices - first])
        self._left = _random_array()

    def _sample(self, log_probs: mx.array, key: mx.array) -> mx.array:
        _set_random_state(key)
        token = self.sampler(log_probs)
        if not isinstance(token, mx.array) or token.size != 1:
            found = getattr(token, "shape", type(token).__name__)
            raise ConfigError(f"sampler must return one token id per row, as an array, got {found}")
        # MLX reads memory beyond the embedding for ids that are not in the vocabulary.
        chosen = token.reshape(1).astype(mx.int32)
        is_known = chosen.astype(mx.uint32) < log_probs.shape[-1]
        return mx.where(is_known, chosen, NOT_A_TOKEN)


def choose(
    sampler: TokenSampler,
    logits: mx.array,
    depths: mx.array | None,
    noise: GumbelNoise | None,
    num_levels: int,
) -> tuple[mx.array, mx.array, mx.array]:
    """Choose the target's token after each node; the arguments are those of `TokenSampler.sample`.

    Return natural log-probabilities, (N, V), in the dtype of the logits, as mlx-lm has them; token
    ids, int32, shape (N,), any token if the logits are NaN; and the logarithms of the sums that
    normalise the logits, shape (N,): finite unless one of the logits is NaN or infinite, or all of
    them are minus infinity.
    """
    normalisers = mx.logsumexp(logits, axis=-1, keepdims=True)
    log_probs = logits - normalisers
    tokens = sampler.sample(log_probs, depths, noise, num_levels).astype(mx.int32)
    return log_probs, tokens, normalisers.squeeze(-1)


def mark_nan(tokens: mx.array, normalisers: mx.array) -> mx.array:
    """Replace tokens whose logits are NaN by `NOT_A_NUMBER`, which no draft is equal to."""
    # `mx.isfinite` has more operations.
    return mx.where(mx.abs(normalisers) < math.inf, tokens, NOT_A_NUMBER)


def _random_array() -> mx.array:
    """Return the array of MLX's random state itself; each draw makes another one."""
    return mx.random.state[0]  # type: ignore[index]


def random_state() -> mx.array:
    return mx.array(_random_array())


def _set_random_state(key: mx.array) -> None:
    # In place: MLX refuses item assignment, and rebinding the attribute has no effect.
    _random_array()[:] = key


def top_k(scores: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Find the k largest entries of each row; of equal entries the first ones.

    ``scores``, shape (R, V), have no NaN, and at least k entries above minus infinity in every row.
    Return values in descending order, and their indices (uint32), both of shape (R, k). All k
    entries lie in the k blocks with the largest maxima, so only these blocks are sorted.
    """
    size = scores.shape[-1]
    if k == 1:
        indices = mx.argmax(scores, axis=-1, keepdims=True)
    elif size < max(MIN_SORTED, MIN_BLOCKS * k * block_size(size, k)):
        indices = mx.argsort(-scores, axis=-1)[:, :k]
    else:
        indices = _top_k_of_blocks(scores, k, block_size(size, k))
    return mx.take_along_axis(scores, indices, axis=-1), indices


def block_size(size: int, k: int) -> int:
    """Choose entries per block, a power of two, so that both stages sort about as many numbers."""
    return 1 << max(3, round(math.log2(size / k) / 2))


def _top_k_of_blocks(scores: mx.array, k: int, block: int) -> mx.array:
    rows, size = scores.shape
    num_blocks = -(-size // block)
    padding = num_blocks * block - size
    if padding:
        scores = mx.pad(scores, [(0, 0), (0, padding)], constant_values=-mx.inf)
    blocks = scores.reshape(rows, num_blocks, block)
    # Blocks in their order in the row, so that of equal entries the first ones come first.
    best = mx.sort(mx.argsort(-mx.max(blocks, axis=-1), axis=-1)[:, :k], axis=-1)
    entries = mx.take_along_axis(blocks, best[..., None], axis=1).reshape(rows, k * block)
    order = mx.argsort(-entries, axis=-1)[:, :k]
    return mx.take_along_axis(best, order // block, axis=-1) * block + order % block
