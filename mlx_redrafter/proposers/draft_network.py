"""Networks that propose tokens of a target from its states, and the drafts that they make of them.

Each network is a `Proposer`. Several sequences may draft in the same passes, which read its weights
once.

Axes: V tokens that the network proposes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.protocols import Drafting, Group, StateReader
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.proposers.kind import TargetFacts
from mlx_redrafter.proposers.search import (
    COUPLING_WEIGHT,
    Expansion,
    NoiseRank,
    build_tree,
    build_trees,
    rank_from,
)
from mlx_redrafter.target.caches.draft_cache import DraftCache, DraftLineage
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree

# Maximum number of tokens per pass while a drafter reads what it has not seen yet.
READ_STEP_SIZE = 512


class DraftNetwork(nn.Module, ABC):
    """A network with a head, or one that uses the target's head.

    ``token_ids``, integer of shape (V,), maps rows of the head to token ids of the target if the
    head covers only part of the vocabulary (``config.draft_vocab_size``); otherwise it is absent.

    Attributes:
        config: Sizes of the target and of the head, and the calibration of the ranking.
        num_layers: Number of its layers with K/V entries.
        is_joint: Whether it can draft for several sequences together.
    """

    config: Any
    token_ids: mx.array
    num_layers: int = 0
    max_length: int | None = None
    is_joint: bool = True

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        if config.draft_vocab_size is not None:
            self.token_ids = mx.arange(config.draft_vocab_size, dtype=mx.int32)

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        return (self,)

    @property
    def num_rows(self) -> int:
        return self.config.draft_vocab_size or self.config.vocab_size

    @property
    def row_ids(self) -> mx.array | None:
        """Token ids of the rows of the head; None if row and id are the same."""
        return self.get("token_ids")

    @property
    def coupling_weight(self) -> float:
        """Weight of the target's noise when it ranks drafts, 0 to 1."""
        return getattr(self.config, "coupling_weight", COUPLING_WEIGHT)

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        sizes = target.hidden_size, target.vocab_size, tokenizer.vocab_size
        TargetFacts(None, *sizes).check(self.config)

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> Drafting:
        return NetworkDrafting(self, couple_noise)

    @abstractmethod
    def expand(self, group: Group, shape: DraftShape, rank: NoiseRank | None) -> Expansion:
        """Score continuations of the bonus tokens of passes, as `search_all` does, a root for each.

        ``rank`` ranks the rows of all sequences, in their order and equally many for each; None
        without noise.
        """

    def to_token_ids(self, rows: mx.array) -> mx.array:
        """Return token ids, int32, of rows of the head; any shape."""
        ids = self.row_ids
        return (rows if ids is None else ids[rows]).astype(mx.int32)

    def stored_config(self) -> dict[str, Any]:
        """Return the keys of ``config.json`` that describe the network."""
        return self.config.to_dict()

    def stored_name(self, own: str) -> str:
        """Return the name that a parameter has in the network's checkpoint."""
        return own


class ResBlock(nn.Module):
    """``x + silu(linear(x))``, shape (W, D) to (W, D)."""

    def __init__(self, dims: int, bias: bool = True):
        super().__init__()
        self.linear = nn.Linear(dims, dims, bias)

    def __call__(self, x: mx.array) -> mx.array:
        return x + nn.silu(self.linear(x))


class GatedMlp(nn.Module):
    """``down_proj(activate(gate_proj(x), up_proj(x)))``, shape (..., H) to (..., H)."""

    def __init__(
        self, hidden_size: int, width: int, activate: Callable[[mx.array, mx.array], mx.array]
    ):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)
        self.activate = activate

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.activate(self.gate_proj(x), self.up_proj(x)))


def dtype_of(layer: Any) -> mx.Dtype:
    """Return the floating-point dtype that a linear layer computes in, quantised or not."""
    return layer.scales.dtype if "scales" in layer else layer.weight.dtype


class NetworkDrafting:
    """Drafts of one sequence by a network that may draft for several, a `JointDrafting`.

    Without entries of its own it keeps nothing between steps. If it may ``couple_noise``, the noise
    that the target will sample with ranks the drafts.
    """

    def __init__(self, network: Any, couple_noise: bool):
        self.network, self.couple_noise = network, couple_noise

    @property
    def reader(self) -> StateReader | None:
        return None

    def rank(self, noise: GumbelNoise | None) -> NoiseRank | None:
        """Return the function that ranks drafts with the noise of the target's choices, if any."""
        if noise is None or not self.couple_noise:
            return None
        network = self.network
        return partial(noise.rank, token_ids=network.row_ids, weight=network.coupling_weight)

    def rank_all(self, noises: Sequence[GumbelNoise]) -> NoiseRank | None:
        """Return `rank` for the rows of several sequences, equally many of each and in their order.

        Their noise is of equally many depths, with parameters that differ in the seeds only.
        """
        count, values = len(noises), mx.concatenate([one.values for one in noises])
        starts = mx.arange(count, dtype=mx.int32) * (values.shape[0] // count)
        return rank_from(starts, self.rank(GumbelNoise(noises[0].params, values)))

    @property
    def is_joint(self) -> bool:
        """Whether this sequence can be drafted for together with others."""
        return self.network.is_joint

    def matches(self, least: float) -> None:
        """Return None, as a network always has something to propose."""

    def begin(self, flight: Pass) -> None:
        """Note a pass, after which a tree is drafted."""

    def propose(self, flight: Pass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        self.begin(flight)
        found = self.network.expand([(self, flight)], plan.shape, self.rank(noise))
        return build_tree(found.alone, flight.root, plan)

    def propose_all(
        self, group: Group, plan: DraftPlan, noises: Sequence[GumbelNoise | None]
    ) -> list[TokenTree | None] | None:
        are_alike = all(one.couple_noise == self.couple_noise for one, _ in group)
        if not (are_alike and all(one.is_joint for one, _ in group)):
            return None
        for drafting, flight in group:
            drafting.begin(flight)
        known = [one for one in noises if one is not None]
        found = self.network.expand(group, plan.shape, self.rank_all(known) if known else None)
        return list(build_trees(found, [flight.root for _, flight in group], plan))

    def skip(self, flight: Pass) -> None:
        """Ignore a pass without drafts."""

    def trim_to(self, length: int) -> None:
        """Leave everything, as there are no caches."""


class CachedDrafting(NetworkDrafting):
    """Drafts of one sequence by a model with K/V entries of its own, and these entries.

    After a tree, one pass of L rows processes the accepted path, and only the device knows how many
    of its entries count. Entries beyond are junk that no query sees, until later ones overwrite it.
    So rolling back sets an offset, and the host reads nothing.

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
