"""Simulated decoding of self-generated texts: tokens per step, without running the target.

Decoding reproduces a text of the target. So drafting from the cached hidden states, and comparing
the drafts with the text, gives the steps of decoding. Sampled texts are drafted with posterior
Gumbel noise, as decoding with a seed ranks drafts with the target's.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.decoding.delivery import DecodingStats
from mlx_redrafter.training.generated_texts import find_generated
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training.teacher_cache import Shard

# Share of most probable tokens in a text above which the text counts as greedy.
GREEDY_SHARE = 0.97


def simulate(
    student: Student, shards: Iterable[Shard], length: int, temp: float = 0.0
) -> DecodingStats:
    """Count the steps of decoding all texts with chains; blocks until MLX has evaluated them.

    Args:
        student: The drafter.
        shards: Texts, each a prompt and the target's continuation (``is_trained``).
        length: Number of tokens of a chain, its root included.
        temp: Sampling temperature of the texts that are not greedy; 0 drafts these texts without
            Gumbel noise, like decoding with one of mlx-lm's samplers.

    Returns:
        Counts as if all texts were one; the first token of a text belongs to no step, and only one
        such token is counted.
    """
    total = DecodingStats(num_tokens=1)
    for shard in shards:
        for start, generated in find_generated(shard):
            roots = np.arange(start + generated[0], start + generated[-1])
            noise_temp = 0.0 if _is_greedy(shard, start + generated) else temp
            accepted = student.count_accepted(shard, roots, length, noise_temp)
            _walk(accepted.tolist(), length, total)
    return total


def _is_greedy(shard: Shard, generated: NDArray[np.int64]) -> bool:
    # In low precision a few tokens may differ.
    best = np.array(shard.top_ids[:, 0])[generated - 1]
    return bool(np.mean(best == np.array(shard.tokens)[generated]) > GREEDY_SHARE)


def _walk(accepted: Sequence[int], length: int, total: DecodingStats) -> None:
    root = 0
    while root < len(accepted):
        # The token after the accepted drafts is the bonus token, unless the text ends before it.
        step = min(accepted[root] + 1, len(accepted) - root)
        total.count_step(accepted[root], length)
        total.num_tokens += step
        root += step
