"""A kind of proposer that exists in the tests alone: the next token from a table of pairs.

Together with an entry in `proposers.KINDS` this folder is all that a new kind needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx

from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.proposers.checkpoint import Checkpoint
from mlx_redrafter.proposers.draft_network import DraftNetwork
from mlx_redrafter.proposers.kind import Shapes
from mlx_redrafter.proposers.search import build_tree, log_probs, search_all
from mlx_redrafter.proposers.stored_config import StoredConfig
from mlx_redrafter.proposers.target_facts import UNKNOWN, TargetFacts
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree

NAME = "table of pairs"


def recognise(config: Mapping[str, Any], shapes: Shapes) -> bool:
    return config.get("model_type") == ToyConfig.model_type


def load(path_or_repo: str | Path, target: TargetFacts = UNKNOWN) -> Toy:
    stored = Checkpoint(path_or_repo)
    config = ToyConfig.from_dict(stored.config)
    target.check(config)
    return stored.fill(Toy(config))


@dataclass(frozen=True)
class ToyConfig(StoredConfig):
    model_type: ClassVar[str] = "toy_pairs"
    draft_vocab_size: ClassVar[None] = None
    vocab_size: int
    hidden_size: int


class Toy(DraftNetwork):
    """Logits of the token after each token, whatever came before."""

    def __init__(self, config: ToyConfig):
        super().__init__()
        self.config = config
        self.table = mx.zeros((config.vocab_size, config.vocab_size))

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> ToyDrafting:
        return ToyDrafting(self, couple_noise)


class ToyDrafting:
    reader = None

    def __init__(self, network: Toy, couple_noise: bool):
        self.network = network
        self.couple_noise = couple_noise

    def matches(self, least: float) -> None:
        """Return None, as a network always has something to propose."""

    def propose(self, flight: Pass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        rank = None
        if noise is not None and self.couple_noise:
            rank = partial(noise.rank, token_ids=None, weight=1.0)
        levels = ToyLevels(self.network, flight.root)
        return build_tree(search_all(levels, plan.shape, rank).alone, flight.root, plan)

    def skip(self, flight: Pass) -> None:
        """Ignore a pass without drafts."""

    def trim_to(self, length: int) -> None:
        """Leave everything, as there are no caches."""


class ToyLevels:
    """The table after one root."""

    def __init__(self, network: Toy, root: mx.array):
        self.network = network
        self.root = root
        self.num_rows = network.num_rows
        self.to_token_ids = network.to_token_ids

    def first(self) -> mx.array:
        return log_probs(self.network.table[self.root])

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        return log_probs(self.network.table[tokens])
