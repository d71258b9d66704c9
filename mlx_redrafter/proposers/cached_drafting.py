"""Drafts of one sequence by a model with K/V entries of its own; how entries are counted.

After a tree, one pass of L rows processes the accepted path, and only the device knows how many of
its entries count. Entries beyond are junk that no query sees, until later ones overwrite it. So
rolling back sets an offset, and the host reads nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.proposers.draft_network import NetworkDrafting
from mlx_redrafter.target.caches.draft_cache import DraftCache, DraftLineage

# Maximum number of tokens per pass while a drafter reads what it has not seen yet.
READ_STEP_SIZE = 512


class CachedDrafting(NetworkDrafting):
    """Drafts of one sequence, and the entries that they need.

    ``stock`` has mlx-lm's cache of each layer. If they ``is_shared`` with the caller, the sequence
    leaves them in order.

    Attributes:
        length: Number of entries whose tokens the host knows.
        num_without_entry: Number of tokens of a sequence without an entry: 1 if an entry belongs to
            a pair of them.
    """

    num_without_entry: ClassVar[int] = 0

    def __init__(self, network: Any, couple_noise: bool, stock: Sequence[Any], is_shared: bool):
        super().__init__(network, couple_noise)
        self.cache = DraftCache(stock)
        self.length = self.cache.num_rows
        self._is_shared = is_shared
        # Number of entries beyond those of the target's tokens; not 0 after a prompt cache.
        self._excess: int | None = None
        # The pass after which a tree was drafted last. The entries of its tokens exist already, and
        # the host reads their number later.
        self._flight: Pass | None = None

    @property
    @abstractmethod
    def num_unread(self) -> int:
        """Number of tokens or pairs that the host knows and that have no entry yet."""

    @abstractmethod
    def note(self, flight: Pass) -> None:
        """Count a pass as unread, after which nothing was drafted; the host knows its tokens."""

    @abstractmethod
    def process_unread(self, flight: Pass | None = None) -> mx.array:
        """Process what is unread and count its entries; outputs, one row for each.

        The accepted path of a ``flight`` follows what is unread; it is not counted.
        """

    def read_flight(self, flight: Pass) -> mx.array:
        """Process everything up to a pass's bonus token; the output after it, one row."""
        outputs = self.process_unread(flight)
        return outputs[outputs.shape[0] - 1 - flight.max_accepted + flight.num_accepted]

    def begin(self, flight: Pass) -> None:
        """Count the pass before, as a tree is drafted after this one."""
        self.count_flight(flight)
        self._flight = flight

    def skip(self, flight: Pass) -> None:
        self.count_flight(flight)
        self.note(flight)

    def trim_to(self, length: int) -> None:
        """Make the entries that are missing, and keep exactly those of the sequence."""
        if not self._is_shared or self._excess is None:
            return
        self.count_flight()
        self.read_unread()
        self.cache.keep(min(length - self.num_without_entry + self._excess, self.length))

    def read_unread(self) -> None:
        """Make the entries that are missing; waits for the device."""
        if self.num_unread:
            self.process_unread()
            mx.eval([layer.stock.state for layer in self.cache.layers])

    def lineage_after(self, flight: Pass) -> DraftLineage:
        """Begin the lineage of drafts after a pass whose path was processed."""
        return DraftLineage(self.length, self.length + flight.num_accepted, self.cache.num_rows)

    def count_flight(self, following: Pass | None = None) -> None:
        """Count the entries of the newest pass whose path was read; waits for its outcome.

        The root of the pass ``following`` it is the newest token that the host knows.
        """
        if self._flight is not None:
            self.length += len(self._flight.tokens)
            self._flight = None
        if following is not None:
            expected = following.length + 1 - self.num_without_entry
            self._excess = self.length + self.num_unread - expected
