"""The teacher cache: what the target thinks of every sequence, on disk.

One pass of the target over the sequences gives all that training needs, for every unroll step, so
the target runs once however long the drafter trains. Axes: n tokens of a shard, d sequences, H
hidden size, k kept tokens, L beam length.

A cache belongs to one target, one set of texts and one set of options; another one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.training.files import Arrays, load_arrays, load_json, save_arrays, save_json

FORMAT = 1
MANIFEST = "manifest.json"
Part = Literal["train", "held-out"]


@dataclass(frozen=True)
class Shard:
    """Sequences, one after the other, and the target's outputs at every token.

    Attributes:
        tokens: Token ids, int32, shape (n,).
        is_trained: Tokens that are drafted, bool, shape (n,).
        starts: Where sequences start, and n, int32, shape (d + 1,).
        hidden: The target's last hidden state after its final norm, float16, shape (n, H).
        top_ids: The k most probable next tokens, most probable first, int32, shape (n, k).
        top_log_probs: Their natural log-probabilities, float16, shape (n, k).
        tail: Probability of all other tokens, float32, shape (n,).
        rollouts: L greedy tokens after every token, int32, shape (n, L), or None.
    """

    tokens: mx.array
    is_trained: mx.array
    starts: mx.array
    hidden: mx.array
    top_ids: mx.array
    top_log_probs: mx.array
    tail: mx.array
    rollouts: mx.array | None = None

    def arrays(self) -> Arrays:
        """What is stored; rollouts have a file of their own."""
        return {name: value for name, value in vars(self).items() if name != "rollouts"}


class TeacherCache:
    """A folder of shards.

    Args:
        folder: Where they are.
        identity: What they were made from and how. Strings and numbers.

    Raises:
        CheckpointError: The folder holds a cache with another identity; the difference is named.
    """

    def __init__(self, folder: Path, identity: Mapping[str, object]):
        self.folder = folder
        identity = {"format": FORMAT, **identity}
        path = folder / MANIFEST
        if path.exists():
            _check_identity(load_json(path), identity, folder)
        else:
            save_json(path, identity)

    def path(self, part: Part, number: int) -> Path:
        """File of a shard."""
        return self.folder / f"{part}-{number:05d}.safetensors"

    def rollout_path(self, part: Part, number: int, length: int) -> Path:
        """File of the rollouts of a shard, ``length`` tokens each."""
        return self.folder / f"{part}-rollouts-{length}-{number:05d}.safetensors"

    def has(self, part: Part, number: int) -> bool:
        """Whether a shard is there."""
        return self.path(part, number).exists()

    def save(self, part: Part, number: int, shard: Shard) -> None:
        """Store a shard; waits for the device."""
        save_arrays(self.path(part, number), shard.arrays())

    def load(self, part: Part, number: int, rollout_length: int | None = None) -> Shard:
        """Read a shard, with its rollouts if their length is given.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        arrays = load_arrays(self.path(part, number))
        if rollout_length is not None:
            path = self.rollout_path(part, number, rollout_length)
            arrays["rollouts"] = load_arrays(path)["rollouts"]
        try:
            return Shard(**arrays)
        except TypeError as error:
            raise CheckpointError(
                f"expected a shard of the teacher cache in {self.path(part, number)}; delete "
                f"{self.folder} and train again"
            ) from error

    def num_shards(self, part: Part) -> int:
        """Shards in a row from number 0 on."""
        number = 0
        while self.has(part, number):
            number += 1
        return number


def _check_identity(
    found: Mapping[str, object], expected: Mapping[str, object], folder: Path
) -> None:
    for name in sorted({*found, *expected}):
        if found.get(name) != expected.get(name):
            raise CheckpointError(
                f"the cache in {folder} was made with another {name}: expected "
                f"{expected.get(name)!r}, found {found.get(name)!r}; delete the folder or choose "
                "another one"
            )


def windows(
    tokens: NDArray[np.int32], is_trained: NDArray[np.bool_], starts: NDArray[np.int32], length: int
) -> NDArray[np.bool_]:
    """Which unroll steps of which positions are drafts that serving could see.

    From position t, whose next token is the root, step i drafts the token at t + 2 + i. It counts
    if root and drafts up to it are in the same sequence and written by the target.

    Args:
        tokens: Shape (n,).
        is_trained: Shape (n,).
        starts: Shape (d + 1,).
        length: L, root included.

    Returns:
        bool, shape (n, L - 1).
    """
    count = len(tokens)
    sequence = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    # Past the end: a sequence of its own, so that nothing runs over.
    sequence = np.concatenate([sequence, np.full(length, -1)])
    trained = np.concatenate([is_trained, np.zeros(length, dtype=np.bool_)])
    reaches = np.ones(count, dtype=np.bool_)
    steps = []
    for ahead in range(1, length + 1):
        reaches = reaches & trained[ahead : ahead + count]
        reaches = reaches & (sequence[ahead : ahead + count] == sequence[:count])
        if ahead > 1:
            steps.append(reaches)
    return np.stack(steps, axis=1)
