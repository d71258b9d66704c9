"""Simulated decoding of self-generated texts: tokens per step, without running the target.

Decoding reproduces a text x_1 .. x_n of the target: at each position the target chooses the next
token of the text. So drafting from the cached hidden states, by the functions that decoding uses,
and comparing the drafts with the text gives the steps of decoding. Sampled texts are drafted with
posterior noise, as decoding with a seed drafts with the target's own.

Axes: n tokens of a shard, p positions, N nodes, L beam length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.config import DraftPlan, SamplingParams
from mlx_redrafter.decoding.accept import count_matches
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.decoding.stats import DecodingStats
from mlx_redrafter.proposers.expansion import best_nodes
from mlx_redrafter.proposers.redrafter.beam import expand, ranking
from mlx_redrafter.proposers.redrafter.calibration import Text
from mlx_redrafter.proposers.redrafter.network import Drafter, Embed
from mlx_redrafter.training.posterior_noise import sample_posterior_noise
from mlx_redrafter.training.teacher_cache import Shard
from mlx_redrafter.tree import NO_TOKEN

# Largest number of positions drafted at once.
MAX_POSITIONS = 512
# Largest size of the float32 logits computed at once, in bytes.
LOGITS_BYTES = 2**26
# Share of most probable tokens in a text above which the text counts as greedy.
GREEDY_SHARE = 0.97
# Token after the end of a text; no node of a tree has it, so no draft is accepted there.
END = NO_TOKEN - 1


def simulate(
    drafter: Drafter, embed: Embed, shards: Sequence[Shard], plan: DraftPlan, temp: float = 0.0
) -> DecodingStats:
    """Count the steps of decoding all texts; waits for the device.

    Args:
        drafter: The network.
        embed: The target's input embedding.
        shards: Texts, each a prompt and the target's continuation (``is_trained``).
        plan: Plan of the drafted trees; ``select`` must be "top_n".
        temp: Sampling temperature of the texts that are not greedy. 0 drafts these texts without
            noise, as decoding with one of mlx-lm's samplers does.

    Returns:
        Counts over all texts as if they were one text. The first token of a text belongs to no
        step; only one such token is counted, which makes ``tokens_per_step`` exact.
    """
    total = DecodingStats(num_tokens=1)
    for shard in shards:
        accepted = np.zeros(shard.tokens.shape[0], np.int64)
        stretches: dict[float, list[NDArray[np.int64]]] = {0.0: [], temp: []}
        for start, generated in _find_generated(shard):
            stretch = np.arange(start + generated[0], start + generated[-1])
            stretches[0.0 if _is_greedy(shard, start + generated) else temp].append(stretch)
        for noise_temp, roots in stretches.items():
            if roots:
                places = np.concatenate(roots)
                counts = count_accepted(drafter, embed, shard, places, plan, noise_temp)
                accepted[places] = counts
            for stretch in roots:
                _walk(accepted, int(stretch[0]), int(stretch[-1]) + 1, plan, total)
    return total


def measured_plans(drafter: Drafter, length: int) -> dict[str, DraftPlan]:
    """Plans that a finished drafter is measured with, by name: a chain and a tree.

    Args:
        drafter: The network.
        length: L.
    """
    width = min(4, drafter.config.head_rows)
    return {
        f"chain of {length - 1}": DraftPlan.of(1, length),
        "tree of 8": DraftPlan.of(width, length),
    }


def _find_generated(shard: Shard) -> list[tuple[int, NDArray[np.int64]]]:
    """Find texts with two generated tokens or more: start and indices of these tokens within."""
    is_trained, starts = np.array(shard.is_trained), np.array(shard.starts)
    texts = [(int(a), np.flatnonzero(is_trained[a:b])) for a, b in pairwise(starts)]
    return [(start, where) for start, where in texts if len(where) > 1 and where[0] > 0]


def _is_greedy(shard: Shard, generated: NDArray[np.int64]) -> bool:
    """Tell whether tokens were generated greedily; in low precision a few tokens may differ."""
    best = np.array(shard.top_ids[:, 0])[generated - 1]
    return bool(np.mean(best == np.array(shard.tokens)[generated]) > GREEDY_SHARE)


def iterate_generated_texts(shard: Shard) -> Iterator[Text]:
    """Iterate over the generated part of each text, with the target's outputs."""
    for start, generated in _find_generated(shard):
        first, last = start + int(generated[0]), start + int(generated[-1]) + 1
        states = slice(first - 1, last - 1)
        yield Text(
            shard.tokens[first:last],
            shard.hidden[states],
            shard.top_ids[states],
            shard.top_log_probs[states],
        )


