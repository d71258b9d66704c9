"""Texts that the target reads, and its outputs on them in the cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from mlx_redrafter.target.target import Target
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.teacher_cache import Shard, Split, TeacherCache
from mlx_redrafter.training.teacher_outputs import TeacherOutputs, chunk_tokens
from mlx_redrafter.training.text_batch import OnTokens, report_after

# Number of next tokens whose probabilities are cached; of held-out texts, which calibrate the
# drafter, `TOP_TOKENS`.
TOP_K = 32
# Number of tokens that closes a shard.
SHARD_TOKENS = 16384
# Number of sequences per forward pass.
BATCH_SEQUENCES = 8


@dataclass(frozen=True)
class Teacher:
    """A target whose outputs on texts go to a split of a cache.

    The cache keeps the log-probabilities of ``k`` next tokens, and the inputs of some layers.
    """

    target: Target
    cache: TeacherCache
    split: Split
    k: int
    layers: Sequence[int]

    def read(self, sequences: Sequence[TokenSequence], on_tokens: OnTokens) -> int:
        """Read texts into shards, numbered from 0, and count these; existing files are kept.

        ``on_tokens`` receives the number of tokens done so far.
        """
        done = number = 0
        for number, group in enumerate(group_by_tokens(sequences, SHARD_TOKENS), 1):
            self.read_shard(number - 1, group, partial(report_after, done, on_tokens))
            done += sum(map(len, group))
            on_tokens(done)
        return number

    def read_shard(
        self, number: int, sequences: Sequence[TokenSequence], on_tokens: OnTokens
    ) -> None:
        """Read the texts of one shard, unless its files exist."""
        if not (self.has(number) and self.cache.has(self.split, number, self.layers)):
            shard = read_sequences(self.target, sequences, self.k, self.layers, on_tokens)
            self.save(number, shard)

    def has(self, number: int) -> bool:
        """Return whether there is a shard, which may lack the inputs of layers."""
        return self.cache.has(self.split, number)

    def load(self, number: int) -> list[TokenSequence]:
        return self.cache.load(self.split, number).sequences()

    def save(self, number: int, shard: Shard) -> None:
        self.cache.save(self.split, number, shard, self.layers)


def group_by_tokens(
    sequences: Sequence[TokenSequence], num_tokens: int
) -> Iterator[list[TokenSequence]]:
    """Group consecutive sequences; a group closes once it has ``num_tokens`` tokens."""
    group: list[TokenSequence] = []
    for sequence in sequences:
        group.append(sequence)
        if sum(map(len, group)) >= num_tokens:
            yield group
            group = []
    if group:
        yield group


def read_sequences(
    target: Target,
    sequences: Sequence[TokenSequence],
    k: int,
    layers: Sequence[int] = (),
    on_tokens: OnTokens = lambda count: None,
) -> Shard:
    """Compute hidden states, inputs of layers and most probable next tokens at every token.

    ``on_tokens`` receives the number of tokens done, after every pass.
    """
    outputs = TeacherOutputs(target, [len(one) for one in sequences], k, layers)
    # Batches of similar length: shorter sequences are padded on the right, and no token before the
    # padding attends to it.
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    done = 0
    for first in range(0, len(order), BATCH_SEQUENCES):
        rows = order[first : first + BATCH_SEQUENCES]
        for _ in _read_batch(target, sequences, rows, outputs):
            on_tokens(done)
        done += sum(len(sequences[row]) for row in rows)
    return outputs.make_shard(sequences)


def _read_batch(
    target: Target, sequences: Sequence[TokenSequence], rows: Sequence[int], outputs: TeacherOutputs
) -> Iterator[None]:
    """Write the outputs of some sequences; yields after every pass."""
    lengths = np.array([len(sequences[row]) for row in rows])
    padded = np.zeros((len(rows), lengths.max()), np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(sequences[row])] = sequences[row].tokens
    chunk = chunk_tokens(target.vocab_size, len(rows))
    cache = target.caches.new().stock
    for begin in range(0, padded.shape[1], chunk):
        tokens = mx.array(padded[:, begin : begin + chunk])
        found = target.compute(tokens, cache, outputs.layers)
        outputs.write(rows, np.full(len(rows), begin), lengths - begin, found)
        yield
