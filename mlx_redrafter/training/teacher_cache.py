"""The teacher cache: the target's outputs at every token of every sequence, on disk.

One pass of the target computes all that training needs, however long the drafter trains. Texts that
the target generates are stored here with the outputs that chose their tokens. A cache belongs to
one target, one set of texts and one set of options; opening it with others is an error.

Axes: n tokens of a shard, d sequences, H hidden size, C layers of the target, k kept tokens, L beam
length of a drafter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Literal, get_args

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.checkpoint_files import read_json
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.files import (
    Arrays,
    find_difference,
    load_arrays,
    save_arrays,
    save_json,
)

# Version of the files and of the names in the manifest; a cache of another version is an error.
FORMAT = 4
# Name of the file with the identity of a cache.
MANIFEST = "manifest.json"
Split = Literal["train", "held-out"]


@dataclass(frozen=True)
class Shard:
    """Concatenated sequences and the target's outputs at every token.

    Attributes:
        tokens: Token ids, int32, shape (n,).
        is_trained: True for tokens to draft, bool, shape (n,).
        starts: Index of the first token of each sequence, and n, int32, shape (d + 1,).
        hidden: The target's last hidden state after the final norm, float16, shape (n, H).
        top_ids: The k most probable next tokens, most probable first, int32, shape (n, k).
        top_log_probs: Their natural log-probabilities, float16, shape (n, k).
        tail: Probability of all other next tokens, float32, shape (n,).
        states: Inputs of C of the target's layers, for the drafters that read them, float16, shape
            (n, C * H), or None; they have a file of their own.
    """

    tokens: mx.array
    is_trained: mx.array
    starts: mx.array
    hidden: mx.array
    top_ids: mx.array
    top_log_probs: mx.array
    tail: mx.array
    states: mx.array | None = None

    def arrays(self) -> Arrays:
        return {name: value for name, value in vars(self).items() if name != "states"}

    def text(self, start: int, end: int) -> Shard:
        """Return the tokens from ``start`` to ``end`` as one sequence."""
        parts = {name: one[start:end] for name, one in vars(self).items() if one is not None}
        parts["starts"] = mx.array([0, parts["tokens"].shape[0]], dtype=mx.int32)
        return Shard(**parts)

    def texts(self) -> Iterator[Shard]:
        return (self.text(start, end) for start, end in pairwise(to_ints(self.starts)))


class TeacherCache:
    """A folder of shards.

    ``identity`` has the target, texts and options that the cache depends on, by name.
    """

    def __init__(self, folder: Path, identity: Mapping[str, object]):
        self.folder, self._manifest = folder, folder / MANIFEST
        self.identity = {"format": FORMAT, **identity}
        self._check()

    def begin(self) -> None:
        """Write the manifest, before the first file, unless it exists.

        Raise `CheckpointError` if another run has begun another cache here meanwhile.
        """
        if not self._check():
            save_json(self._manifest, self.identity)

    def _check(self) -> bool:
        """Return whether there is a manifest; raise `CheckpointError` if it is of another cache."""
        if not self._manifest.exists():
            return False
        if (difference := find_difference(read_json(self._manifest), self.identity)) is not None:
            raise CheckpointError(
                f"the cache in {self.folder} was made with another {difference}; give the same "
                "files and options again, or choose another folder"
            )
        return True

    def path(self, split: Split, number: int, layers: Sequence[int] = ()) -> Path:
        """Name the file of a shard, or of the inputs of layers at its tokens."""
        names = ["states", *map(str, layers)] if layers else []
        return self.folder / f"{'-'.join([split, *names])}-{number:05d}.safetensors"

    def has(self, split: Split, number: int, layers: Sequence[int] = ()) -> bool:
        return self.path(split, number, layers).exists()

    def save(self, split: Split, number: int, shard: Shard, layers: Sequence[int] = ()) -> None:
        """Store a shard with the inputs of layers; blocks until MLX has evaluated its arrays.

        A shard that exists stays, as other runs may share it: a second reading rounds differently.
        """
        self.begin()
        if shard.states is not None:
            save_arrays(self.path(split, number, layers), {"states": shard.states})
        if not self.has(split, number):
            save_arrays(self.path(split, number), shard.arrays())

    def load(self, split: Split, number: int, layers: Sequence[int] = ()) -> Shard:
        """Read a shard, with the inputs of some layers if any are given."""
        path = self.path(split, number)
        arrays, _ = load_arrays(path)
        if layers:
            arrays |= load_arrays(self.path(split, number, layers))[0]
        try:
            return Shard(**arrays)
        except TypeError as error:
            raise CheckpointError(
                f"expected a shard of the teacher cache in {path}, found other arrays; delete "
                f"{self.folder} and train again"
            ) from error

    def num_shards(self, split: Split) -> int:
        """Count the shards, which are numbered from 0 without gaps."""
        return next(number for number in count() if not self.has(split, number))

    def count_tokens(self, layers: Sequence[int]) -> tuple[int, int]:
        """Count the tokens of all shards, and of those without the inputs of some layers."""
        places = [(split, n) for split in get_args(Split) for n in range(self.num_shards(split))]
        sizes = {place: len(self.load(*place).tokens) for place in places}
        unread = (size for place, size in sizes.items() if not self.has(*place, layers))
        return sum(sizes.values()), sum(unread)


def pack_sequences(sequences: Sequence[TokenSequence]) -> Arrays:
    """Join sequences into arrays; the inverse of `unpack_sequences`."""
    return {
        "tokens": mx.array(np.concatenate([s.tokens for s in sequences])),
        "is_trained": mx.array(np.concatenate([s.is_trained for s in sequences])),
        "starts": mx.array(np.cumsum([0] + [len(s) for s in sequences]).astype(np.int32)),
    }


def unpack_sequences(arrays: Arrays) -> list[TokenSequence]:
    tokens, is_trained = np.array(arrays["tokens"]), np.array(arrays["is_trained"])
    starts = np.array(arrays["starts"])
    return [TokenSequence(tokens[a:b], is_trained[a:b]) for a, b in pairwise(starts)]


def find_draftable_steps(shard: Shard, length: int) -> NDArray[np.bool_]:
    """Find the unroll steps whose drafts can occur in decoding, bool, shape (n, L - 1).

    Step i at position t, whose next token is the root, drafts the token at t + 2 + i. The step
    counts if all tokens from the root to this draft are in the same sequence and trained.
    """
    is_trained, starts = np.array(shard.is_trained), np.array(shard.starts)
    size = len(is_trained)
    sequence = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    # The padding past the end is another sequence, so that no step reaches into it.
    sequence = np.pad(sequence, (0, length), constant_values=-1)
    trained = np.pad(is_trained, (0, length))
    ahead = np.arange(size)[:, None] + np.arange(1, length + 1)
    counts = trained[ahead] & (sequence[ahead] == sequence[:size, None])
    return np.logical_and.accumulate(counts, axis=1)[:, 1:]
