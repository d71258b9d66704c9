"""Networks with K/V rows of their own as students: EAGLE heads, MTP modules; see `specformer.py`.

Axes: n positions of a stretch of text, H hidden size, V rows of the head.

Of those that draft a token at a time, the first level reads what the target has processed. Every
further level reads what the one before it fed back, one position later, as when it drafts: row q of
level i stands after the root at position q - i, and sees the rows of the first level up to there,
and one row of each level since (training-time test of EAGLE-3, arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.proposers.autoregressive import AutoregressiveNetwork
from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.eagle.network import Eagle
from mlx_redrafter.proposers.kv_network import KvNetwork
from mlx_redrafter.proposers.mtp.network import Mtp
from mlx_redrafter.proposers.scores import COUPLING_WEIGHT
from mlx_redrafter.target.target import FINAL, Target
from mlx_redrafter.training.loss import Batch
from mlx_redrafter.training.students.chain import ChainStudent
from mlx_redrafter.training.teacher_cache import Shard


class KvStudent(ChainStudent):
    """A network that attends to what it read before.

    Args:
        network: The network.
        target: The teacher, whose embedding, and head if it has none, are the network's own.
    """

    reads_context = True
    network: KvNetwork

    def __init__(self, network: KvNetwork, target: Target):
        super().__init__(network)
        self.target = target
        captured = tuple(network.captured_layers(target))
        self.layers = () if captured == (FINAL,) else captured

    @property
    def learning_rate(self) -> float:
        """See `Student.learning_rate`: 1e-3 for 640 wide states, inverse to their width."""
        return min(0.64 / self.target.hidden_size, 1e-2)

    @property
    def head_rows(self) -> int:
        """See `Student.head_rows`."""
        return self.network.num_rows

    @property
    def row_ids(self) -> mx.array | None:
        """See `Student.row_ids`."""
        return self.network.row_ids

    @property
    def coupling_weight(self) -> float:
        """See `ChainStudent.coupling_weight`."""
        return COUPLING_WEIGHT

    def leave_target(self) -> None:
        """See `Student.leave_target`; it stays."""

    def calibrate(self, texts: Sequence[Shard]) -> None:
        """See `Student.calibrate`; such networks have none."""


class AutoregressiveStudent(KvStudent):
    """One that drafts a token at a time."""

    network: AutoregressiveNetwork

    def levels(self, network: AutoregressiveNetwork, batch: Batch) -> Iterator[mx.array]:
        """See `ChainStudent.levels`; the positions are those of one stretch."""
        embeddings = self.target.embed(batch.tokens[:, 0])
        features = network.fuse(batch.states)
        caches = [Rows() for _ in range(network.num_layers)]
        for level, mask in enumerate(level_masks(batch.sequences, batch.tokens.shape[1] - 1)):
            for cache in caches:
                cache.mask = mask
            outputs = network(features, embeddings, caches)
            logits = network.logits(outputs, self.target)[level:, : self.head_rows]
            logits = logits.astype(mx.float32)
            yield mx.pad(logits, [(0, level), (0, 0)])
            fed_back = network.feed_back(outputs)
            features = mx.concatenate([mx.zeros_like(fed_back[:1]), fed_back[:-1]])


class EagleStudent(AutoregressiveStudent):
    """An EAGLE head. That of EAGLE-3 begins as the target's head."""

    network: Eagle

    @property
    def name(self) -> str:  # type: ignore[override]
        """See `Student.name`."""
        papers = {1: "2401.15077", 3: "2503.01840"}
        config = self.network.config
        return f"an {config.name} head (arXiv {papers[config.version]})"

    def new_network(self) -> Eagle:
        """See `Student.new_network`."""
        return Eagle(self.network.config)

    def start(self, head: mx.array | None, token_ids: NDArray[np.int32] | None) -> None:
        """See `Student.start`."""
        network = self.network
        if token_ids is not None:
            network.token_ids = mx.array(token_ids)
            head = None if head is None else head[network.token_ids]
        if head is not None and network.config.version == 3:
            network.lm_head.weight = mx.array(head)

    def save(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """See `Student.save`."""
        save_drafter(self.network, folder, extra)


class MtpStudent(AutoregressiveStudent):
    """An MTP module.

    Args:
        network: The module.
        target: The teacher.
        values: The ``config.json`` of a model with such a module.
    """

    name = "an MTP module (arXiv 2412.19437)"
    network: Mtp

    def __init__(self, network: Mtp, target: Target, values: Mapping[str, Any]):
        super().__init__(network, target)
        self.values = values

    def new_network(self) -> Mtp:
        """See `Student.new_network`."""
        return Mtp(self.values)

    def start(self, head: mx.array | None, token_ids: NDArray[np.int32] | None) -> None:
        """See `Student.start`; all begins with random weights."""

    def save(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """See `Student.save`."""
        save_drafter(self.network, folder, extra)


class Rows:
    """K/V rows of one layer during training, those of all levels, with the newest level's mask."""

    offset = 0  # every level's rows stand at the positions of the first

    def __init__(self) -> None:
        self.mask: mx.array | None = None
        self._rows: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add rows; returns all."""
        if self._rows is not None:
            before = self._rows
            keys = mx.concatenate([before[0], keys], axis=2)
            values = mx.concatenate([before[1], values], axis=2)
        self._rows = keys, values
        return keys, values

    def make_mask(self, *arguments: Any, **options: Any) -> mx.array | None:
        """The newest level's mask, whatever mlx-lm asks for."""
        return self.mask


def level_masks(sequences: mx.array, num_levels: int) -> Iterator[mx.array]:
    """What rows of each level see: rows of all levels so far, bool, shape (n, levels * n).

    Args:
        sequences: Number of the sequence of each position, shape (n,).
        num_levels: Number of levels.
    """
    queries, keys = mx.arange(len(sequences))[:, None], mx.arange(len(sequences))[None]
    is_same = sequences[:, None] == sequences[None]
    for level in range(num_levels):
        aside = [keys == queries - level + i for i in range(1, level + 1)]
        yield mx.concatenate([is_same & (keys <= queries - level), *aside], axis=1)