def _walk(
    accepted: NDArray[np.int64], root: int, last: int, plan: DraftPlan, total: DecodingStats
) -> None:
    nodes = plan.num_nodes
    while root < last:
        # The token after the accepted drafts is the bonus token, unless the text ends before it.
        step = min(int(accepted[root]) + 1, last - root)
        total.count_step(int(accepted[root]), nodes, nodes)
        total.num_tokens += step
        root += step


def count_accepted(
    drafter: Drafter,
    embed: Embed,
    shard: Shard,
    roots: NDArray[np.int64],
    plan: DraftPlan,
    temp: float = 0.0,
) -> NDArray[np.int64]:
    """Count the drafts accepted in a step from each of the given roots.

    Args:
        drafter: The network.
        embed: The target's input embedding.
        shard: Texts.
        roots: Indices of the root tokens in the shard, none the first of a text, shape (p,).
        plan: Plan of the drafted trees.
        temp: Sampling temperature of the texts; 0 drafts without noise.

    Returns:
        Number of accepted drafts of each root, int64, shape (p,).
    """
    length = plan.shape.length
    widest = max(plan.shape.width, length) if temp else plan.shape.width
    size = LOGITS_BYTES // (4 * drafter.config.head_rows * widest)
    size = max(1, min(MAX_POSITIONS, size))
    tokens = np.array(shard.tokens)
    following = _read_following(shard, roots, length)
    draft = mx.vmap(_make_drafting_function(drafter, embed, plan, temp))
    counts = []
    for start in range(0, len(roots), size):
        places = roots[start : start + size]
        inputs = [shard.hidden[mx.array(places - 1)], mx.array(tokens[places][:, None])]
        if temp:
            inputs.append(_draw_noise(shard, places, length, drafter.config.vocab_size, temp))
        drafted = draft(*inputs)
        mx.eval(drafted)
        nodes, parents, depths = (np.array(array) for array in drafted)
        counts.append(count_matches(nodes, parents, depths, following[start : start + size]))
    return np.concatenate(counts)


def _make_drafting_function(
    drafter: Drafter, embed: Embed, plan: DraftPlan, temp: float
) -> Callable[..., tuple[mx.array, ...]]:
    """Make the function from hidden state (H,), root (1,) and optional noise (L - 1, V) to tree."""
    params, project_input = SamplingParams(temp=temp), drafter.input_of(embed)

    def draft(
        hidden: mx.array, root: mx.array, noise: mx.array | None = None
    ) -> tuple[mx.array, ...]:
        rank = None if noise is None else ranking(drafter, GumbelNoise(params, noise))
        expansion = expand(drafter, project_input, hidden, root, plan.shape, rank)
        tree = best_nodes(expansion, root, plan)
        return tree.tokens, tree.parents, tree.depths

    return draft


def _draw_noise(
    shard: Shard, roots: NDArray[np.int64], length: int, vocab_size: int, temp: float
) -> mx.array:
    """Draw noise for the choices after each root, by depth, float32, shape (p, L - 1, V)."""
    # Any noise will do past the end of the texts, where no draft is accepted.
    states = np.minimum(roots[:, None] + np.arange(length - 1), shard.tokens.shape[0] - 2)
    used, rows = np.unique(states, return_inverse=True)
    noise = sample_posterior_noise(shard, mx.array(used), vocab_size, temp)
    return noise[mx.array(rows.reshape(states.shape))]


def _read_following(shard: Shard, roots: NDArray[np.int64], length: int) -> NDArray[np.int32]:
    """Read the L tokens after each root, END past the end of its text, int32, shape (p, L)."""
    starts = np.array(shard.starts)
    tokens = np.append(np.array(shard.tokens), np.int32(END))
    ends = starts[np.searchsorted(starts, roots, side="right")]
    ahead = roots[:, None] + np.arange(1, length + 1)
    return tokens[np.where(ahead < ends[:, None], ahead, -1)]
